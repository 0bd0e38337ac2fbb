package consumer_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/admin"
	"outlog/outbox"
	"outlog/store"
)

// The model test plays random histories against a consumer with both kinds of
// routes and compares what happened with a model that knows only the promises:
//
//	G2  at the end each event is applied, unless a person discarded it or a
//	    reset left it out; at any time it is applied, parked or still to come
//	G3  an effect in the database is there once
//	G4  effects of an aggregate happen in version order, external ones too
//	G5  no effect of an event that is not in the log
//
// Each history runs on a virtual clock, so hours of backoff cost nothing.
//
//	go test ./consumer -run TestModel -seed 42 -v     replays one
var (
	modelSeed      = flag.Uint64("seed", 0, "play this one history of TestModel")
	modelHistories = flag.Int("histories", 500, "histories that TestModel plays; a tenth with -short")
)

func TestModel(t *testing.T) {
	template := filepath.Join(t.TempDir(), "template.db")
	db, err := store.Open(t.Context(), store.Options{Path: template, Synchronous: "NORMAL"})
	require.NoError(t, err)
	require.NoError(t, db.Close())
	if *modelSeed != 0 {
		play(t, template, *modelSeed)
		return
	}
	n := *modelHistories
	if testing.Short() {
		n /= 10
	}
	first := rand.Uint64N(1 << 40)
	t.Logf("seeds %d to %d", first, first+uint64(n)-1)
	var next atomic.Uint64
	t.Run("histories", func(t *testing.T) {
		for w := range min(4, runtime.GOMAXPROCS(0)) {
			t.Run(strconv.Itoa(w), func(t *testing.T) {
				t.Parallel()
				for !t.Failed() {
					i := next.Add(1) - 1
					if i >= uint64(n) {
						return
					}
					play(t, template, first+i)
				}
			})
		}
	})
}

// TestModelFoundBefore plays the histories that once failed.
func TestModelFoundBefore(t *testing.T) {
	template := filepath.Join(t.TempDir(), "template.db")
	db, err := store.Open(t.Context(), store.Options{Path: template, Synchronous: "NORMAL"})
	require.NoError(t, err)
	require.NoError(t, db.Close())
	for _, seed := range foundBefore {
		play(t, template, seed)
	}
}

// foundBefore are seeds of histories that failed before something was mended.
var foundBefore = []uint64{
	578155118615 + 120, // under Skip, a redriven event ran beside a later one of its aggregate
}

const (
	modelName      = "c"
	modelAttempts  = 3
	modelKeys      = 4
	modelOps       = 25
	modelMaxAppend = 6
)

// world is one history.
type world struct {
	t    *testing.T
	rng  *rand.Rand
	seed uint64
	path string
	skip bool // OnDead
	db   *store.DB
	log  *outbox.Log
	told []string // the history, for a failure's report

	c       *consumer.Consumer
	cancel  context.CancelFunc
	done    chan error
	crashed atomic.Bool
	trap    atomic.Pointer[trap]

	mu       sync.Mutex
	events   map[string]*modelEvent // by id
	order    []*modelEvent          // by position
	counted  int                    // failures the handlers reported that count as attempts
	repaired bool                   // handlers fail no more
	keep     bool                   // what the reset under way does to discarded events
	faults   []string
	doing    map[string]int // aggregates with an external effect under way
}

// modelEvent is what the model knows about an event.
type modelEvent struct {
	id, aggregate      string
	position, version  int64
	do                 bool
	plan               []string // what the handler does at its next calls
	discarded, skipped bool
	calls              int
}

// trap makes a point of the write path the place where the process dies.
type trap struct {
	point string
	left  atomic.Int64
}

func play(t *testing.T, template string, seed uint64) {
	dir, err := os.MkdirTemp(memory(), "outlog-model-")
	require.NoError(t, err)
	defer os.RemoveAll(dir) // also when a history fails: there are many
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 0)), path: filepath.Join(dir, "outlog.db"), events: map[string]*modelEvent{}, doing: map[string]int{}}
		w.skip = w.rng.IntN(4) == 0
		copyFile(t, template, w.path)
		var err error
		w.db, err = store.Open(t.Context(), store.Options{Path: w.path, Synchronous: "NORMAL", Readers: 2, Failpoint: w.hook})
		require.NoError(t, err)
		w.log, err = outbox.Open(t.Context(), w.db)
		require.NoError(t, err)
		w.db.Register(consumer.Checks...)
		w.exec(`CREATE TABLE effects (n INTEGER PRIMARY KEY AUTOINCREMENT, event_id TEXT, position INTEGER, aggregate TEXT, version INTEGER) STRICT`)
		defer func() {
			if t.Failed() {
				t.Logf("seed %d:\n%s\n%s", seed, strings.Join(w.told, "\n"), w.dump())
			}
			w.stop()
			require.NoError(t, w.db.Close())
		}()
		w.start()
		for range modelOps {
			w.step()
			if w.rng.IntN(3) == 0 {
				time.Sleep(time.Duration(w.rng.IntN(3000)) * time.Millisecond)
			}
			if w.rng.IntN(6) == 0 {
				w.settle()
				w.verify()
			}
			w.check()
		}
		w.finish()
	})
}

// memory is a directory whose files are not on a disk, if there is one: a
// history crashes its consumer and not the machine.
func memory() string {
	if st, err := os.Stat("/dev/shm"); err == nil && st.IsDir() {
		return "/dev/shm"
	}
	return ""
}

func copyFile(t *testing.T, from, to string) {
	in, err := os.Open(from)
	require.NoError(t, err)
	defer in.Close()
	out, err := os.Create(to)
	require.NoError(t, err)
	defer out.Close()
	_, err = io.Copy(out, in)
	require.NoError(t, err)
}

// dump shows what the consumer remembers, for a failure's report.
func (w *world) dump() (s string) {
	_ = w.db.Reader().QueryRow(`SELECT coalesce((SELECT group_concat(name || ' at ' || position || ' generation ' || generation || ' paused ' || paused, char(10)) FROM outlog_consumers), '') || char(10) ||
		coalesce((SELECT group_concat('parked ' || position || ' ' || aggregate_id || ' ' || state || ' ' || attempts || ' ' || last_error, char(10)) FROM outlog_parked), '') || char(10) ||
		coalesce((SELECT group_concat('history ' || position || ' ' || attempt || ' ' || outcome || ' ' || error, char(10)) FROM outlog_attempts), '')`).Scan(&s)
	return s
}

func (w *world) tell(format string, args ...any) {
	w.told = append(w.told, fmt.Sprintf(format, args...))
}

func (w *world) exec(query string, args ...any) {
	w.t.Helper()
	require.NoError(w.t, w.db.Update(w.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(w.t.Context(), query, args...)
		return err
	}), "seed %d", w.seed)
}

// hook dies at the armed point: from then on nothing is committed any more.
func (w *world) hook(point string) error {
	if w.crashed.Load() && point == "store.before-commit" {
		return errCrash
	}
	if tr := w.trap.Load(); tr != nil && tr.point == point && tr.left.Add(-1) == 0 {
		w.crashed.Store(true)
		return errCrash
	}
	return nil
}

var errCrash = errors.New("the process is dead")

func (w *world) start() {
	o := consumer.Options{Name: modelName, Start: consumer.Beginning, BatchRows: 1 + w.rng.IntN(6), MaxAttempts: modelAttempts,
		BackoffMin: time.Millisecond, BackoffMax: time.Second, Concurrency: 1 + w.rng.IntN(3), Poll: 2 * time.Second, Failpoint: w.hook,
		Routes: []consumer.Route{consumer.Apply("Applied", w.apply), consumer.Do("Done", w.do)},
		Clear:  w.clear}
	if w.skip {
		o.OnDead = consumer.Skip
	}
	c, err := consumer.New(w.db, w.log, down{}, o)
	require.NoError(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	w.c, w.cancel, w.done = c, cancel, make(chan error, 1)
	go func() { w.done <- c.Run(ctx) }()
	for known := false; !known; time.Sleep(time.Millisecond) {
		require.NoError(w.t, w.db.Reader().QueryRow(`SELECT EXISTS (SELECT 1 FROM outlog_consumers)`).Scan(&known))
	}
}

func (w *world) stop() {
	w.cancel()
	require.NoError(w.t, <-w.done)
}

func (w *world) fault(format string, args ...any) {
	w.faults = append(w.faults, fmt.Sprintf(format, args...))
}

// outcome plays the event's plan. It holds mu.
func (w *world) outcome(id string, do bool) (func() error, *modelEvent) {
	e := w.events[id]
	if e == nil {
		w.fault("an event was handled that is not in the log: %s", id)
		return func() error { return nil }, &modelEvent{}
	}
	if e.discarded || e.skipped {
		w.fault("event %d was handled although it was given up", e.position)
	}
	e.calls++
	what := "ok"
	if len(e.plan) > 0 && !w.repaired {
		what, e.plan = e.plan[0], e.plan[1:]
	}
	switch what {
	case "error", "panic", "goexit", "permanent", "retryafter":
		w.counted++
	}
	return func() error {
		err := fmt.Errorf("event %d: %s", e.position, what)
		switch what {
		case "ok":
			return nil
		case "panic":
			panic(err)
		case "goexit":
			runtime.Goexit()
		case "permanent":
			return consumer.Permanent(err)
		case "retryafter":
			return consumer.RetryAfter(3*time.Second, err)
		case "outage":
			return consumer.Outage(err)
		case "trouble":
			return fmt.Errorf("event %d: %w", e.position, store.ErrUnavailable)
		case "slow":
			if do {
				time.Sleep(700 * time.Millisecond)
			}
			return nil
		}
		return err
	}, e
}

func (w *world) apply(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
	if _, err := tx.ExecContext(ctx, `INSERT INTO effects (event_id, position, aggregate, version) VALUES (?, ?, ?, ?)`, e.ID, e.Position, e.AggregateID, e.AggregateVersion); err != nil {
		return err
	}
	w.mu.Lock()
	act, _ := w.outcome(e.ID, false)
	w.inOrder(e, tx)
	w.mu.Unlock()
	return act()
}

func (w *world) do(ctx context.Context, e consumer.Event[string]) error {
	w.mu.Lock()
	act, _ := w.outcome(e.ID, true)
	if w.doing[e.AggregateID]++; w.doing[e.AggregateID] > 1 {
		w.fault("two external effects of %s side by side, one is %d", e.AggregateID, e.Position)
	}
	w.inOrder(e, w.db.Reader())
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		w.doing[e.AggregateID]--
		w.mu.Unlock()
	}()
	return act()
}

// inOrder finds an earlier event of the aggregate that is not finished.
func (w *world) inOrder(e consumer.Event[string], q store.Querier) {
	for _, o := range w.order {
		if o.aggregate != e.AggregateID || o.version >= e.AggregateVersion || o.discarded || o.skipped {
			continue
		}
		var finished bool
		err := q.QueryRowContext(context.Background(), `SELECT EXISTS (SELECT 1 FROM outlog_inbox WHERE consumer = ?1 AND event_id = ?2)
			OR ?4 AND EXISTS (SELECT 1 FROM outlog_parked WHERE consumer = ?1 AND event_id = ?2 AND (state = 'dead' OR EXISTS
				(SELECT 1 FROM outlog_attempts h WHERE h.consumer = ?1 AND h.event_id = ?2 AND outcome = 'redriven')))
			OR ?3 <= (SELECT max(m.pruned_through, c.inbox_through) FROM outlog_meta m, outlog_consumers c)`, modelName, o.id, o.position, w.skip).Scan(&finished)
		if err != nil {
			w.fault("order of %d: %v", e.Position, err)
		} else if !finished {
			w.fault("event %d was handled before %d of the same aggregate", e.Position, o.position)
		}
	}
}

// step does one random thing.
func (w *world) step() {
	switch n := w.rng.IntN(100); {
	case n < 40:
		w.append()
	case n < 48:
		w.crash()
	case n < 54:
		w.tell("restart")
		w.stop()
		w.start()
	case n < 62:
		w.pause()
	case n < 72:
		w.deadLetters(true)
	case n < 80:
		w.deadLetters(false)
	case n < 90:
		w.reset()
	default:
		w.prune()
	}
}

var modelPlans = []string{"error", "error", "panic", "goexit", "permanent", "retryafter", "outage", "trouble", "slow"}

func (w *world) append() {
	var added []*modelEvent
	for range 1 + w.rng.IntN(modelMaxAppend) {
		e := &modelEvent{aggregate: string(rune('a' + w.rng.IntN(modelKeys))), do: w.rng.IntN(3) == 0}
		if w.rng.IntN(3) == 0 {
			for range 1 + w.rng.IntN(4) {
				e.plan = append(e.plan, modelPlans[w.rng.IntN(len(modelPlans))])
			}
		}
		added = append(added, e)
	}
	require.NoError(w.t, w.db.Update(w.t.Context(), func(tx *store.Tx) error {
		for _, e := range added {
			typ := "Applied"
			if e.do {
				typ = "Done"
			}
			out, err := w.log.Append(w.t.Context(), tx, outbox.Event{AggregateType: "k", AggregateID: e.aggregate, Type: typ, Data: ""})
			if err != nil {
				return err
			}
			e.id, e.position, e.version = out[0].ID, out[0].Position, out[0].Version
			w.mu.Lock() // before a handler can come to it; this commit does not fail
			w.events[e.id] = e
			w.order = append(w.order, e)
			w.mu.Unlock()
			w.tell("append %d %s%d do=%v %v", e.position, e.aggregate, e.version, e.do, e.plan)
		}
		return nil
	}))
}

// crash appends, lets the process die at some point, and starts another.
func (w *world) crash() {
	w.append()
	points := []string{"store.before-commit", "store.after-commit", "consumer.after-handler", "consumer.after-commit", "consumer.after-effect"}
	tr := &trap{point: points[w.rng.IntN(len(points))]}
	hit := 1 + w.rng.IntN(6)
	tr.left.Store(int64(hit))
	w.trap.Store(tr)
	time.Sleep(time.Duration(w.rng.IntN(5000)) * time.Millisecond)
	w.tell("crash at %s, hit %d: %v", tr.point, hit, w.crashed.Load())
	w.crashed.Store(true) // wherever it is
	w.trap.Store(nil)
	w.stop()
	w.crashed.Store(false)
	w.start()
}

func (w *world) pause() {
	w.tell("pause")
	w.exec(`UPDATE outlog_consumers SET paused = 1 WHERE name = ?`, modelName)
	w.resync()
	var before, after int
	w.mu.Lock()
	for _, e := range w.order {
		before += e.calls
	}
	w.mu.Unlock()
	w.append()
	time.Sleep(5 * time.Second)
	w.mu.Lock()
	for _, e := range w.order {
		after += e.calls
	}
	w.mu.Unlock()
	require.Equal(w.t, before, after, "seed %d: a paused consumer called a handler", w.seed)
	if w.rng.IntN(2) == 0 {
		w.forward()
	}
	w.tell("resume")
	w.exec(`UPDATE outlog_consumers SET paused = 0 WHERE name = ?`, modelName)
}

// resync waits until the consumer has noticed and its effects have ended.
func (w *world) resync() { time.Sleep(5 * time.Second) }

// forward resets the paused consumer to a later position.
func (w *world) forward() {
	var cursor int64
	require.NoError(w.t, w.db.Reader().QueryRow(`SELECT position FROM outlog_consumers`).Scan(&cursor))
	head := w.order[len(w.order)-1].position
	if cursor >= head {
		return
	}
	to := cursor + 1 + w.rng.Int64N(head-cursor)
	w.mu.Lock()
	for _, e := range w.order {
		if e.position > cursor && e.position <= to {
			e.skipped = true
		}
	}
	w.mu.Unlock()
	w.tell("reset forward from %d to %d", cursor, to)
	require.NoError(w.t, w.request(consumer.ResetRequest{To: strconv.FormatInt(to, 10)}), "seed %d", w.seed)
}

// reset goes back to some position, or is refused below the horizon.
func (w *world) reset() {
	if len(w.order) == 0 {
		return
	}
	var cursor, pruned int64
	require.NoError(w.t, w.db.Reader().QueryRow(`SELECT position, pruned_through FROM outlog_consumers, outlog_meta`).Scan(&cursor, &pruned))
	to := w.rng.Int64N(cursor + 1)
	keep := w.rng.IntN(2) == 0
	w.tell("reset back to %d, cursor %d, horizon %d, keep=%v", to, cursor, pruned, keep)
	w.mu.Lock()
	w.keep = keep
	w.mu.Unlock()
	err := w.request(consumer.ResetRequest{To: strconv.FormatInt(to, 10), KeepDiscarded: keep})
	if to >= pruned {
		require.NoError(w.t, err, "seed %d", w.seed)
		return
	}
	_, refused := errors.AsType[*consumer.RefusedError](err)
	require.True(w.t, refused, "seed %d: %v", w.seed, err)
	require.Contains(w.t, err.Error(), consumer.ErrPruned.Error())
}

// clear undoes effects, and in the model what the reset brings back: no
// handler runs beside it.
func (w *world) clear(ctx context.Context, tx *store.Tx, after int64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.order {
		if e.position > after {
			e.skipped = false
			e.discarded = e.discarded && w.keep
		}
	}
	_, err := tx.ExecContext(ctx, `DELETE FROM effects WHERE position > ?`, after)
	return err
}

func (w *world) request(q consumer.ResetRequest) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	_, err := admin.Reset(ctx, w.db, modelName, q)
	return err
}

// deadLetters redrives or discards a random dead event.
func (w *world) deadLetters(discard bool) {
	var id string
	err := w.db.Reader().QueryRow(`SELECT coalesce((SELECT event_id FROM outlog_parked WHERE state = 'dead' ORDER BY (position * 7919 + ?) % 101 LIMIT 1), '')`, w.rng.IntN(101)).Scan(&id)
	require.NoError(w.t, err)
	if id == "" {
		return
	}
	s := admin.Selector{EventID: id, Consumer: modelName}
	w.mu.Lock()
	e := w.events[id]
	w.mu.Unlock()
	if !discard {
		w.tell("redrive %d", e.position)
		_, err := admin.Redrive(context.Background(), w.db, s)
		require.NoError(w.t, err)
		return
	}
	w.tell("discard %d", e.position)
	w.mu.Lock()
	e.discarded = true
	w.mu.Unlock()
	n, err := admin.Discard(context.Background(), w.db, s, "given up")
	require.NoError(w.t, err)
	require.Equal(w.t, 1, n)
}

// prune removes events that nobody needs any more, as retention does, or old
// inbox rows of events that stay.
func (w *world) prune() {
	ctx := w.t.Context()
	if w.rng.IntN(2) == 0 {
		window := w.rng.Int64N(3)
		_, err := consumer.TrimInbox(ctx, w.db, modelName, window, 1+w.rng.IntN(4))
		require.NoError(w.t, err)
		w.tell("trim the inbox, window %d", window)
		return
	}
	events, err := w.log.Extents(ctx, 0, 1+w.rng.IntN(4))
	require.NoError(w.t, err)
	if len(events) == 0 {
		return
	}
	first, last := events[0].Position, events[len(events)-1].Position
	err = w.db.Update(ctx, func(tx *store.Tx) error {
		if err := consumer.Forget(ctx, tx, first-1, last); err != nil {
			return err
		}
		return w.log.Prune(ctx, tx, events, outbox.Needs{})
	})
	w.tell("prune through %d: %v", last, err)
	if held, is := errors.AsType[*outbox.HeldError](err); !is {
		require.NoError(w.t, err)
	} else {
		require.Less(w.t, held.By.Position, last)
	}
}

// settle waits until nothing moves any more: what is parked is dead or waits
// behind something that is.
func (w *world) settle() {
	for range 10_000 {
		var moving bool
		require.NoError(w.t, w.db.Reader().QueryRow(`SELECT EXISTS (SELECT 1 FROM outlog_parked WHERE state IN ('running', 'retrying'))
			OR (SELECT position FROM outlog_consumers) < coalesce((SELECT max(position) FROM outbox), 0)`).Scan(&moving))
		if !moving {
			return
		}
		time.Sleep(time.Second)
	}
	w.t.Fatalf("seed %d: it does not come to rest", w.seed)
}

// check compares the database with the model at any time.
func (w *world) check() {
	w.t.Helper()
	w.mu.Lock()
	faults := slices.Clone(w.faults)
	w.mu.Unlock()
	require.Empty(w.t, faults, "seed %d", w.seed)
	rows, err := w.db.Reader().Query(`SELECT event_id, aggregate, version FROM effects ORDER BY n`)
	require.NoError(w.t, err)
	defer rows.Close()
	seen, last := map[string]bool{}, map[string]int64{}
	for rows.Next() {
		var id, aggregate string
		var version int64
		require.NoError(w.t, rows.Scan(&id, &aggregate, &version))
		require.False(w.t, seen[id], "seed %d: two effects of %s%d", w.seed, aggregate, version)
		if !w.skip {
			require.Greater(w.t, version, last[aggregate], "seed %d: %s out of order", w.seed, aggregate)
		}
		seen[id], last[aggregate] = true, version
	}
	require.NoError(w.t, rows.Err())
	var failed, most int
	require.NoError(w.t, w.db.Reader().QueryRow(`SELECT (SELECT count(*) FROM outlog_attempts WHERE outcome = 'failed'),
		coalesce((SELECT max(attempts) FROM outlog_parked), 0)`).Scan(&failed, &most))
	w.mu.Lock()
	counted := w.counted // read last: the consumer goes on meanwhile
	w.mu.Unlock()
	require.LessOrEqual(w.t, failed, counted, "seed %d: more attempts were counted than handlers failed", w.seed)
	require.LessOrEqual(w.t, most, modelAttempts, "seed %d", w.seed)
}

func (w *world) verify() {
	w.t.Helper()
	results, err := w.db.Verify(w.t.Context())
	require.NoError(w.t, err)
	for _, r := range results {
		require.True(w.t, r.OK, "seed %d: %s: %s", w.seed, r.Name, r.Detail)
	}
}

// finish repairs the handlers, redrives everything, and expects each event to
// be applied that nobody gave up.
func (w *world) finish() {
	w.tell("repair")
	w.mu.Lock()
	w.repaired = true
	w.mu.Unlock()
	for range 100 {
		w.settle()
		n, err := admin.Redrive(context.Background(), w.db, admin.Selector{All: true})
		require.NoError(w.t, err)
		if n == 0 {
			break
		}
	}
	w.settle()
	w.check()
	w.verify()
	var parked int
	require.NoError(w.t, w.db.Reader().QueryRow(`SELECT count(*) FROM outlog_parked`).Scan(&parked))
	require.Zero(w.t, parked, "seed %d: parked although all handlers work", w.seed)
	for _, e := range w.order {
		var effects, inbox, pruned int
		require.NoError(w.t, w.db.Reader().QueryRow(`SELECT (SELECT count(*) FROM effects WHERE event_id = ?1), (SELECT count(*) FROM outlog_inbox WHERE event_id = ?1),
			(SELECT max(m.pruned_through, c.inbox_through) >= ?2 FROM outlog_meta m, outlog_consumers c)`, e.id, e.position).Scan(&effects, &inbox, &pruned))
		given := e.discarded || e.skipped
		want := 1
		if given || e.do {
			want = 0
		}
		require.Equal(w.t, want, effects, "seed %d: effects of event %d %+v", w.seed, e.position, e)
		if e.do && !given {
			require.NotZero(w.t, e.calls, "seed %d: event %d was never handled", w.seed, e.position)
		}
		if pruned == 0 && !given {
			require.Equal(w.t, 1, inbox, "seed %d: inbox row of event %d %+v", w.seed, e.position, e)
		}
	}
}
