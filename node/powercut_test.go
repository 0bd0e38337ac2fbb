package node_test

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite" // driver "sqlite", for another program

	"outlog/consumer"
	"outlog/internal/powercut"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// The power-cut tests record every write and fsync of a node under load, and
// look at what a power cut at any moment would have left. OUTLOG_TEST_SEED
// repeats the choice of moments and losses, OUTLOG_TEST_TRACE the recording,
// which is kept when a test fails.

const (
	powerMode     = "OUTLOG_TEST_POWER"
	powerOutsider = "OUTLOG_TEST_OUTSIDER"
)

// powerChild is what is recorded: two lives of a node under load, with another
// program that appends at NORMAL
// beside it, also while the node appends nothing
// itself. The first life ends in order, the second in the middle of its work.
func powerChild(dir, synchronous string) int {
	for life := range 2 {
		if err := powerLife(dir, synchronous, life); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 3
		}
	}
	return 0
}

func powerLife(dir, synchronous string, life int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	n, err := node.Open(ctx, node.Options{Dir: dir, Synchronous: synchronous})
	if err != nil {
		return err
	}
	err = n.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY) STRICT;`+effectsTable)
		return err
	})
	if err != nil {
		return err
	}
	if err := errorsOf(n.Handle(recorder("a", "Placed")), n.Handle(noting("b", n))); err != nil {
		return err
	}
	ran := make(chan error, 1)
	go func() { ran <- n.Run(ctx) }()
	outsider := exec.CommandContext(ctx, os.Args[0])
	outsider.Env = append(os.Environ(), powerOutsider+"="+node.DatabasePath(dir))
	outsider.Stderr = os.Stderr
	if err := outsider.Start(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 60 {
				if err := placeAndSay(ctx, n, fmt.Sprint(life, g, i%2)); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}
		})
	}
	wg.Wait()
	if life > 0 {
		_ = outsider.Process.Kill()
		return nil // as if killed
	}
	return errorsOf(outsider.Wait(), n.Close(), <-ran)
}

// noting is a recorder that also appends an event for each event.
func noting(name string, n *node.Node) consumer.Options {
	o := recorder(name)
	o.Routes = []consumer.Route{consumer.Apply("Placed", func(ctx context.Context, tx *store.Tx, e consumer.Event[placed]) error {
		_, err := n.Append(ctx, tx, outbox.Event{AggregateType: "note", AggregateID: e.AggregateID, Type: "Noted", Data: placed{}})
		return errorsOf(err, record(name)(ctx, tx, e))
	})}
	return o
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// placeAndSay stores an order with its event, and says so when it is told that
// both are durable.
func placeAndSay(ctx context.Context, n *node.Node, aggregate string) error {
	var id string
	err := n.Update(ctx, func(tx *store.Tx) error {
		a, err := n.Append(ctx, tx, outbox.Event{AggregateType: "order", AggregateID: aggregate, Type: "Placed", Data: placed{}})
		if err != nil {
			return err
		}
		id = a[0].ID
		_, err = tx.ExecContext(ctx, `INSERT INTO orders VALUES (?)`, id)
		return err
	})
	if err == nil {
		_, err = fmt.Println("ack", id)
	}
	return err
}

// powerOutside is another program: plain SQL on a connection of its own, whose
// commits do not wait for the disk.
func powerOutside(path string) int {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(60000)&_pragma=synchronous(1)")
	if err == nil {
		db.SetMaxOpenConns(1)
		for i := 0; err == nil && i < 300; i++ {
			_, err = db.Exec(`INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload) VALUES ('order', ?, 'Placed', '{"n":1}')`, fmt.Sprint("outside", i%5))
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "outsider:", err)
		return 3
	}
	return 0
}

// power is a recorded run, and what it had promised by when.
type power struct {
	*powercut.Recording
	acked     map[string]int // event id → moment at which the caller was told
	published map[string]int // event id → moment at which the stream's file was written
	random    *rand.Rand
}

func recordPower(t *testing.T, synchronous string) *power {
	t.Helper()
	if err := powercut.Available(); err != nil {
		t.Skip("THE POWER CUT IS NOT TESTED: ", err)
	}
	dir := filepath.Join(t.TempDir(), "data")
	trace := os.Getenv("OUTLOG_TEST_TRACE")
	if trace == "" {
		trace = filepath.Join(os.TempDir(), fmt.Sprintf("outlog-%s-%d.strace", t.Name(), os.Getpid()))
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("OUTLOG_TEST_TRACE=%s", trace)
			} else {
				_ = os.Remove(trace)
			}
		})
		env := []string{childDir + "=" + dir, powerMode + "=" + synchronous, "GOMAXPROCS=2"}
		require.NoError(t, powercut.Record(trace, t.Output(), env, os.Args[0]))
	}
	seed := testSeed(t)
	began := time.Now()
	r, err := powercut.Load(trace, filepath.Dir(dir))
	require.NoError(t, err)
	p := &power{Recording: r, acked: map[string]int{}, published: map[string]int{}, random: rand.New(rand.NewPCG(seed, 0))}
	for _, s := range r.Said {
		if id, ok := strings.CutPrefix(s.Text, "ack "); ok {
			p.acked[strings.TrimSpace(id)] = s.At
		}
	}
	ids := regexp.MustCompile(`ce-id: ?([0-9A-HJKMNP-TV-Z]{26})`)
	r.Written(func(at int, name string, data []byte) {
		if !strings.HasSuffix(name, ".blk") {
			return
		}
		for _, m := range ids.FindAllSubmatch(data, -1) {
			if _, again := p.published[string(m[1])]; !again {
				p.published[string(m[1])] = at
			}
		}
	})
	t.Logf("%d moments, %d acknowledged, %d published, read in %v", r.Moments(), len(p.acked), len(p.published), time.Since(began).Round(time.Millisecond))
	require.Len(t, p.acked, 480)
	require.Greater(t, len(p.published), 480)
	for _, name := range r.Mapped {
		require.Equal(t, "data/outlog.db-shm", name, "only what SQLite makes anew may be written through memory")
	}
	return p
}

// at returns those whose moment has come.
func at(moment int, ids map[string]int) (due []string) {
	for id, m := range ids {
		if m <= moment {
			due = append(due, id)
		}
	}
	slices.Sort(due)
	return due
}

// moments chooses when to cut the power: half of the moments are those at which
// something was just promised, to a caller or on the stream.
func (p *power) moments(n int) (chosen []int) {
	promised := slices.Sorted(maps.Values(p.acked))
	promised = append(promised, slices.Sorted(maps.Values(p.published))...)
	for i := range n {
		m := p.random.IntN(p.Moments())
		if i%2 == 0 {
			m = promised[p.random.IntN(len(promised))]
		}
		chosen = append(chosen, m)
	}
	slices.Sort(chosen)
	return chosen
}

// cut writes what a power cut leaves, into a directory of its own that a data
// directory is in.
func (p *power) cut(t *testing.T, d *powercut.Disk, loss powercut.Loss) (dir string) {
	t.Helper()
	root := t.TempDir()
	dir = filepath.Join(root, "data")
	require.NoError(t, d.Cut(root, loss, p.random))
	shm := node.DatabasePath(dir) + "-shm"
	if _, err := os.Stat(shm); err == nil && p.random.IntN(2) == 0 { // whatever memory was written back
		junk := make([]byte, 32<<10)
		for i := range junk {
			junk[i] = byte(p.random.Uint32())
		}
		require.NoError(t, os.WriteFile(shm, junk, 0o600))
	} else {
		_ = os.Remove(shm)
	}
	return dir
}

// remains is what a database holds after a power cut.
type remains struct {
	log     []string // event ids in order
	orders  []string // sorted
	cursors map[string]int64
}

func (r remains) lacks(ids []string) (missing []string) {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return slices.Contains(r.log, id) })
}

// look opens a directory as a node does, without letting it move anything, and
// checks what must hold whatever was lost: all checks pass, an order is there
// if and only if its event is, and each consumer has the effects of exactly the
// events up to its cursor.
func look(t *testing.T, dir string) (r remains) {
	t.Helper()
	n, err := node.Open(t.Context(), node.Options{Dir: dir, NoBroker: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, n.Close()) }()
	verify(t, n)
	r.log = column(t, n, `SELECT event_id FROM outbox ORDER BY position`)
	if len(column(t, n, `SELECT name FROM sqlite_schema WHERE name = 'effects'`)) == 0 {
		require.Empty(t, r.log)
		return r
	}
	r.orders = column(t, n, `SELECT id FROM orders ORDER BY id`)
	require.Equal(t, column(t, n, `SELECT event_id FROM outbox WHERE type = 'Placed' AND aggregate_id NOT LIKE 'outside%' ORDER BY event_id`), r.orders)
	r.cursors = map[string]int64{}
	for _, name := range column(t, n, `SELECT name FROM outlog_consumers`) {
		var cursor int64
		require.NoError(t, n.Store().Reader().QueryRow(`SELECT position FROM outlog_consumers WHERE name = ?`, name).Scan(&cursor))
		require.Equal(t, column(t, n, `SELECT event_id FROM outbox WHERE type = 'Placed' AND position <= ? ORDER BY position`, cursor), effectIDs(t, n, name))
		r.cursors[name] = cursor
	}
	return r
}

// column returns the only column of a query.
func column(t *testing.T, n *node.Node, query string, args ...any) (values []string) {
	t.Helper()
	rows, err := n.Store().Reader().QueryContext(t.Context(), query, args...)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var v string
		require.NoError(t, rows.Scan(&v))
		values = append(values, v)
	}
	require.NoError(t, rows.Err())
	return values
}

// goOn starts a node on a directory, has it append one more event, and waits
// until everything in the log is applied, once and in order, and on the stream,
// which holds nothing else. The node runs until the test ends.
func goOn(t *testing.T, dir string) *node.Node {
	t.Helper()
	n, _ := start(t, node.Options{Dir: dir}, recorder("a", "Placed"), recorder("b", "Placed"))
	last := appendOne(t, n, "outside the load", "Placed", 1) // at the position of what was lost
	want := column(t, n, `SELECT event_id FROM outbox WHERE type = 'Placed' ORDER BY position`)
	for _, name := range []string{"a", "b"} {
		waitApplied(t, n, name, last.Position)
		require.Equal(t, want, effectIDs(t, n, name), "each event once, in log order, and nothing else")
	}
	requireStreamAgrees(t, n)
	return n
}

// TestPowerCut: at FULL, whatever the moment and whatever is lost of what was
// not synced, every acknowledged order and its event are there, nothing is on
// the stream that is not in the log, and a node that goes on from there applies
// every event once, in order.
func TestPowerCut(t *testing.T) {
	p := recordPower(t, "FULL")
	d := p.Disk()
	repeated := 0
	cuts := 300
	if testing.Short() {
		cuts = 50
	}
	for i, m := range p.moments(cuts) {
		require.NoError(t, d.Advance(m))
		loss := powercut.AnyLoss(p.random)
		t.Run(fmt.Sprintf("%d %v", m, loss), func(t *testing.T) {
			dir := p.cut(t, d, loss)
			r := look(t, dir)
			require.Empty(t, r.lacks(at(m, p.acked)), "acknowledged, and lost")
			require.Empty(t, r.lacks(at(m, p.published)), "published, and lost")
			if loss == powercut.Everything {
				all := look(t, p.cut(t, d, powercut.Nothing))
				if all.cursors["a"] > r.cursors["a"] || all.cursors["b"] > r.cursors["b"] {
					repeated++
				}
			}
			if i%10 == 0 {
				goOn(t, dir)
			}
		})
	}
	require.Positive(t, repeated, "no power cut took a consumer's batch back: the recording proves nothing about it")
}

// TestPowerCutAtNormal: without syncs, acknowledged orders are lost, which shows
// that the recording bites; but whole, from the end, and nothing that was
// published.
func TestPowerCutAtNormal(t *testing.T) {
	p := recordPower(t, "NORMAL")
	d := p.Disk()
	lost := 0
	for i, m := range p.moments(100) {
		require.NoError(t, d.Advance(m))
		loss := powercut.AnyLoss(p.random)
		t.Run(fmt.Sprintf("%d %v", m, loss), func(t *testing.T) {
			dir := p.cut(t, d, loss)
			r := look(t, dir)
			lost += len(r.lacks(at(m, p.acked)))
			require.Empty(t, r.lacks(at(m, p.published)), "published, and lost")
			if i%10 == 0 {
				goOn(t, dir)
			}
		})
	}
	require.Positive(t, lost, "no acknowledged order was lost at NORMAL: the recording proves nothing")
	t.Logf("%d acknowledged orders lost", lost)
}

// TestPowerCutBehindLyingDisk: from some moment on the database's syncs do
// nothing, and the stream keeps everything. So the stream holds events that the
// log does not have; they are never applied, and the next start removes them.
func TestPowerCutBehindLyingDisk(t *testing.T) {
	p := recordPower(t, "FULL")
	ghosts := 0
	for range 8 {
		promised := slices.Sorted(maps.Values(p.published))
		lies := promised[p.random.IntN(len(promised)-50)]
		m := promised[len(promised)-1-p.random.IntN(40)]
		t.Run(fmt.Sprintf("%d to %d", lies, m), func(t *testing.T) {
			d := p.Disk()
			require.NoError(t, d.Advance(lies))
			d.Lie(func(name string) bool { return !strings.Contains(name, "jetstream") })
			require.NoError(t, d.Advance(m))
			dir := p.cut(t, d, powercut.Everything)
			require.NoError(t, os.RemoveAll(filepath.Join(dir, "jetstream")))
			require.NoError(t, os.Rename(filepath.Join(p.cut(t, d, powercut.Nothing), "jetstream"), filepath.Join(dir, "jetstream")))
			gone := look(t, dir).lacks(at(m, p.published))
			ghosts += len(gone)

			n := goOn(t, dir)
			if len(gone) > 0 {
				require.Positive(t, n.Status().Relay.Reconciled)
			}
		})
	}
	require.Positive(t, ghosts, "the stream never held what the log had lost")
	t.Logf("%d ghosts", ghosts)
}
