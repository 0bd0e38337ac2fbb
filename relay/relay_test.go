package relay_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/broker"
	"outlog/outbox"
	"outlog/relay"
	"outlog/store"
)

// rig is a log and the real broker, with the relay started by hand.
type rig struct {
	t        testing.TB
	dir      string
	db       *store.DB
	log      *outbox.Log
	broker   *broker.Broker
	stop     func() // of the broker
	appended int

	maxMessage int // of the broker, 0: its default
}

func newRig(t testing.TB) *rig {
	r := newLog(t)
	r.startBroker()
	return r
}

// newLog returns a rig without a broker. Every check must pass when the test
// ends.
func newLog(t testing.TB) *rig {
	r := &rig{t: t, dir: t.TempDir(), stop: func() {}}
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(r.dir, "outlog.db")})
	require.NoError(t, err)
	r.db = db
	r.log, err = outbox.Open(t.Context(), db)
	require.NoError(t, err)
	db.Register(relay.Checks...)
	t.Cleanup(func() {
		results, err := db.Verify(context.Background())
		require.NoError(t, err)
		for _, c := range results {
			require.True(t, c.OK, "%s: %s", c.Name, c.Detail)
		}
		r.stop()
		require.NoError(t, db.Close())
	})
	return r
}

func (r *rig) streamDir() string { return filepath.Join(r.dir, "jetstream") }

func (r *rig) startBroker() {
	b, err := broker.New(broker.Options{Dir: r.streamDir(), LogID: r.log.ID(), MaxMessage: r.maxMessage})
	require.NoError(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.Run(ctx) }()
	require.NoError(r.t, b.WaitUp(r.t.Context()))
	r.broker = b
	r.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(r.t, <-done)
	})
}

// append adds n events, round-robin over three aggregates.
func (r *rig) append(n int) {
	require.NoError(r.t, r.db.Update(r.t.Context(), func(tx *store.Tx) error {
		for i := range n {
			if _, err := r.log.Append(r.t.Context(), tx, outbox.Event{AggregateType: "order", AggregateID: fmt.Sprint((r.appended + i) % 3),
				Type: "Placed", Data: r.appended + i}); err != nil {
				return err
			}
		}
		return nil
	}))
	r.appended += n
}

// relay runs a relay with this publisher until the log is published and the
// cursor stored, then stops it.
func (r *rig) relay(pub relay.Publisher, o relay.Options) *relay.Relay {
	re, err := relay.New(r.db, r.log, pub, o)
	require.NoError(r.t, err)
	head, err := r.log.Head(r.t.Context())
	require.NoError(r.t, err)
	ctx, cancel := context.WithCancel(r.t.Context())
	done := make(chan error, 1)
	go func() { done <- re.Run(ctx) }()
	require.Eventually(r.t, func() bool { return re.Status().Position == head }, time.Minute, time.Millisecond)
	cancel()
	require.NoError(r.t, <-done)
	return re
}

// requireStream proves that the stream holds the log's events after position
// from, in order, and nothing else; and that the cursor is at its end.
func (r *rig) requireStream(from int64) {
	r.t.Helper()
	rows, err := r.log.Read(r.t.Context(), from, outbox.Page{})
	require.NoError(r.t, err)
	var got []string
	var lastSeq uint64
	require.NoError(r.t, r.broker.Scan(r.t.Context(), func(seq uint64, m relay.Message) error {
		got = append(got, m.Record.EventID)
		lastSeq = seq
		return nil
	}))
	var want []string
	for _, e := range rows {
		want = append(want, e.EventID)
	}
	require.Equal(r.t, want, got)
	var position int64
	var seq uint64
	require.NoError(r.t, r.db.Reader().QueryRow(`SELECT position, stream_seq FROM outlog_relay`).Scan(&position, &seq))
	if len(rows) > 0 {
		require.Equal(r.t, rows[len(rows)-1].Position, position)
		require.Equal(r.t, lastSeq, seq)
	}
}

func (r *rig) exec(query string, args ...any) {
	r.t.Helper()
	require.NoError(r.t, r.db.Update(r.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(r.t.Context(), query, args...)
		return err
	}))
}

// TestStreamOrderIsLogOrder publishes through a broker that loses answers and
// stores parts of windows.
func TestStreamOrderIsLogOrder(t *testing.T) {
	r := newRig(t)
	r.append(1500)
	pub := &flaky{Publisher: r.broker.Publisher(), every: 3}
	re, err := relay.New(r.db, r.log, pub, relay.Options{WindowRows: 64, BackoffMax: time.Millisecond})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- re.Run(ctx) }()
	for range 20 {
		r.append(7)
	}
	require.Eventually(t, func() bool { return re.Status().Position == int64(r.appended) }, 20*time.Second, time.Millisecond)
	cancel()
	require.NoError(t, <-done)
	require.Greater(t, pub.broken, 5)
	r.requireStream(0)
}

// flaky breaks every n-th window: it stores a part and says that nothing is
// known, stores everything and says so, or stores nothing.
type flaky struct {
	relay.Publisher
	every, calls, broken int
}

func (f *flaky) Append(ctx context.Context, base uint64, msgs []relay.Message) (int, error) {
	f.calls++
	if f.calls%f.every != 0 {
		return f.Publisher.Append(ctx, base, msgs)
	}
	f.broken++
	timeout := fmt.Errorf("%w: timed out", relay.ErrOutage)
	switch f.broken % 4 {
	case 0:
		return 0, timeout
	case 1:
		_, err := f.Publisher.Append(ctx, base, msgs[:len(msgs)/2])
		return 0, errOr(err, timeout)
	case 2:
		n, err := f.Publisher.Append(ctx, base, msgs[:(len(msgs)+1)/2])
		return n, errOr(err, timeout)
	default:
		_, err := f.Publisher.Append(ctx, base, msgs)
		return 0, errOr(err, timeout)
	}
}

func errOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// TestReconcile breaks the agreement of stream and cursor on the real server
// in each way, starts a relay, and looks at the result.
func TestReconcile(t *testing.T) {
	for _, tc := range []struct {
		name       string
		reconciled int64 // how often the second relay had to act
		from       int64 // first position that the stream lacks afterwards
		breakIt    func(r *rig)
	}{
		{"equal", 0, 0, func(r *rig) {}},
		{"ahead: crash before the cursor was stored", 1, 0, func(r *rig) {
			r.exec(`UPDATE outlog_relay SET position = 10, event_id = (SELECT event_id FROM outbox WHERE position = 10), stream_seq = 10`)
			r.exec(`DELETE FROM outlog_publications`)
			r.exec(`INSERT INTO outlog_publications VALUES (1, 10, 1, 10, 0)`)
		}},
		{"ahead: nothing was ever stored", 1, 0, func(r *rig) {
			r.exec(`UPDATE outlog_relay SET position = 0, event_id = '', stream_seq = 0`)
			r.exec(`DELETE FROM outlog_publications`)
		}},
		{"behind: the stream lost its tail", 1, 0, func(r *rig) {
			r.republish(20)
		}},
		{"behind: in the middle of what one relay published", 1, 0, func(r *rig) {
			r.republish(7)
		}},
		{"gone", 1, 0, func(r *rig) {
			r.stop()
			require.NoError(r.t, os.RemoveAll(r.streamDir()))
			r.startBroker()
		}},
		{"recreated empty by somebody", 1, 0, func(r *rig) {
			require.NoError(r.t, r.broker.Publisher().Recreate(r.t.Context(), 1))
		}},
		{"a stray message at the tail", 1, 0, func(r *rig) {
			require.NoError(r.t, r.broker.PublishRaw(r.t.Context(), "outlog.order.Placed", map[string][]string{"ce-id": {"x"}}, []byte("stray")))
		}},
		{"another log's stream", 1, 0, func(r *rig) {
			r.exec(`UPDATE outlog_relay SET event_id = 'other'`)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t)
			r.append(30)
			first := r.relay(r.broker.Publisher(), relay.Options{})
			r.requireStream(0)
			tc.breakIt(r)
			r.append(5)
			second := r.relay(r.broker.Publisher(), relay.Options{})
			require.Equal(t, tc.reconciled, second.Status().Reconciled)
			require.Greater(t, second.Status().StreamSeq, first.Status().StreamSeq, "a rebuilt stream begins above every sequence used")
			r.requireStream(tc.from)
			r.append(5)
			require.Zero(t, r.relay(r.broker.Publisher(), relay.Options{}).Status().Reconciled, "the agreement must last")
			r.requireStream(tc.from)
		})
	}
}

// republish makes a stream that holds only the first n events, as one does
// that lost its tail.
func (r *rig) republish(n int) {
	pub := r.broker.Publisher()
	require.NoError(r.t, pub.Recreate(r.t.Context(), 1))
	rows, err := r.log.Read(r.t.Context(), 0, outbox.Page{Rows: n})
	require.NoError(r.t, err)
	msgs := make([]relay.Message, n)
	for i := range rows {
		msgs[i] = relay.Message{LogID: r.log.ID(), Record: rows[i]}
	}
	stored, err := pub.Append(r.t.Context(), 0, msgs)
	require.NoError(r.t, err)
	require.Equal(r.t, n, stored)
}

// TestRebuildHonoursMaxAge rebuilds a stream of which only the newer events
// would still be there.
func TestRebuildHonoursMaxAge(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(dir, "outlog.db"), Now: func() time.Time { return now }})
	require.NoError(t, err)
	defer db.Close()
	r := &rig{t: t, dir: dir, db: db}
	r.log, err = outbox.Open(t.Context(), db)
	require.NoError(t, err)
	r.startBroker()
	defer func() { r.stop() }()
	now = now.Add(-2 * time.Hour)
	r.append(4)
	r.relay(r.broker.Publisher(), relay.Options{MaxAge: time.Hour})
	now = now.Add(2 * time.Hour)
	r.append(1)
	now = now.Add(-24 * time.Hour) // one event by a wrong clock
	r.append(1)
	now = now.Add(24 * time.Hour)
	r.append(1)
	r.stop()
	require.NoError(t, os.RemoveAll(r.streamDir()))
	r.startBroker()
	r.relay(r.broker.Publisher(), relay.Options{MaxAge: time.Hour})
	r.requireStream(4)
	detail, err := relay.Checks[0].Run(t.Context(), db.Reader())
	require.NoError(t, err, "what the new stream leaves out is neither lost nor forgotten")
	require.Equal(t, "7 published, 0 parked, 0 pending", detail) // four of them on the old stream
}

// TestFenced lets a second owner claim the cursor while the first has a window
// published and not yet stored.
func TestFenced(t *testing.T) {
	r := newRig(t)
	r.append(10)
	taken := &takeover{Publisher: r.broker.Publisher(), then: func() { r.exec(`UPDATE outlog_relay SET token = token + 1`) }}
	re, err := relay.New(r.db, r.log, taken, relay.Options{})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // without the fence it would go on for ever
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- re.Run(ctx) }()
	require.Eventually(t, func() bool { return re.Status().Position == 10 }, 10*time.Second, time.Millisecond)
	r.append(1) // whatever it does next, it finds out
	require.ErrorIs(t, <-done, relay.ErrFenced)
	var position int64
	require.NoError(t, r.db.Reader().QueryRow(`SELECT position FROM outlog_relay`).Scan(&position))
	require.Zero(t, position, "the fenced owner must not have moved the cursor")
	r.relay(r.broker.Publisher(), relay.Options{})
	r.requireStream(0)
}

// takeover calls then after the first window.
type takeover struct {
	relay.Publisher
	then func()
	once sync.Once
}

func (p *takeover) Append(ctx context.Context, base uint64, msgs []relay.Message) (int, error) {
	n, err := p.Publisher.Append(ctx, base, msgs)
	p.once.Do(p.then)
	return n, err
}

// TestTwoRelaysNeverDouble runs two relays of two owners on one stream: whoever loses the
// race for a sequence reconciles, and each event is on the stream once.
func TestTwoRelaysNeverDouble(t *testing.T) {
	r := newRig(t)
	r.append(500)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	for range 2 {
		re, err := relay.New(r.db, r.log, r.broker.Publisher(), relay.Options{WindowRows: 16, BackoffMax: time.Millisecond, DrainTimeout: 20 * time.Second})
		require.NoError(t, err)
		wg.Go(func() {
			if err := re.Run(ctx); err != nil {
				require.ErrorIs(t, err, relay.ErrFenced)
			}
		})
	}
	require.Eventually(t, func() bool {
		var position int64
		return r.db.Reader().QueryRow(`SELECT position FROM outlog_relay`).Scan(&position) == nil && position == int64(r.appended)
	}, 20*time.Second, time.Millisecond)
	cancel()
	wg.Wait()
	r.append(1)
	r.relay(r.broker.Publisher(), relay.Options{})
	r.requireStream(0)
}

// BenchmarkRelay drains a log of 100k events, beside raw asynchronous
// publishing of the same messages in windows of the same size.
func BenchmarkRelay(b *testing.B) {
	r := newRig(b)
	for r.appended < b.N {
		r.append(min(1000, b.N-r.appended))
	}
	b.ResetTimer()
	r.relay(r.broker.Publisher(), relay.Options{DrainTimeout: 5 * time.Minute})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
}
