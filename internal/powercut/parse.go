package powercut

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Recording is what a run did to a directory.
type Recording struct {
	// Said is what was written to pipes and sockets, for tests to find the
	// moments at which something was promised.
	Said []Said
	// Mapped are the files below the directory that were mapped for writing.
	Mapped []string

	root  string // absolute
	steps []step
	ends  int
}

// Said is one write to a pipe or a socket. At is the moment it began.
type Said struct {
	At   int
	Text string
}

// Moments is how many there are, from 0, when nothing has happened.
func (r *Recording) Moments() int { return r.ends }

// Written calls fn for each write to a file of the directory, with the moment
// it began and the file's name below the directory.
func (r *Recording) Written(fn func(at int, name string, data []byte)) {
	for _, s := range r.steps {
		if s.kind == stepWrite {
			fn(s.at, s.name, s.data)
		}
	}
}

// step is one change of the directory, or one sync. Names are below the root;
// "." is the root itself.
type step struct {
	kind   stepKind
	at     int // when it began; of a sync, when it returned
	until  int // when it had returned; of a sync, when it began
	name   string
	to     string // of a rename
	offset int64  // of a write; of a truncation, the new size
	data   []byte
}

type stepKind int

const (
	stepCreate stepKind = iota // a file, if it is not there
	stepMkdir
	stepWrite
	stepTruncate
	stepRename
	stepRemove
	stepSync
)

// call is one line of the trace, or two when another thread came between.
type call struct {
	name        string
	args        []string
	entry, exit int
	ret         string // "" if it never returned
}

// Load reads what Record wrote about the directory root.
func Load(trace, root string) (*Recording, error) {
	f, err := os.Open(trace)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	calls, lines, err := readCalls(f)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", trace, err)
	}
	if root, err = filepath.Abs(root); err != nil {
		return nil, err
	}
	r := &Recording{root: root, ends: lines + 1}
	positions := map[string]int64{}
	for _, c := range calls {
		if err := r.add(c, positions); err != nil {
			return nil, fmt.Errorf("%s line %d: %w", trace, c.entry, err)
		}
	}
	// A sync counts when it has returned, everything else from its beginning.
	slices.SortStableFunc(r.steps, func(a, b step) int { return a.at - b.at })
	return r, nil
}

// readCalls returns the calls in the order they began, and the number of lines.
func readCalls(f io.Reader) (calls []*call, lines int, err error) {
	in := bufio.NewReaderSize(f, 1<<20)
	open := map[string]*call{} // by thread
	for {
		line, err := in.ReadString('\n')
		if err == io.EOF { // a last line without an end is a call cut off
			return calls, lines, nil
		}
		if err != nil {
			return nil, 0, err
		}
		lines++
		thread, text, _ := strings.Cut(strings.TrimRight(line, "\n"), " ")
		text = strings.TrimLeft(text, " ")
		switch {
		case strings.HasPrefix(text, "<... "):
			if c := open[thread]; c != nil {
				_, c.ret, _ = cutLast(text, " = ")
				c.exit = lines
				delete(open, thread)
			}
		case strings.HasPrefix(text, "+++"), strings.HasPrefix(text, "---"), strings.HasPrefix(text, "strace:"):
		default:
			name, rest, ok := strings.Cut(text, "(")
			if !ok {
				return nil, 0, fmt.Errorf("line %d is no call: %.80q", lines, text)
			}
			c := &call{name: name, entry: lines, exit: 1 << 62}
			calls = append(calls, c)
			if begun, unfinished := strings.CutSuffix(rest, " <unfinished ...>"); unfinished {
				c.args = strings.Split(begun, ", ")
				open[thread] = c
				continue
			}
			args, ret, ok := cutLast(rest, " = ")
			if !ok {
				return nil, 0, fmt.Errorf("line %d has no result: %.80q", lines, text)
			}
			c.args = strings.Split(strings.TrimSuffix(strings.TrimRight(args, " "), ")"), ", ")
			c.ret, c.exit = ret, lines
		}
	}
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// failed reports whether the call returned an error, or nothing ("?").
func (c *call) failed() bool { return strings.HasPrefix(c.ret, "-") || strings.HasPrefix(c.ret, "?") }

// add turns a call into steps. positions are those of the files that are
// written from where the last write ended; two descriptors of one file that are
// both written so are not told apart.
func (r *Recording) add(c *call, positions map[string]int64) error {
	if c.failed() {
		return nil
	}
	switch c.name {
	case "openat", "open", "creat", "openat2":
		return r.addOpen(c, positions)
	case "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "link", "linkat", "symlink", "symlinkat", "truncate":
		return r.addNamed(c)
	case "mmap":
		if name, below := r.below(descriptor(c.args[4])); below && strings.Contains(c.args[2], "PROT_WRITE") && strings.Contains(c.args[3], "MAP_SHARED") {
			r.Mapped = append(r.Mapped, name)
		}
		return nil
	}
	file := descriptor(c.args[0])
	name, below := r.below(file)
	s := step{at: c.entry, until: c.exit, name: name}
	switch {
	case !below:
		if c.name == "write" && (strings.HasPrefix(file, "pipe:") || strings.HasPrefix(file, "socket:") || strings.HasPrefix(file, "TCP")) {
			r.Said = append(r.Said, Said{c.entry, string(text(c.args[1]))})
		}
		return nil
	case c.name == "lseek":
		at, err := strconv.ParseInt(c.ret, 10, 64)
		positions[name] = at
		return err
	case c.name == "write":
		s.kind, s.data, s.offset = stepWrite, c.written(), positions[name]
		positions[name] += int64(len(s.data))
	case c.name == "pwrite64":
		at, err := strconv.ParseInt(c.args[3], 10, 64)
		if err != nil {
			return err
		}
		s.kind, s.data, s.offset = stepWrite, c.written(), at
	case c.name == "ftruncate":
		size, err := strconv.ParseInt(c.args[1], 10, 64)
		if err != nil {
			return err
		}
		s.kind, s.offset = stepTruncate, size
	case c.name == "fsync", c.name == "fdatasync":
		if c.ret == "" {
			return nil
		}
		s.kind, s.at, s.until = stepSync, c.exit, c.entry
	default:
		return fmt.Errorf("%s of %s is not modelled", c.name, name)
	}
	r.steps = append(r.steps, s)
	return nil
}

// written is what a write has written: less than it wanted, if it said so.
func (c *call) written() []byte {
	data := text(c.args[1])
	if n, err := strconv.Atoi(c.ret); err == nil && n < len(data) {
		return data[:n]
	}
	return data
}

func (r *Recording) addOpen(c *call, positions map[string]int64) error {
	args := c.args
	dir := ""
	if c.name == "openat" || c.name == "openat2" {
		dir, args = descriptor(args[0]), args[1:]
	}
	name, below := r.below(join(dir, string(text(args[0]))))
	if !below || c.ret == "" {
		return nil
	}
	positions[name] = 0
	flags := strings.Join(args[1:], " ")
	if strings.Contains(flags, "O_APPEND") {
		return fmt.Errorf("%s is opened for appending, which is not modelled", name)
	}
	if c.name == "creat" || strings.Contains(flags, "O_CREAT") {
		r.steps = append(r.steps, step{kind: stepCreate, at: c.entry, until: c.exit, name: name})
	}
	if c.name == "creat" || strings.Contains(flags, "O_TRUNC") {
		r.steps = append(r.steps, step{kind: stepTruncate, at: c.entry, until: c.exit, name: name})
	}
	return nil
}

// addNamed adds a change of a directory.
func (r *Recording) addNamed(c *call) error {
	var names []string
	var below []bool
	dir := ""
	for _, a := range c.args {
		if a[0] != '"' {
			dir = descriptor(a)
			continue
		}
		name, ok := r.below(join(dir, string(text(a))))
		names, below, dir = append(names, name), append(below, ok), ""
	}
	if !slices.Contains(below, true) {
		return nil
	}
	s := step{at: c.entry, until: c.exit, name: names[0]}
	switch {
	case strings.HasPrefix(c.name, "rename") && below[0] && below[1]:
		s.kind, s.to = stepRename, names[1]
	case strings.HasPrefix(c.name, "unlink"), c.name == "rmdir":
		s.kind = stepRemove
	case strings.HasPrefix(c.name, "mkdir"):
		s.kind = stepMkdir
	default:
		return fmt.Errorf("%s of %v is not modelled", c.name, names)
	}
	r.steps = append(r.steps, s)
	return nil
}

func join(dir, name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(dir, name)
}

// below returns a path's name in the directory.
func (r *Recording) below(path string) (string, bool) {
	name, err := filepath.Rel(r.root, path)
	if err != nil || !filepath.IsAbs(path) || name == ".." || strings.HasPrefix(name, "../") {
		return path, false
	}
	return name, true
}

// descriptor is what strace says of a file descriptor, 5</a/file>. One that was
// removed meanwhile has no name any more.
func descriptor(arg string) string {
	_, name, ok := strings.Cut(arg, "<")
	name, end, _ := strings.Cut(name, ">")
	if !ok || end != "" {
		return ""
	}
	return string(unhex(name))
}

// text is the content of a string argument.
func text(arg string) []byte { return unhex(strings.Trim(arg, `"`)) }

// unhex decodes \x2f\x74…
func unhex(s string) []byte {
	if !strings.HasPrefix(s, `\x`) {
		return []byte(s)
	}
	digits := make([]byte, 0, len(s)/2)
	for i := 0; i+4 <= len(s); i += 4 {
		digits = append(digits, s[i+2], s[i+3])
	}
	b := make([]byte, len(digits)/2)
	if _, err := hex.Decode(b, digits); err != nil {
		panic(fmt.Sprintf("strace printed %.40q", s))
	}
	return b
}
