package consumer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/outbox"
	"outlog/store"
)

// rig is a log and consumers on it; the stream is scripted.
type rig struct {
	t   testing.TB
	db  *store.DB
	log *outbox.Log
}

func newRig(t testing.TB, o store.Options) *rig {
	o.Path = filepath.Join(t.TempDir(), "outlog.db")
	if o.Synchronous == "" {
		o.Synchronous = "NORMAL"
	}
	db, err := store.Open(t.Context(), o)
	require.NoError(t, err)
	log, err := outbox.Open(t.Context(), db)
	require.NoError(t, err)
	db.Register(consumer.Checks...)
	r := &rig{t: t, db: db, log: log}
	r.exec(`CREATE TABLE effects (n INTEGER PRIMARY KEY AUTOINCREMENT, consumer TEXT, event_id TEXT, aggregate TEXT, version INTEGER) STRICT`)
	t.Cleanup(func() {
		results, err := db.Verify(context.Background())
		require.NoError(t, err)
		for _, c := range results {
			require.True(t, c.OK, "%s: %s", c.Name, c.Detail)
		}
		require.NoError(t, db.Close())
	})
	return r
}

func (r *rig) exec(query string, args ...any) {
	r.t.Helper()
	require.NoError(r.t, r.db.Update(context.Background(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(context.Background(), query, args...)
		return err
	}))
}

// append adds one event per aggregate named, in order.
func (r *rig) append(aggregates ...string) (last int64) {
	r.t.Helper()
	require.NoError(r.t, r.db.Update(context.Background(), func(tx *store.Tx) error {
		for _, a := range aggregates {
			out, err := r.log.Append(context.Background(), tx, outbox.Event{AggregateType: "order", AggregateID: a, Type: "Placed", Data: a})
			if err != nil {
				return err
			}
			last = out[0].Position
		}
		return nil
	}))
	return last
}

// effect is the harmless handler: one row per event.
func effect(ctx context.Context, tx *store.Tx, name string, e consumer.Event[string]) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO effects (consumer, event_id, aggregate, version) VALUES (?, ?, ?, ?)`, name, e.ID, e.AggregateID, e.AggregateVersion)
	return err
}

// failing is a handler that has its effect first and then asks trouble.
func failing(name string, trouble func(e consumer.Event[string]) error) func(context.Context, *store.Tx, consumer.Event[string]) error {
	return func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		if err := effect(ctx, tx, name, e); err != nil {
			return err
		}
		return trouble(e)
	}
}

func fine(consumer.Event[string]) error { return nil }

func options(name string, handler func(context.Context, *store.Tx, consumer.Event[string]) error) consumer.Options {
	return consumer.Options{Name: name, Start: consumer.Beginning, Poll: 10 * time.Millisecond, BackoffMin: time.Millisecond, BackoffMax: 2 * time.Millisecond,
		Routes: []consumer.Route{consumer.Apply("Placed", handler)}}
}

// run starts a consumer; stop ends it and waits.
func (r *rig) run(src consumer.Source, o consumer.Options) (c *consumer.Consumer, stop func()) {
	r.t.Helper()
	c, err := consumer.New(r.db, r.log, src, o)
	require.NoError(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(r.t, <-done)
	})
	r.t.Cleanup(stop)
	return c, stop
}

func (r *rig) wait(c *consumer.Consumer, position int64) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return c.WaitApplied(ctx, position)
}

// eventually waits for a query to return want.
func (r *rig) eventually(want, query string, args ...any) {
	r.t.Helper()
	var got string
	require.Eventually(r.t, func() bool {
		err := r.db.Reader().QueryRow(query, args...).Scan(&got)
		return err == nil && got == want
	}, 20*time.Second, time.Millisecond, "%s: want %s", query, want)
}

func (r *rig) effects(name string) string {
	r.t.Helper()
	var s string
	require.NoError(r.t, r.db.Reader().QueryRow(`SELECT coalesce(group_concat(a, ' '), '') FROM
		(SELECT aggregate || version AS a FROM effects WHERE consumer = ? ORDER BY n)`, name).Scan(&s))
	return s
}

// down is a source that never answers.
type down struct{}

func (down) Fetch(context.Context, int) ([]consumer.Delivery, error) {
	return nil, errors.New("no stream here")
}

// script is a source that delivers what the test sends, and notes acks.
type script struct {
	ch    chan []consumer.Delivery
	acked atomic.Int64 // highest sequence
}

func newScript() *script { return &script{ch: make(chan []consumer.Delivery)} }

func (s *script) Fetch(ctx context.Context, _ int) ([]consumer.Delivery, error) {
	select {
	case d := <-s.ch:
		return d, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *script) deliver(r *rig, seq uint64, position int64, id string) consumer.Delivery {
	return consumer.Delivery{LogID: r.log.ID(), Seq: seq, Record: outbox.Record{Position: position, EventID: id}, Ack: func() error { s.acked.Store(int64(seq)); return nil }}
}

// delivery is the true delivery of a log row.
func (s *script) delivery(r *rig, seq uint64, position int64) consumer.Delivery {
	rows, err := r.log.Read(context.Background(), position-1, outbox.Page{Rows: 1})
	require.NoError(r.t, err)
	return s.deliver(r, seq, position, rows[0].EventID)
}

func TestAppliesInOrderWithoutStream(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a", "b", "a", "a", "b")
	c, _ := r.run(down{}, options("c", failing("c", fine)))
	require.NoError(t, r.wait(c, last))
	require.Equal(t, "a1 b1 a2 a3 b2", r.effects("c"))
	last = r.append("b") // live
	require.NoError(t, r.wait(c, last))
	require.Equal(t, "a1 b1 a2 a3 b2 b3", r.effects("c"))
}

// TestStreamSaysHowFar: with a stream that is up and has not yet delivered,
// nothing above what was delivered is looked at before Poll has passed.
func TestStreamSaysHowFar(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b", "c")
	src := newScript()
	o := options("c", failing("c", fine))
	o.Start, o.Poll = consumer.At(0), time.Minute
	c, _ := r.run(src, o)
	require.NoError(t, r.wait(c, 3), "the first look goes to the end of the log")
	last := r.append("d", "e")
	src.ch <- []consumer.Delivery{src.delivery(r, 1, 4)}
	require.NoError(t, r.wait(c, 4))
	require.Equal(t, "a1 b1 c1 d1", r.effects("c"))
	r.eventually("4", `SELECT position FROM outlog_consumers`)
	src.ch <- []consumer.Delivery{src.delivery(r, 2, 5)}
	require.NoError(t, r.wait(c, last))
	src.ch <- nil
	require.Equal(t, int64(2), src.acked.Load())
}

func TestRedeliveryIsNotASecondEffect(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b")
	src := newScript()
	c, stop := r.run(src, options("c", failing("c", fine)))
	for range 3 {
		src.ch <- []consumer.Delivery{src.delivery(r, 1, 1), src.delivery(r, 1, 1), src.delivery(r, 2, 2)}
	}
	require.NoError(t, r.wait(c, 2))
	stop()
	// The same with the cursor lost, as after a reset that kept the inbox.
	r.exec(`UPDATE outlog_consumers SET position = 0`)
	c, stop = r.run(newScript(), options("c", failing("c", fine)))
	require.NoError(t, r.wait(c, 2))
	stop()
	require.Equal(t, "a1 b1", r.effects("c"))
	require.Zero(t, c.Status().Strays)
}

// TestStraysAreNeverApplied delivers what the log does not hold: a foreign
// message, another log's, a wrong ULID at a true position, a position above
// the log's head.
func TestStraysAreNeverApplied(t *testing.T) {
	r := newRig(t, store.Options{})
	src := newScript()
	o := options("c", failing("c", fine))
	o.Poll = time.Minute
	r.append("z")
	c, stop := r.run(src, o)
	require.NoError(t, r.wait(c, 1)) // the first look is over
	r.append("a")
	ghost := strings.Repeat("0", 26)
	foreign := src.deliver(r, 1, 0, "")
	foreign.LogID = ""
	other := src.deliver(r, 2, 50, ghost)
	other.LogID = "0123456789abcdef"
	src.ch <- []consumer.Delivery{foreign, other, src.deliver(r, 3, 2, ghost), src.deliver(r, 4, 99, ghost)}
	require.NoError(t, r.wait(c, 2))
	require.Eventually(t, func() bool { return src.acked.Load() == 4 }, 10*time.Second, time.Millisecond)
	require.Equal(t, int64(4), c.Status().Strays)
	require.Equal(t, "z1 a1", r.effects("c"))
	last := r.append("b") // and the ghost's position, given out later, is nobody's
	src.ch <- []consumer.Delivery{src.delivery(r, 5, last)}
	require.NoError(t, r.wait(c, last))
	stop()
	require.Equal(t, "z1 a1 b1", r.effects("c"))
}

// TestParkedAggregateWaitsInOrder: while a's first event fails, a's later ones
// wait behind it, and nobody else does.
func TestParkedAggregateWaitsInOrder(t *testing.T) {
	for name, trouble := range map[string]func() error{
		"error":  func() error { return errors.New("not yet") },
		"panic":  func() error { panic("not yet") },
		"goexit": func() error { runtime.Goexit(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, store.Options{})
			r.append("a", "b", "a", "b", "a")
			var repaired atomic.Bool
			o := options("c", failing("c", func(e consumer.Event[string]) error {
				if e.AggregateID == "a" && e.AggregateVersion == 1 && !repaired.Load() {
					return trouble()
				}
				return nil
			}))
			o.MaxAttempts = 1000
			c, _ := r.run(down{}, o)
			require.NoError(t, r.wait(c, 4))
			require.ErrorIs(t, r.wait(c, 5), consumer.ErrParked)
			require.Equal(t, "b1 b2", r.effects("c"), "a failed handler leaves no effect")
			r.eventually("0", `SELECT count(*) FROM outlog_inbox WHERE position IN (1, 3, 5)`)
			r.eventually("1:retrying 3:blocked 5:blocked", `SELECT group_concat(s, ' ') FROM (SELECT position || ':' || state AS s FROM outlog_parked ORDER BY position)`)
			r.eventually("1", `SELECT attempts >= 3 AND last_error LIKE '%not yet%' OR last_error LIKE '%Goexit%' FROM outlog_parked WHERE position = 1`)
			last := r.append("a", "b")
			require.NoError(t, r.wait(c, last))
			repaired.Store(true)
			r.eventually("0", `SELECT count(*) FROM outlog_parked`)
			require.Equal(t, "b1 b2 b3 a1 a2 a3 a4", r.effects("c"))
		})
	}
}

// TestDeadLetter: after the last attempt the event is dead and blocks its
// aggregate only.
func TestDeadLetter(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b", "a")
	calls := 0
	o := options("c", failing("c", func(e consumer.Event[string]) error {
		if e.AggregateID == "a" {
			calls++
			require.Equal(t, calls, e.Attempt)
			return fmt.Errorf("attempt %d", e.Attempt)
		}
		return nil
	}))
	o.MaxAttempts = 3
	c, stop := r.run(down{}, o)
	r.eventually("1:dead:3:attempt 3 3:blocked:0:waits for an earlier event of its aggregate",
		`SELECT group_concat(s, ' ') FROM (SELECT position || ':' || state || ':' || attempts || ':' || last_error AS s FROM outlog_parked ORDER BY position)`)
	last := r.append("b")
	require.NoError(t, r.wait(c, last))
	stop()
	require.Equal(t, 3, calls)
	require.Equal(t, "b1 b2", r.effects("c"))
}

// TestMorePoisonThanABatchHolds: others still flow, and each poison event is
// handled once per attempt.
func TestMorePoisonThanABatchHolds(t *testing.T) {
	r := newRig(t, store.Options{})
	var names []string
	for i := range 100 {
		names = append(names, fmt.Sprintf("bad%d", i))
	}
	r.append(names...)
	last := r.append("good")
	var calls atomic.Int64
	o := options("c", failing("c", func(e consumer.Event[string]) error {
		if strings.HasPrefix(e.AggregateID, "bad") {
			calls.Add(1)
			return consumer.RetryAfter(time.Hour, errors.New("poison"))
		}
		return nil
	}))
	o.BatchRows = 8
	c, stop := r.run(down{}, o)
	require.NoError(t, r.wait(c, last))
	stop()
	require.Equal(t, "good1", r.effects("c"))
	require.Equal(t, int64(100), calls.Load())
	r.eventually("100", `SELECT count(*) FROM outlog_parked WHERE state = 'retrying' AND attempts = 1`)
}

// TestDatabaseTroubleIsNoAttempt: the handler meets a full database, and wraps
// what it got.
func TestDatabaseTroubleIsNoAttempt(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a")
	var full atomic.Bool
	full.Store(true)
	var calls atomic.Int64
	c, _ := r.run(down{}, options("c", failing("c", func(e consumer.Event[string]) error {
		calls.Add(1)
		require.Equal(t, 1, e.Attempt)
		if full.Load() {
			return fmt.Errorf("reserve stock: %w", store.ErrUnavailable)
		}
		return nil
	})))
	require.Eventually(t, func() bool { return calls.Load() >= 5 && !c.Status().TroubleSince.IsZero() }, 10*time.Second, time.Millisecond)
	r.eventually("0", `SELECT count(*) FROM outlog_parked`)
	full.Store(false)
	require.NoError(t, r.wait(c, 1))
	require.Eventually(t, func() bool { return c.Status().TroubleSince.IsZero() }, 10*time.Second, time.Millisecond)
	require.Equal(t, "a1", r.effects("c"))
}

// TestHandlerThatBreaksTheTransaction kills the whole transaction from inside,
// openly and hiding it; its event is parked, the others are applied.
func TestHandlerThatBreaksTheTransaction(t *testing.T) {
	for name, hide := range map[string]bool{"returns the error": false, "hides it": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, store.Options{})
			r.append("good", "bad", "fair")
			c, stop := r.run(down{}, options("c", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
				if err := effect(ctx, tx, "c", e); err != nil || e.AggregateID != "bad" {
					return err
				}
				_, err := tx.ExecContext(ctx, `INSERT OR ROLLBACK INTO effects (n) VALUES (1), (1)`)
				if hide {
					return nil
				}
				return err
			}))
			require.NoError(t, r.wait(c, 3))
			stop()
			require.Equal(t, "good1 fair1", r.effects("c"))
			r.eventually("2", `SELECT group_concat(position) FROM outlog_parked`)
		})
	}
}

// TestTwoInstancesApplyOnce runs two instances of one consumer on one log.
func TestTwoInstancesApplyOnce(t *testing.T) {
	r := newRig(t, store.Options{})
	o := options("c", failing("c", fine))
	o.BatchRows = 3
	c1, stop1 := r.run(down{}, o)
	c2, stop2 := r.run(down{}, o)
	var last int64
	for range 50 {
		last = r.append("a", "b", "c")
	}
	require.NoError(t, r.wait(c1, last))
	require.NoError(t, r.wait(c2, last))
	stop1()
	stop2()
	r.eventually("150 150", `SELECT count(*) || ' ' || count(DISTINCT event_id) FROM effects`)
}

// TestTwoConsumersEachGetAll: dedup is per consumer.
func TestTwoConsumersEachGetAll(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a", "b")
	c1, stop1 := r.run(down{}, options("c1", failing("c1", fine)))
	c2, stop2 := r.run(down{}, options("c2", failing("c2", fine)))
	require.NoError(t, r.wait(c1, last))
	require.NoError(t, r.wait(c2, last))
	stop1()
	stop2()
	require.Equal(t, "a1 b1", r.effects("c1"))
	require.Equal(t, "a1 b1", r.effects("c2"))
}

// TestCorruptRowIsParked: another program wrote headers that are no JSON; the
// rest flows.
func TestCorruptRowIsParked(t *testing.T) {
	r := newRig(t, store.Options{})
	r.exec(`INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload, headers) VALUES
		('order', 'bad', 'Placed', '"x"', '{broken'), ('order', 'worse', 'Placed', 'not json', '{}'), ('order', 'good', 'Placed', '"x"', '{}')`)
	c, stop := r.run(down{}, options("c", failing("c", fine)))
	require.NoError(t, r.wait(c, 3))
	stop()
	require.Equal(t, "good1", r.effects("c"))
	r.eventually("2", `SELECT count(*) FROM outlog_parked WHERE last_error LIKE '%headers of event%' OR last_error LIKE '%decode payload%'`)
}

func TestOtherTypesArePassedOver(t *testing.T) {
	r := newRig(t, store.Options{})
	r.exec(`INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload) VALUES ('order', 'a', 'Unknown', 'x')`)
	c, _ := r.run(down{}, options("c", failing("c", fine)))
	require.NoError(t, r.wait(c, 1))
	r.eventually("0 0", `SELECT (SELECT count(*) FROM outlog_inbox) || ' ' || (SELECT count(*) FROM outlog_parked)`)
}

func TestStart(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b", "c")
	for name, tc := range map[string]struct {
		start consumer.Start
		want  string
	}{"beginning": {consumer.Beginning, "a1 b1 c1"}, "now": {consumer.Now, ""}, "at": {consumer.At(2), "c1"}} {
		o := options(name, failing(name, fine))
		o.Start = tc.start
		c, stop := r.run(down{}, o)
		require.NoError(t, r.wait(c, 3))
		stop()
		require.Equal(t, tc.want, r.effects(name))
	}
	r.exec(`UPDATE outlog_meta SET pruned_through = 2`)
	r.exec(`DELETE FROM outbox WHERE position <= 2`)
	for name, tc := range map[string]struct {
		start consumer.Start
		err   error
	}{"pruned": {consumer.At(1), consumer.ErrPruned}, "future": {consumer.At(9), consumer.ErrInvalidOption}} {
		o := options(name, failing(name, fine))
		o.Start = tc.start
		c, err := consumer.New(r.db, r.log, down{}, o)
		require.NoError(t, err)
		require.ErrorIs(t, c.Run(t.Context()), tc.err)
	}
}

// TestNewTypesAreRefused: a consumer that has passed over events of a type
// cannot quietly begin to take them.
func TestNewTypesAreRefused(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a")
	o := options("c", failing("c", fine))
	c, stop := r.run(down{}, o)
	require.NoError(t, r.wait(c, last))
	stop()
	o.Routes = append(o.Routes, consumer.Apply("Cancelled", failing("c", fine)))
	c, err := consumer.New(r.db, r.log, down{}, o)
	require.NoError(t, err)
	require.ErrorIs(t, c.Run(t.Context()), consumer.ErrNewTypes)
}

func TestOptionsAreChecked(t *testing.T) {
	r := newRig(t, store.Options{})
	for name, edit := range map[string]func(*consumer.Options){
		"no name":      func(o *consumer.Options) { o.Name = "" },
		"relay":        func(o *consumer.Options) { o.Name = "relay" },
		"odd name":     func(o *consumer.Options) { o.Name = "Ä" },
		"no start":     func(o *consumer.Options) { o.Start = consumer.Start{} },
		"no routes":    func(o *consumer.Options) { o.Routes = nil },
		"two routes":   func(o *consumer.Options) { o.Routes = append(o.Routes, o.Routes[0]) },
		"batch":        func(o *consumer.Options) { o.BatchRows = 5000 },
		"attempts":     func(o *consumer.Options) { o.MaxAttempts = -1 },
		"backoff":      func(o *consumer.Options) { o.BackoffMin, o.BackoffMax = time.Minute, time.Second },
		"poll":         func(o *consumer.Options) { o.Poll = time.Hour },
		"batch time":   func(o *consumer.Options) { o.BatchTime = time.Hour },
		"bad position": func(o *consumer.Options) { o.Start = consumer.At(-1) },
	} {
		o := options("c", failing("c", fine))
		edit(&o)
		_, err := consumer.New(r.db, r.log, down{}, o)
		require.ErrorIs(t, err, consumer.ErrInvalidOption, name)
	}
}

// TestPauseInTheDatabase: whoever sets paused stops the consumer at its next
// batch, and clearing it lets it go on.
func TestPauseInTheDatabase(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a")
	c, _ := r.run(down{}, options("c", failing("c", fine)))
	require.NoError(t, r.wait(c, last))
	r.exec(`UPDATE outlog_consumers SET paused = 1`)
	last = r.append("b")
	require.Eventually(t, func() bool { return c.Status().Paused }, 10*time.Second, time.Millisecond)
	require.Equal(t, "a1", r.effects("c"))
	r.exec(`UPDATE outlog_consumers SET paused = 0`)
	require.NoError(t, r.wait(c, last))
	require.Equal(t, "a1 b1", r.effects("c"))
}

// TestStopCountsNoAttempt stops the consumer while a handler is at work: the
// handler is not cancelled, and what it did counts.
func TestStopCountsNoAttempt(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b")
	entered, leave := make(chan struct{}), make(chan struct{})
	_, stop := r.run(down{}, options("c", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		if e.AggregateID == "a" {
			close(entered)
			<-leave
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		return effect(ctx, tx, "c", e)
	}))
	<-entered
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	close(leave)
	<-stopped
	require.Contains(t, []string{"a1", "a1 b1"}, r.effects("c"))
	r.eventually("0", `SELECT count(*) FROM outlog_parked`)
}

// TestSlowHandlerIsNamed: a handler that keeps all writers waiting is named in
// the log with the time it took.
func TestSlowHandlerIsNamed(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a")
	var out syncBuffer
	o := options("c", failing("c", func(consumer.Event[string]) error {
		<-time.After(60 * time.Millisecond)
		return nil
	}))
	o.Logger = slog.New(slog.NewTextHandler(&out, nil))
	c, stop := r.run(down{}, o)
	require.NoError(t, r.wait(c, 1))
	stop()
	require.Contains(t, out.String(), `msg="slow handler held up all writers" consumer=c type=Placed`)
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestCheckFindsDisagreement damages the bookkeeping in every way that the
// check knows.
func TestCheckFindsDisagreement(t *testing.T) {
	for name, tc := range map[string]struct{ damage, want string }{
		"inbox row gone":                    {`DELETE FROM outlog_inbox WHERE position = 2`, "neither applied nor parked"},
		"cursor too far":                    {`UPDATE outlog_consumers SET position = 4`, "neither applied nor parked"},
		"cursor back":                       {`UPDATE outlog_consumers SET position = 1`, "not yet there"},
		"consumer gone":                     {`DELETE FROM outlog_consumers`, "not yet there"},
		"applied and parked":                {`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at) SELECT 'c', event_id, position, 'order', 'x', 'dead', 0 FROM outbox WHERE position = 1`, "both applied and parked"},
		"applied, not in log":               {`UPDATE outlog_inbox SET event_id = '` + strings.Repeat("0", 26) + `' WHERE position = 3`, ""},
		"parked, not in log":                {`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at) VALUES ('c', 'x', 1, 'order', 'x', 'dead', 0)`, "parked although it is not in the log"},
		"inbox trimmed, row above it gone":  {`UPDATE outlog_consumers SET inbox_through = 1; DELETE FROM outlog_inbox WHERE position <= 2`, "position 2 is neither applied nor parked"},
		"inbox trimmed too far":             {`UPDATE outlog_consumers SET inbox_through = 4`, "the consumer is not yet there"},
		"inbox trimmed over a parked event": {`UPDATE outlog_consumers SET inbox_through = 3; DELETE FROM outlog_inbox; INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at) SELECT 'c', event_id, position, 'order', aggregate_id, 'dead', 0 FROM outbox WHERE position = 2`, "parked although the inbox is pruned there"},
		"blocked by nothing":                {`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at) SELECT 'c', event_id, position, 'order', aggregate_id, 'blocked', 0 FROM outbox WHERE position = 1; DELETE FROM outlog_inbox WHERE position = 1`, "waits behind nothing"},
		"overtaken":                         {`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at) SELECT 'c', event_id, position, 'order', aggregate_id, 'dead', 0 FROM outbox WHERE position = 1; DELETE FROM outlog_inbox WHERE position = 1`, "earlier event of its aggregate is parked"},
	} {
		t.Run(name, func(t *testing.T) {
			db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "outlog.db")})
			require.NoError(t, err)
			defer db.Close()
			log, err := outbox.Open(t.Context(), db)
			require.NoError(t, err)
			db.Register(consumer.Checks...)
			r := &rig{t: t, db: db, log: log}
			r.exec(`CREATE TABLE effects (n INTEGER PRIMARY KEY AUTOINCREMENT, consumer TEXT, event_id TEXT, aggregate TEXT, version INTEGER) STRICT`)
			r.append("a", "b", "a")
			c, stop := r.run(down{}, options("c", failing("c", fine)))
			require.NoError(t, r.wait(c, 3))
			stop()
			r.append("d")
			r.exec(tc.damage)
			results, err := db.Verify(t.Context())
			require.NoError(t, err)
			last := results[len(results)-1]
			require.Equal(t, "consumers agree", last.Name)
			require.False(t, last.OK)
			require.Contains(t, last.Detail, tc.want)
		})
	}
}

// trouble is what handlers do wrong, by name.
var trouble = map[string]func() error{
	"error":  func() error { return errors.New("an error") },
	"panic":  func() error { panic(errors.New("with an error value")) },
	"goexit": func() error { runtime.Goexit(); return nil },
}
