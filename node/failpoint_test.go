package node_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/failpoint"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// The table of failpoints in docs/design.md says what a failure of each kind
// does at each point. TestCrash runs every cell of it, in the child of the
// crash tests. A new point needs a row there, and here only what it takes to
// get to it.

// startFailed is a child's status when Open returned an error.
const startFailed = 4

// afterPoint is how many appends a child does after it has reached its point,
// before it catches up.
const afterPoint = 200

// pointScene is what it takes to reach a point that a child does not come to by
// itself.
type pointScene struct {
	hit     int                                                  // that fails; 0: 20
	prepare func(t *testing.T, dir string)                       // before the child
	options func(o *node.Options)                                // of the child's node
	during  func(ctx context.Context, n *node.Node) (again bool) // in the child, until it returns false
}

var pointScenes = map[string]pointScene{
	failpoint.NodeAfterLock:       {hit: 1},
	failpoint.StoreAfterCopy:      {hit: 1, options: anotherMigration},
	failpoint.StoreAfterMigration: {hit: 1, options: anotherMigration},
	failpoint.BrokerAfterQuarantine: {hit: 1, prepare: func(t *testing.T, dir string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "jetstream", "starting"), nil, 0o600))
	}},
	failpoint.BrokerAfterMark:  {hit: 1},
	failpoint.BrokerAfterStart: {hit: 1},
	failpoint.RelayAfterRecreate: {hit: 1, prepare: func(t *testing.T, dir string) {
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "jetstream")))
	}},
	failpoint.RelayBeforePark: {hit: 1, during: func(ctx context.Context, n *node.Node) bool {
		return n.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload)
				VALUES ('order', 'large', 'Placed', ?)`, `{"n":2}`+strings.Repeat(" ", 3<<20))
			return err
		}) != nil
	}},
	failpoint.ConsumerAfterMark: {hit: 1, prepare: func(t *testing.T, dir string) {
		n, err := node.Open(t.Context(), node.Options{Dir: dir, NoBroker: true})
		require.NoError(t, err)
		require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `UPDATE outlog_consumers SET running = 1, run_position = position, unclean_exits = 2 WHERE name = 'a'`)
			return err
		}))
		require.NoError(t, n.Close())
	}},
	failpoint.ConsumerAfterClear: {hit: 1, during: func(ctx context.Context, n *node.Node) bool {
		return n.Update(ctx, func(tx *store.Tx) error {
			_, err := consumer.RequestReset(ctx, tx, "a", consumer.ResetRequest{To: "beginning"}, tx.Now())
			return err
		}) != nil
	}},
}

// anotherMigration is a change of the schema that the database has not seen.
func anotherMigration(o *node.Options) {
	o.Migrations = []store.Migrations{{Table: "crash_migrations", FS: fstest.MapFS{
		"00001_crash.sql": {Data: []byte("-- +goose Up\nCREATE TABLE crash (n INTEGER PRIMARY KEY) STRICT;\n")}}}}
}

// childOptions are a child's node and consumers. In a cell, b fails now and then,
// c has external effects, and reaching the point is reported on stdout.
func childOptions(dir, spec string) (node.Options, []consumer.Options, error) {
	o, consumers := node.Options{Dir: dir}, []consumer.Options{recorder("a", "Placed"), recorder("b", "Placed")}
	if spec == "" {
		return o, consumers, nil
	}
	s, err := failpoint.Parse(spec)
	if err != nil {
		return o, nil, err
	}
	report := failpoint.At(s.Point, s.Hit, func() error { reached.Store(true); fmt.Println("reached"); return nil })
	o.Failpoint = unavailable(oneAtATime(failpoint.All(report, s.Hook())))
	if f := pointScenes[s.Point].options; f != nil {
		f(&o)
	}
	consumers[0].Clear = func(ctx context.Context, tx *store.Tx, after int64) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM effects WHERE consumer = 'a' AND event_id IN (SELECT event_id FROM outbox WHERE position > ?)`, after)
		return err
	}
	consumers[1].Routes = []consumer.Route{consumer.Apply("Placed", func(ctx context.Context, tx *store.Tx, e consumer.Event[placed]) error {
		if e.Data.N%20 == 7 && e.Attempt == 1 {
			return errors.New("not yet")
		}
		return record("b")(ctx, tx, e)
	})}
	return o, append(consumers, externalEffect()), nil
}

func externalEffect() consumer.Options {
	o := recorder("c")
	o.Routes = []consumer.Route{consumer.Do("Placed", func(context.Context, consumer.Event[placed]) error { return nil })}
	return o
}

// reached says that the child has come to its point.
var reached atomic.Bool

// oneAtATime keeps the report and what follows it together, for a point that
// several goroutines come to.
func oneAtATime(hook failpoint.Hook) failpoint.Hook {
	var mu sync.Mutex
	return func(point string) error {
		mu.Lock()
		defer mu.Unlock()
		return hook(point)
	}
}

// unavailable makes of a full disk what SQLite's error for it is to the callers.
func unavailable(hook failpoint.Hook) failpoint.Hook {
	return func(point string) error {
		err := hook(point)
		if errors.Is(err, failpoint.ErrFull) {
			err = fmt.Errorf("%w: %w", store.ErrUnavailable, err)
		}
		return err
	}
}

// finishCell waits until the child has reached its point and appended some more,
// stops appending, and returns 0 when everything has caught up.
func finishCell(ctx context.Context, n *node.Node, spec string, stopAppending func()) int {
	s, err := failpoint.Parse(spec)
	if err != nil {
		return 3
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	until := func(done func() bool) bool {
		for !done() {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return false
			}
		}
		return true
	}
	during := pointScenes[s.Point].during
	var head int64
	ok := until(func() bool {
		if during != nil && !during(ctx, n) {
			during = nil
		}
		return during == nil && reached.Load()
	}) && until(func() (more bool) {
		now, err := n.Log().Head(ctx)
		if head == 0 && err == nil {
			head = now
		}
		return err == nil && now >= head+afterPoint
	})
	stopAppending()
	if !ok || !until(func() bool { return isCaughtUp(ctx, n) }) {
		fmt.Fprintf(os.Stderr, "reached: %v, status: %+v, parked: %v\n", reached.Load(), n.Status(), parkedRows(ctx, n))
		return 5
	}
	return 0
}

// parkedRows says what is parked, for a test that fails.
func parkedRows(ctx context.Context, n *node.Node) (text string) {
	ctx = context.WithoutCancel(ctx)
	err := n.Store().Reader().QueryRowContext(ctx, `SELECT (SELECT coalesce(group_concat(consumer || ' ' || position || ' ' || state || ' ' || attempts || ' ' || last_error, ', '), '') FROM outlog_parked)
		|| ' log ' || (SELECT count(*) || ' ' || max(position) FROM outbox) || ' effects ' || (SELECT group_concat(consumer || ' ' || n) FROM (SELECT consumer, count(*) AS n FROM effects GROUP BY 1))
		|| ' pending ' || (SELECT count(*) FROM outbox_status WHERE state = 'pending') || (SELECT group_concat(name || ' ' || position) FROM outlog_consumers) || ' relay ' || (SELECT position || ' ' || stream_seq FROM outlog_relay)`).Scan(&text)
	return fmt.Sprint(text, err)
}

// isCaughtUp reports whether the relay is at the head of the log and every
// consumer has applied every event.
func isCaughtUp(ctx context.Context, n *node.Node) bool {
	var missing int
	err := n.Store().Reader().QueryRowContext(ctx, `SELECT
		(SELECT count(*) FROM outbox_status WHERE state = 'pending')
		+ (SELECT count(*) FROM outlog_parked WHERE consumer <> 'relay')
		+ (SELECT count(*) FROM outlog_requests WHERE done_at = 0)
		+ (SELECT 2 * count(*) FROM outbox) - (SELECT count(*) FROM effects)
		+ (SELECT coalesce(sum(h.head - c.position), 0) FROM outlog_consumers c, (SELECT max(position) AS head FROM outbox) h)`).Scan(&missing)
	return err == nil && missing == 0
}

// runCell runs a child to its point, and returns how it ended in the words of
// the table, and the events it acknowledged.
func runCell(t *testing.T, dir string, spec failpoint.Spec) (outcome string, acked []string) {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childDir+"="+dir, childFailpoint+"="+spec.String())
	var trouble strings.Builder
	cmd.Stderr = &trouble
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	was := false
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		switch line := lines.Text(); {
		case line == "reached":
			was = true
		case len(line) == 26:
			acked = append(acked, line)
		}
	}
	_ = cmd.Wait() // how it ended is looked at below
	require.True(t, was, "the child has not reached the point: %v %s", cmd.ProcessState, &trouble)
	switch code := cmd.ProcessState.ExitCode(); {
	case code == 0:
		return "goes on", acked
	case code == startFailed:
		return "start fails", acked
	case code == failpoint.ExitStatus && spec.Action == failpoint.ActionExit, code == -1 && spec.Action == failpoint.ActionKill:
		return "dies", acked
	}
	t.Fatalf("the child: %v %s", cmd.ProcessState, &trouble)
	return "", nil
}

// cell is one cell of the table.
type cell struct {
	point  string
	action failpoint.Action
	want   string
	rest   string // the last column
}

// failpointTable reads the table in docs/design.md.
func failpointTable(t *testing.T) (points []string, cells []cell) {
	text, err := os.ReadFile("../docs/design.md")
	require.NoError(t, err)
	_, table, ok := strings.Cut(string(text), "| point | error | exit | SIGKILL | disk full | what the next start, or the next try, finds |\n|---|---|---|---|---|---|\n")
	require.True(t, ok, "the table of failpoints")
	table, _, _ = strings.Cut(table, "\n\n")
	for line := range strings.Lines(table) {
		columns := strings.Split(strings.Trim(line, "| \n"), "|")
		require.Len(t, columns, 6, line)
		for i := range columns {
			columns[i] = strings.Trim(columns[i], " `")
		}
		points = append(points, columns[0])
		for i, action := range []failpoint.Action{failpoint.ActionError, failpoint.ActionExit, failpoint.ActionKill, failpoint.ActionFull} {
			cells = append(cells, cell{columns[0], action, columns[1+i], columns[5]})
		}
	}
	return points, cells
}

// TestFailpointTableIsComplete: the table has a row for each point, a cell for
// each action, and a reason for each that does not apply; and the code has no
// point that is not listed.
func TestFailpointTableIsComplete(t *testing.T) {
	points, cells := failpointTable(t)
	require.ElementsMatch(t, failpoint.Points, points)
	require.Len(t, cells, len(failpoint.Points)*len(failpoint.Actions))
	for _, c := range cells {
		require.Contains(t, []string{"goes on", "start fails", "dies", "—"}, c.want, "%s × %s", c.point, c.action)
		if c.want == "—" {
			require.Equal(t, failpoint.ActionFull, c.action, "only a full disk may not apply")
			require.Regexp(t, `; no full disk: \S+`, c.rest, "%s: why not", c.point)
		}
	}
	used := map[string]bool{}
	for _, dir := range []string{"../node", "../store", "../broker", "../relay", "../consumer"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		require.NoError(t, err)
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			code, err := os.ReadFile(file)
			require.NoError(t, err)
			for _, m := range regexp.MustCompile(`\b(?:hook|Failpoint)\("([^"]+)"\)`).FindAllSubmatch(code, -1) {
				used[string(m[1])] = true
			}
		}
	}
	for _, p := range failpoint.Points {
		require.True(t, used[p], "nobody comes to %s", p)
		delete(used, p)
	}
	require.Empty(t, used, "points that are not in failpoint.Points")
}

// TestCrash runs each cell of the table: what the table says happens, and
// afterwards everything acknowledged is in the log and applied once, in order.
func TestCrash(t *testing.T) {
	_, cells := failpointTable(t)
	template := filled(t)
	for _, c := range cells {
		if c.want == "—" {
			continue
		}
		t.Run(c.point+"/"+string(c.action), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			require.NoError(t, os.CopyFS(dir, os.DirFS(template)))
			scene := pointScenes[c.point]
			if scene.prepare != nil {
				scene.prepare(t, dir)
			}
			hit := scene.hit
			if hit == 0 {
				hit = 20 // in full flight
			}
			got, acked := runCell(t, dir, failpoint.Spec{Point: c.point, Hit: hit, Action: c.action})
			require.Equal(t, c.want, got)
			requireApplied(t, dir, acked)
		})
	}
}

// requireApplied runs a node on what a cell left, until it has caught up, and
// proves the promises G1 to G5 for everything that was acknowledged.
func requireApplied(t *testing.T, dir string, acked []string) {
	t.Helper()
	n, stop := start(t, node.Options{Dir: dir}, recorder("a", "Placed"), recorder("b", "Placed"), externalEffect())
	defer stop()
	require.Eventually(t, func() bool { return isCaughtUp(t.Context(), n) }, 30*time.Second, 5*time.Millisecond)
	inLog := map[string]bool{}
	last := map[string]int{}
	for position := int64(0); ; {
		rows, err := n.Log().Read(t.Context(), position, outbox.Page{})
		require.NoError(t, err)
		for _, r := range rows {
			inLog[r.EventID] = true
			last[r.AggregateID] = int(r.AggregateVersion)
			position = r.Position
		}
		if len(rows) == 0 {
			break
		}
	}
	for _, id := range acked {
		require.True(t, inLog[id], "acknowledged event %s is lost", id)
	}
	for _, name := range []string{"a", "b"} {
		applied := map[string]int{}
		for _, e := range effects(t, n, name) {
			var version int
			aggregate, text, _ := strings.Cut(e, "/")
			_, err := fmt.Sscan(text, &version)
			require.NoError(t, err)
			applied[aggregate]++
			require.Equal(t, applied[aggregate], version, "%s: effects of %s once and in order", name, aggregate)
		}
		require.Equal(t, last, applied, "each event of the log, and nothing else")
	}
	require.Eventually(t, func() bool { // the broker starts beside the consumers, and reconcile after it
		r, err := n.VerifyStream(t.Context())
		return err == nil && r.OK
	}, 30*time.Second, 10*time.Millisecond, "the stream does not agree")
}
