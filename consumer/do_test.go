package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/failpoint"
	"outlog/outbox"
	"outlog/store"
)

// endpoint is where external effects go: it notes what it got, and whether two
// calls for one aggregate or for one event were there at once.
type endpoint struct {
	mu      sync.Mutex
	got     []string // aggregate and version, in the order of the calls
	ids     []string
	open    map[string]int
	most    int // calls at once
	clashes int
	answer  func(ctx context.Context, e consumer.Event[string]) error
}

func (p *endpoint) do(ctx context.Context, e consumer.Event[string]) error {
	p.mu.Lock()
	if p.open == nil {
		p.open = map[string]int{}
	}
	p.got = append(p.got, fmt.Sprint(e.AggregateID, e.AggregateVersion))
	p.ids = append(p.ids, e.ID)
	if p.open[e.AggregateID]++; p.open[e.AggregateID] > 1 {
		p.clashes++
	}
	n := 0
	for _, o := range p.open {
		n += o
	}
	p.most = max(p.most, n)
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.open[e.AggregateID]--
		p.mu.Unlock()
	}()
	if p.answer == nil {
		return nil
	}
	return p.answer(ctx, e)
}

func (p *endpoint) of(aggregate string) (out []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.got {
		if strings.HasPrefix(g, aggregate) {
			out = append(out, g)
		}
	}
	return out
}

func doing(p *endpoint) consumer.Options {
	o := options("c", nil)
	o.Routes = []consumer.Route{consumer.Do("Placed", p.do)}
	return o
}

// TestEffectsRunBesideEachOtherInOrder: at most Concurrency at once, those of
// an aggregate one after the other, each once.
func TestEffectsRunBesideEachOtherInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		last := r.append("a", "b", "a", "c", "d", "a", "b", "e", "c", "c")
		p := &endpoint{answer: func(context.Context, consumer.Event[string]) error { time.Sleep(time.Second); return nil }}
		o := polling(doing(p), time.Minute)
		o.Concurrency = 3
		c, stop := r.run(down{}, o)
		require.NoError(t, r.wait(c, last))
		r.eventually("0", `SELECT count(*) FROM outlog_parked`)
		stop()
		require.Zero(t, p.clashes)
		require.Equal(t, 3, p.most)
		require.Len(t, p.got, 10)
		for _, a := range []string{"a", "b", "c", "d", "e"} {
			require.True(t, slices.IsSorted(p.of(a)), "%v", p.of(a))
		}
	})
}

// TestChainOfEffectsNeedsNoPolls: a hundred of one aggregate, and more than
// there is room for at once.
func TestChainOfEffectsNeedsNoPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		var names []string
		for i := range 300 {
			names = append(names, "a", fmt.Sprint("k", i))
		}
		last := r.append(names[:200]...)
		p := &endpoint{}
		start := time.Now()
		o := polling(doing(p), time.Minute)
		o.Concurrency = 2
		c, _ := r.run(down{}, o)
		require.NoError(t, r.wait(c, last))
		r.eventually("200", `SELECT count(*) FROM outlog_inbox`)
		require.Less(t, time.Since(start), 2*time.Second)
		require.Len(t, p.of("a"), 100)
	})
}

// TestEffectBehindAnOutage: an hour of a dead endpoint kills nothing, counts
// nothing, and is asked rarely; then all is done in order.
func TestEffectBehindAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		var names []string
		for i := range 200 {
			names = append(names, fmt.Sprint("k", i%50, "-"))
		}
		last := r.append(names...)
		over := time.Now().Add(time.Hour)
		p := &endpoint{answer: func(_ context.Context, e consumer.Event[string]) error {
			if e.Attempt != 1 {
				panic("an attempt was counted")
			}
			if time.Now().Before(over) {
				return consumer.Outage(errors.New("connection refused"))
			}
			return nil
		}}
		c, _ := r.run(down{}, polling(doing(p), time.Minute))
		time.Sleep(59 * time.Minute)
		r.eventually("0 0 0", `SELECT (SELECT count(*) FROM outlog_attempts) || ' ' || (SELECT count(*) FROM outlog_parked WHERE state = 'dead' OR attempts > 0) || ' ' || (SELECT count(*) FROM outlog_inbox)`)
		require.Contains(t, c.Status().PausedReason, "connection refused")
		p.mu.Lock()
		asked := len(p.got)
		p.got = nil
		p.mu.Unlock()
		require.Less(t, asked, 2000, "the pause holds back what was started, too")
		time.Sleep(5 * time.Minute)
		require.NoError(t, r.wait(c, last))
		r.eventually("200", `SELECT count(*) FROM outlog_inbox`)
		for i := range 50 {
			a := fmt.Sprint("k", i, "-")
			require.Equal(t, []string{a + "1", a + "2", a + "3", a + "4"}, p.of(a)[len(p.of(a))-4:])
		}
		require.Zero(t, p.clashes)
	})
}

// TestEffectMeetsDatabaseTrouble: a Do handler that uses the database itself is
// not to blame for it.
func TestEffectMeetsDatabaseTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		last := r.append("a")
		calls := 0
		p := &endpoint{answer: func(context.Context, consumer.Event[string]) error {
			if calls++; calls < 15 {
				return fmt.Errorf("look up address: %w", store.ErrUnavailable)
			}
			return nil
		}}
		c, _ := r.run(down{}, polling(doing(p), time.Minute))
		time.Sleep(time.Hour)
		require.NoError(t, r.wait(c, last))
		r.eventually("0", `SELECT count(*) FROM outlog_attempts`)
	})
}

// TestEffectFailuresAreRecorded: error, panic and Goexit of a Do handler.
func TestEffectFailuresAreRecorded(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("panic", "goexit", "error", "error")
	p := &endpoint{answer: func(_ context.Context, e consumer.Event[string]) error { return trouble[e.AggregateID]() }}
	o := doing(p)
	o.MaxAttempts = 2
	c, stop := r.run(down{}, o)
	r.eventually("3", `SELECT count(*) FROM outlog_parked WHERE state = 'dead' AND attempts = 2`)
	r.eventually("4", `SELECT count(*) FROM outlog_attempts WHERE stack <> '' AND (error LIKE '%with an error value%' OR error LIKE '%Goexit%')`)
	r.eventually("blocked", `SELECT state FROM outlog_parked WHERE position = 4`)
	stop()
	require.Len(t, p.got, 6)
	require.Equal(t, int64(6), c.Status().Failed)
	require.Equal(t, uint64(6), c.Status().Handlers.Count)
}

// TestMixedRoutesKeepOrder: Apply and Do events of one aggregate wait for each
// other.
func TestMixedRoutesKeepOrder(t *testing.T) {
	r := newRig(t, store.Options{})
	var mu sync.Mutex
	var got []string
	note := func(e consumer.Event[string]) {
		mu.Lock()
		got = append(got, fmt.Sprint(e.Type, e.AggregateVersion))
		mu.Unlock()
	}
	o := options("c", failing("c", func(e consumer.Event[string]) error { note(e); return nil }))
	o.Routes = append(o.Routes, consumer.Do("Mailed", func(_ context.Context, e consumer.Event[string]) error {
		if e.Attempt == 1 && e.AggregateVersion == 4 {
			return errors.New("once more")
		}
		note(e)
		return nil
	}))
	require.NoError(t, r.db.Update(t.Context(), func(tx *store.Tx) error {
		for _, typ := range []string{"Placed", "Mailed", "Placed", "Mailed", "Mailed", "Placed"} {
			if _, err := r.log.Append(t.Context(), tx, outbox.Event{AggregateType: "order", AggregateID: "a", Type: typ, Data: ""}); err != nil {
				return err
			}
		}
		return nil
	}))
	_, stop := r.run(down{}, o)
	r.eventually("6", `SELECT count(*) FROM outlog_inbox`)
	stop()
	require.Equal(t, []string{"Placed1", "Mailed2", "Placed3", "Mailed4", "Mailed5", "Placed6"}, got)
}

// TestEffectIsCalledAgainAfterACrash: the process dies between an effect and
// its record. The next one calls it again, with the same id and attempt.
func TestEffectIsCalledAgainAfterACrash(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "a")
	p := &endpoint{answer: func(_ context.Context, e consumer.Event[string]) error {
		if e.Attempt != 1 {
			return errors.New("an attempt was counted")
		}
		return nil
	}}
	o := doing(p)
	died := make(chan struct{})
	var once sync.Once
	o.Failpoint = failpoint.At("consumer.after-effect", 0, func() error { once.Do(func() { close(died) }); return errors.New("dead") })
	o.DrainTimeout = 10 * time.Millisecond
	_, stop := r.run(down{}, o)
	<-died
	r.eventually("running blocked", `SELECT group_concat(state, ' ') FROM (SELECT state FROM outlog_parked ORDER BY position)`)
	stop()
	require.Equal(t, []string{"a1"}, p.got)
	r.exec(`UPDATE outlog_consumers SET running = 1`) // as a process leaves it that was killed
	o.Failpoint = nil
	_, stop = r.run(down{}, o)
	r.eventually("2", `SELECT count(*) FROM outlog_inbox`)
	stop()
	require.Equal(t, []string{"a1", "a1", "a2"}, p.got)
	require.Equal(t, p.ids[0], p.ids[1])
	require.Zero(t, p.clashes)
}

// TestCommitThatReportsAnErrorLeavesNothingRunning: the batch that started an
// effect is stored although its commit failed for the caller.
func TestCommitThatReportsAnErrorLeavesNothingRunning(t *testing.T) {
	var armed atomic.Bool
	r := newRig(t, store.Options{Failpoint: func(point string) error {
		if point == "store.after-commit" && armed.CompareAndSwap(true, false) {
			return errors.New("who knows")
		}
		return nil
	}})
	p := &endpoint{}
	_, stop := r.run(down{}, doing(p))
	r.eventually("1", `SELECT count(*) FROM outlog_consumers`)
	r.exec(`UPDATE outlog_consumers SET paused = 1`)
	r.append("a")
	armed.Store(true)
	_ = r.db.Update(t.Context(), func(tx *store.Tx) error { // the armed one, if the consumer was not faster
		_, err := tx.ExecContext(t.Context(), `UPDATE outlog_consumers SET paused = 0`)
		return err
	})
	armed.Store(true)
	r.eventually("1", `SELECT count(*) FROM outlog_inbox`)
	armed.Store(false)
	stop()
}

// TestPausedConsumerBeginsNoEffect: those that wait for a slot wait longer.
func TestPausedConsumerBeginsNoEffect(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b", "c", "d")
	entered, leave := make(chan struct{}, 10), make(chan struct{})
	p := &endpoint{answer: func(context.Context, consumer.Event[string]) error { entered <- struct{}{}; <-leave; return nil }}
	o := doing(p)
	o.Concurrency = 1
	c, _ := r.run(down{}, o)
	<-entered
	r.eventually("4", `SELECT count(*) FROM outlog_parked WHERE state = 'running'`)
	r.exec(`UPDATE outlog_consumers SET paused = 1`)
	require.Eventually(t, func() bool { return c.Status().Paused }, 10*time.Second, time.Millisecond)
	leave <- struct{}{}
	r.eventually("3", `SELECT count(*) FROM outlog_parked WHERE state = 'retrying' AND attempts = 0`)
	require.Len(t, p.got, 1)
	close(leave)
	r.exec(`UPDATE outlog_consumers SET paused = 0`)
	r.eventually("4", `SELECT count(*) FROM outlog_inbox`)
}

// TestStopBeginsNoEffect: a stop waits for the effects at work, and does not
// begin those that wait for a slot.
func TestStopBeginsNoEffect(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b", "c")
	entered, leave := make(chan struct{}, 10), make(chan struct{})
	p := &endpoint{answer: func(context.Context, consumer.Event[string]) error { entered <- struct{}{}; <-leave; return nil }}
	o := doing(p)
	o.Concurrency = 1
	c, err := consumer.New(r.db, r.log, down{}, o)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	<-entered
	r.eventually("3", `SELECT count(*) FROM outlog_parked WHERE state = 'running'`)
	cancel()
	leave <- struct{}{}
	require.NoError(t, <-done)
	require.Len(t, p.got, 1)
	r.eventually("1 2", `SELECT (SELECT count(*) FROM outlog_inbox) || ' ' || (SELECT count(*) FROM outlog_parked WHERE state = 'running' AND attempts = 0)`)
	close(leave)
}

// TestDrainCutsOffSlowEffects: past the drain time a handler's context ends,
// and that counts as nothing.
func TestDrainCutsOffSlowEffects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		r.append("a")
		p := &endpoint{answer: func(ctx context.Context, _ consumer.Event[string]) error { <-ctx.Done(); return ctx.Err() }}
		o := polling(doing(p), time.Minute)
		o.DrainTimeout, o.HandlerTimeout = 3*time.Second, time.Hour
		c, stop := r.run(down{}, o)
		time.Sleep(time.Minute)
		require.Contains(t, c.Status().Handling, "Placed ")
		require.GreaterOrEqual(t, c.Status().HandlingFor, 50*time.Second)
		start := time.Now()
		stop()
		require.WithinDuration(t, start.Add(3*time.Second), time.Now(), time.Second)
		r.eventually("running 0", `SELECT state || ' ' || attempts FROM outlog_parked`)
		r.eventually("0", `SELECT count(*) FROM outlog_attempts`)
	})
}

// TestEffectOfAnOlderGenerationIsNotRecorded: a reset elsewhere while an effect
// is under way.
func TestEffectOfAnOlderGenerationIsNotRecorded(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a")
	entered, leave := make(chan struct{}, 10), make(chan struct{})
	open := sync.OnceFunc(func() { close(leave) })
	defer open()
	p := &endpoint{answer: func(context.Context, consumer.Event[string]) error { entered <- struct{}{}; <-leave; return nil }}
	c, stop := r.run(down{}, doing(p))
	<-entered
	r.exec(`UPDATE outlog_consumers SET generation = generation + 1`)
	require.Eventually(t, func() bool { // the consumer has seen it, and could take the effect for one of the new generation
		short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		return errors.Is(c.WaitApplied(short, 1), context.DeadlineExceeded)
	}, 10*time.Second, time.Millisecond)
	leave <- struct{}{}
	require.Eventually(t, func() bool { return len(p.of("a")) == 2 }, 10*time.Second, time.Millisecond, "it is called again, for the new generation")
	r.eventually("0", `SELECT count(*) FROM outlog_inbox`)
	open()
	r.eventually("1", `SELECT count(*) FROM outlog_inbox`)
	stop()
	require.Zero(t, p.clashes)
}

// TestResetWaitsForEffects: and is refused when they do not end in time.
func TestResetWaitsForEffects(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a")
	entered, leave := make(chan struct{}, 10), make(chan struct{})
	p := &endpoint{answer: func(context.Context, consumer.Event[string]) error { entered <- struct{}{}; <-leave; return nil }}
	o := doing(p)
	o.DrainTimeout = 10 * time.Millisecond
	o.Clear = func(context.Context, *store.Tx, int64) error { return nil }
	r.run(down{}, o)
	<-entered
	require.ErrorContains(t, r.reset("beginning"), consumer.ErrEffectsRunning.Error())
	close(leave)
	r.eventually("1", `SELECT count(*) FROM outlog_inbox`)
	require.NoError(t, r.reset("beginning"))
	<-entered
	r.eventually("1", `SELECT count(*) FROM outlog_inbox`)
}

func (r *rig) reset(to string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var id int64
	err := r.db.Update(ctx, func(tx *store.Tx) (err error) {
		id, err = consumer.RequestReset(ctx, tx, "c", consumer.ResetRequest{To: to}, tx.Now())
		return err
	})
	require.NoError(r.t, err)
	return consumer.AwaitReset(ctx, r.db.Reader(), id)
}

// appending is a consumer that appends one event for each it applies.
func appending(r *rig) consumer.Options {
	o := options("c", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		if err := effect(ctx, tx, "c", e); err != nil {
			return err
		}
		_, err := r.log.Append(ctx, tx, outbox.Event{AggregateType: "invoice", AggregateID: e.AggregateID, Type: "Billed", Data: e.ID})
		return err
	})
	o.Clear = func(ctx context.Context, tx *store.Tx, after int64) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM effects WHERE event_id IN (SELECT event_id FROM outbox WHERE position > ?)`, after)
		return err
	}
	return o
}

// TestEffectThatAppendsDoesNotRepeatItself: a Do handler that is called again
// after a crash finds its events in the log.
func TestEffectThatAppendsDoesNotRepeatItself(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a")
	var calls atomic.Int64
	p := &endpoint{answer: func(ctx context.Context, e consumer.Event[string]) error {
		err := r.db.Update(ctx, func(tx *store.Tx) error {
			_, err := r.log.Append(ctx, tx, outbox.Event{AggregateType: "mail", AggregateID: "1", Type: "Sent", Data: e.ID})
			return err
		})
		if calls.Add(1) == 1 {
			return errors.Join(errors.New("the answer was lost"), err)
		}
		return err
	}}
	_, stop := r.run(down{}, doing(p))
	r.eventually("1", `SELECT count(*) FROM outlog_inbox`)
	stop()
	require.Equal(t, int64(2), calls.Load())
	r.eventually("2", `SELECT count(*) FROM outbox`)
}
