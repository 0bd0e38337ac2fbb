package powercut

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Disk is the directory of a recording at a moment.
type Disk struct {
	rec  *Recording
	next int // of the steps
	now  int
	root *node
	lies func(name string) bool
}

// node is a file or a directory, whatever its name is.
type node struct {
	dir     bool
	now     map[string]*node // of a directory: as the program sees it
	names   map[string]*node // as it is on the disk for sure
	data    []byte           // of a file, the same
	pending []change         // since then, in order
}

// change is one that is not yet on the disk for sure: of a directory, the names
// that it sets, nil for one it removes; of a file, bytes or its size.
type change struct {
	at, until int
	names     map[string]*node
	data      []byte
	offset    int64
	truncate  bool
}

func newDir() *node {
	return &node{dir: true, now: map[string]*node{}, names: map[string]*node{}}
}

// Disk returns an empty directory at moment 0.
func (r *Recording) Disk() *Disk {
	return &Disk{rec: r, root: newDir(), lies: func(string) bool { return false }}
}

// Lie makes syncs of these files, from now on, do nothing, like a disk that
// says it has written what is in its cache.
func (d *Disk) Lie(about func(name string) bool) { d.lies = about }

// Advance goes on to a later moment.
func (d *Disk) Advance(to int) error {
	d.now = to
	for ; d.next < len(d.rec.steps) && d.rec.steps[d.next].at <= to; d.next++ {
		s := d.rec.steps[d.next]
		if err := d.apply(s); err != nil {
			return fmt.Errorf("line %d: %w", s.at, err)
		}
	}
	return nil
}

// find returns a node by its present name, nil if there is none.
func (d *Disk) find(name string) *node {
	n := d.root
	if name == "." {
		return n
	}
	for part := range strings.SplitSeq(name, "/") {
		if n == nil || !n.dir {
			return nil
		}
		n = n.now[part]
	}
	return n
}

// parent returns the directory that a name is in.
func (d *Disk) parent(name string) (*node, string, error) {
	dir := d.find(filepath.Dir(name))
	if dir == nil || !dir.dir {
		return nil, "", fmt.Errorf("%s: its directory was never made", name)
	}
	return dir, filepath.Base(name), nil
}

func (d *Disk) apply(s step) error {
	c := change{at: s.at, until: s.until, data: s.data, offset: s.offset, truncate: s.kind == stepTruncate}
	switch s.kind {
	case stepWrite, stepTruncate, stepSync:
		n := d.find(s.name)
		switch {
		case n == nil:
			return fmt.Errorf("%s was never made", s.name)
		case s.kind != stepSync:
			n.pending = append(n.pending, c)
		case !d.lies(s.name):
			n.sync(s.until)
		}
		return nil
	}
	dir, base, err := d.parent(s.name)
	if err != nil {
		return err
	}
	was := dir.now[base]
	switch s.kind {
	case stepCreate:
		if was == nil {
			dir.change(c, map[string]*node{base: {}})
		}
	case stepMkdir:
		dir.change(c, map[string]*node{base: newDir()})
	case stepRemove:
		dir.change(c, map[string]*node{base: nil})
	case stepRename:
		to, toBase, err := d.parent(s.to)
		switch {
		case err != nil:
			return err
		case was == nil:
			return fmt.Errorf("%s was never made", s.name)
		case to == dir:
			dir.change(c, map[string]*node{base: nil, toBase: was})
		default:
			to.change(c, map[string]*node{toBase: was})
			dir.change(c, map[string]*node{base: nil})
		}
	}
	return nil
}

// change is made in the program's view, and waits for a sync.
func (n *node) change(c change, names map[string]*node) {
	c.names = names
	set(n.now, names)
	n.pending = append(n.pending, c)
}

func set(names, to map[string]*node) {
	for name, n := range to {
		if n == nil {
			delete(names, name)
		} else {
			names[name] = n
		}
	}
}

// sync makes safe what had returned before the sync began.
func (n *node) sync(began int) {
	kept := n.pending[:0]
	for _, c := range n.pending {
		switch {
		case c.until > began:
			kept = append(kept, c)
		case n.dir:
			set(n.names, c.names)
		default:
			n.data = c.on(n.data)
		}
	}
	n.pending = kept
}

// on returns a file's content after the change.
func (c *change) on(data []byte) []byte {
	if c.truncate {
		if c.offset <= int64(len(data)) {
			return data[:c.offset:c.offset]
		}
		return append(data, make([]byte, c.offset-int64(len(data)))...)
	}
	if short := c.offset + int64(len(c.data)) - int64(len(data)); short > 0 {
		data = append(data, make([]byte, short)...)
	}
	copy(data[c.offset:], c.data)
	return data
}

// Loss is how much of what was not synced a power cut takes.
type Loss int

const (
	Everything Loss = iota // nothing was written behind the program's back
	Nothing                // all of it is there, as after kill -9
	Tail                   // all calls before some moment were written, none after
	Some                   // any subset of the calls
	Torn                   // any subset, and of some calls only some sectors
	losses
)

func (l Loss) String() string {
	return [...]string{"everything", "nothing", "tail", "some", "torn"}[l]
}

// AnyLoss chooses one.
func AnyLoss(random *rand.Rand) Loss { return Loss(random.IntN(int(losses))) }

// Cut writes the directory to dir as a power cut now may leave it. The disk
// itself is not changed.
func (d *Disk) Cut(dir string, loss Loss, random *rand.Rand) error {
	k := &cut{loss: loss, random: random, chance: []float64{0.1, 0.5, 0.9}[random.IntN(3)], before: random.IntN(d.now + 1)}
	return k.write(d.root, dir)
}

type cut struct {
	loss   Loss
	random *rand.Rand
	chance float64 // that a call is kept, of Some and Torn
	before int     // the first moment that is lost, of Tail
}

func (k *cut) keeps(c *change) bool {
	switch k.loss {
	case Everything:
		return false
	case Nothing:
		return true
	case Tail:
		return c.at < k.before
	}
	return k.random.Float64() < k.chance
}

func (k *cut) write(n *node, path string) error {
	if !n.dir {
		return os.WriteFile(path, k.content(n), 0o600)
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	names := maps.Clone(n.names)
	for _, c := range n.pending {
		if k.keeps(&c) {
			set(names, c.names)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) { // the order of the random numbers
		if err := k.write(names[name], filepath.Join(path, name)); err != nil {
			return err
		}
	}
	return nil
}

func (k *cut) content(n *node) []byte {
	data := bytes.Clone(n.data)
	for _, c := range n.pending {
		switch {
		case !k.keeps(&c):
		case k.loss == Torn && !c.truncate && k.random.IntN(2) == 0:
			data = k.torn(&c, data)
		default:
			data = c.on(data)
		}
	}
	return data
}

// torn applies some of the sectors of a write.
func (k *cut) torn(c *change, data []byte) []byte {
	sector := []int64{512, 4096}[k.random.IntN(2)]
	end := c.offset + int64(len(c.data))
	for at := c.offset; at < end; {
		next := min(end, (at/sector+1)*sector)
		if k.random.IntN(2) == 0 {
			part := change{offset: at, data: c.data[at-c.offset : next-c.offset]}
			data = part.on(data)
		}
		at = next
	}
	return data
}
