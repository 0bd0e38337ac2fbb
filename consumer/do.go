package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"outlog/internal/attempt"
	"outlog/outbox"
	"outlog/store"
)

// External effects.
//
// A Do handler never runs in a transaction. The batch that comes to its event
// parks it in state running and moves on; the effect starts after that commit,
// and its result is a transaction of its own: an inbox row instead of the
// parked one, or a recorded failure. A crash in between leaves the row
// running, and the next start makes it due again, with its attempts unchanged:
// so the handler may be called again with the same event id, never beside
// itself. Later events of the aggregate park behind it, which is what keeps
// them in order while aggregates run side by side.

// Do routes events of a type to a handler whose effect is outside the
// database. It is called at least once per event, in order per aggregate,
// beside other aggregates; pass e.ID on as the idempotency key. ctx ends after
// Options.HandlerTimeout, and when a stopping node runs out of patience.
//
// An error parks the event; see Permanent, RetryAfter and Outage. Events that
// the handler appends under ctx get ids derived from e, so that a second call
// appends nothing new.
func Do[T any](eventType string, handler func(ctx context.Context, e Event[T]) error) Route {
	return Route{eventType: eventType, do: func(ctx context.Context, r *outbox.Record, attempt int) error {
		e, err := decode[T](r, attempt)
		if err != nil {
			return Permanent(err)
		}
		return handler(ctx, e)
	}}
}

// startEffect marks an event as running; the effect itself starts after the
// commit.
func (b *run) startEffect(it *item) error {
	b.progress.done++
	if it.parked {
		if _, err := b.tx.ExecContext(b.ctx, `UPDATE outlog_parked SET state = 'running' WHERE consumer = ? AND event_id = ?`, b.c.opts.Name, it.EventID); err != nil {
			return err
		}
	}
	it.parked = true
	b.progress.effects = append(b.progress.effects, *it)
	return nil
}

// effects runs the external effects of one consumer.
type effects struct {
	c     *Consumer
	stop  context.Context // of Run: once it is over, no handler is called any more
	ctx   context.Context // of the handlers: outlives stop by the drain time
	slots chan struct{}   // one per handler at work
	most  int             // bounds pending

	mu      sync.Mutex
	pending map[string]*effect // by event id: started by a batch, result not yet stored
	ended   chan struct{}      // closed and replaced when one of them ends
}

// effect is one event on its way through its handler.
type effect struct {
	item
	generation int64     // of the consumer when it was started
	since      time.Time // when its handler was called, zero before
}

// waitingPerSlot bounds the rows in state running that only wait for a slot:
// enough to keep the slots busy, few enough to be called again after a crash.
const waitingPerSlot = 8

func newEffects(stop, ctx context.Context, c *Consumer) *effects {
	n := c.opts.Concurrency
	return &effects{c: c, stop: stop, ctx: ctx, slots: make(chan struct{}, n), most: waitingPerSlot * n,
		pending: map[string]*effect{}, ended: make(chan struct{})}
}

// room is how many more effects may be started.
func (x *effects) room() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.most - len(x.pending)
}

// start runs an effect as soon as there is a slot.
func (x *effects) start(it item) {
	e := &effect{item: it, generation: x.c.generation.Load()}
	x.mu.Lock()
	x.pending[e.EventID] = e
	x.mu.Unlock()
	go func() {
		defer x.end(e)
		select {
		case x.slots <- struct{}{}:
			defer func() { <-x.slots }()
		case <-x.stop.Done():
		}
		switch {
		case x.stop.Err() != nil: // it stays running, and is due at the next start
		case x.c.held() || x.c.generation.Load() != e.generation:
			x.putBack(e)
		default:
			x.run(e)
		}
	}()
}

// end forgets an effect and makes room for the next.
func (x *effects) end(e *effect) {
	x.mu.Lock()
	if x.pending[e.EventID] == e { // else it has been started again since its result was stored
		delete(x.pending, e.EventID)
	}
	close(x.ended)
	x.ended = make(chan struct{})
	x.mu.Unlock()
	x.c.nudge()
}

// run calls the handler and stores the result.
func (x *effects) run(e *effect) {
	x.mu.Lock()
	e.since = time.Now()
	x.mu.Unlock()
	f := x.call(e)
	if x.ctx.Err() != nil && f != nil {
		return // cut off by the stop: not its fault
	}
	x.finish(e, f)
}

// call runs the handler on a goroutine of its own, which it may end.
func (x *effects) call(e *effect) (f *failure) {
	c := x.c
	ctx, cancel := context.WithTimeout(x.ctx, c.opts.HandlerTimeout)
	defer cancel()
	late := time.AfterFunc(c.opts.HandlerTimeout, func() { c.warnLate(&busy{eventType: e.Type, eventID: e.EventID}) })
	defer late.Stop()
	done := make(chan struct{})
	start := time.Now()
	defer func() { c.handlers.Observe(int64(time.Since(start))) }()
	go func() {
		returned := false
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				f = newFailure(e.EventID, panicked(p), string(debug.Stack()))
			} else if !returned {
				f = newFailure(e.EventID, errGoexit, string(debug.Stack()))
			}
		}()
		err := c.routes[e.Type].do(outbox.WithInput(ctx, c.opts.Name, &e.Record), &e.Record, e.attempts+1)
		returned = true
		if err != nil {
			f = newFailure(e.EventID, err, "")
		}
	}()
	<-done
	return f
}

// finish stores an effect's result. Database trouble is not the effect's: it
// tries again until the node has to end, and then leaves the row running.
func (x *effects) finish(e *effect, f *failure) {
	for failures := 1; ; failures++ {
		err := x.c.hook("consumer.after-effect")
		if err == nil { // not cut off: a success that is lost means a second call
			err = x.c.storeResult(context.WithoutCancel(x.ctx), e, f)
		}
		if err == nil || x.ctx.Err() != nil {
			return
		}
		if errors.Is(err, errChanged) {
			x.c.opts.Logger.Warn("an external effect ended after its event was reset, removed or taken over", "consumer", x.c.opts.Name, "event", e.EventID)
			return
		}
		x.c.opts.Logger.Warn("result of an external effect not stored, trying again", "consumer", x.c.opts.Name, "event", e.EventID, "error", err)
		x.c.sleep(x.ctx, attempt.Jitter(10*time.Millisecond, time.Second, failures)+time.Millisecond)
	}
}

// storeResult turns a running row into an inbox row or a recorded failure.
func (c *Consumer) storeResult(ctx context.Context, e *effect, f *failure) error {
	err := c.db.UpdateLazy(ctx, func(tx *store.Tx) error {
		now := tx.Now()
		mine, err := c.isRunning(ctx, tx, e)
		switch {
		case err != nil:
			return err
		case !mine:
			return errChanged
		case f != nil && f.counts():
			return c.recordFailure(ctx, tx, now, &e.item, f)
		case f != nil:
			if err := makeDue(ctx, tx, c.opts.Name, e.EventID, now, attempt.Shorten(f.text)); err != nil {
				return err
			}
			_, err = releaseNext(ctx, tx, c.opts.Name, e.Aggregate(), now) // one redriven meanwhile waited for this
			return err
		}
		if _, err := tx.ExecContext(ctx, insertInbox, c.opts.Name, e.EventID, e.Position, now.UnixMicro()); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, deleteParked, c.opts.Name, e.EventID); err != nil {
			return err
		}
		_, err = releaseNext(ctx, tx, c.opts.Name, e.Aggregate(), now)
		return err
	})
	if err != nil {
		return fmt.Errorf("store result of %s: %w", e.EventID, err)
	}
	c.effectEnded(&e.item, f)
	return nil
}

// isRunning reports whether the effect's row is still the one it was started
// for.
func (c *Consumer) isRunning(ctx context.Context, tx *store.Tx, e *effect) (ok bool, err error) {
	err = tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outlog_parked k JOIN outlog_consumers c ON c.name = k.consumer
		WHERE k.consumer = ? AND k.event_id = ? AND k.state = 'running' AND c.generation = ?)`, c.opts.Name, e.EventID, e.generation).Scan(&ok)
	return ok, err
}

// makeDue turns a running row into one that is due, with no attempt counted.
func makeDue(ctx context.Context, tx *store.Tx, consumer, eventID string, now time.Time, reason string) error {
	_, err := tx.ExecContext(ctx, `UPDATE outlog_parked SET state = 'retrying', next_attempt_at = ?, delay_us = 0, last_error = ?
		WHERE consumer = ? AND event_id = ? AND state = 'running'`, now.UnixMicro(), reason, consumer, eventID)
	return err
}

// putBack makes an effect due that must not begin now: the consumer has been
// paused since, by a person or by itself. If that fails, orphans finds it.
func (x *effects) putBack(e *effect) {
	ctx := context.WithoutCancel(x.ctx)
	err := x.c.db.Update(ctx, func(tx *store.Tx) error {
		if mine, err := x.c.isRunning(ctx, tx, e); err != nil || !mine {
			return err
		}
		return makeDue(ctx, tx, x.c.opts.Name, e.EventID, tx.Now(), "")
	})
	if err != nil {
		x.c.opts.Logger.Warn("external effect not put back, trying again", "consumer", x.c.opts.Name, "event", e.EventID, "error", err)
	}
}

// orphans makes running rows due that no effect belongs to: the batch that
// wrote them was committed although it reported an error. Only the consumer's
// own goroutine starts effects, so none begins meanwhile.
func (x *effects) orphans(ctx context.Context) error {
	rows, err := x.c.db.Reader().QueryContext(ctx, `SELECT event_id FROM outlog_parked WHERE consumer = ? AND state = 'running'`, x.c.opts.Name)
	if err != nil {
		return err
	}
	defer rows.Close()
	var ids []string
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return err
		}
		x.mu.Lock()
		if x.pending[id] == nil {
			ids = append(ids, id)
		}
		x.mu.Unlock()
	}
	if err := rows.Err(); err != nil || len(ids) == 0 {
		return err
	}
	return x.c.db.Update(ctx, func(tx *store.Tx) error {
		for _, id := range ids {
			if err := makeDue(ctx, tx, x.c.opts.Name, id, tx.Now(), ""); err != nil {
				return err
			}
		}
		return nil
	})
}

// idle waits until no effect is under way, at most for d, and reports whether
// that came to be.
func (x *effects) idle(ctx context.Context, d time.Duration) bool {
	late := time.NewTimer(d)
	defer late.Stop()
	for {
		x.mu.Lock()
		n, ended := len(x.pending), x.ended
		x.mu.Unlock()
		if n == 0 {
			return true
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return false
		case <-late.C:
			return false
		}
	}
}

// drain waits for the effects under way, at most for the drain time, and then
// cuts them off.
func (x *effects) drain(cut context.CancelFunc) {
	o := &x.c.opts
	if x.idle(context.Background(), o.DrainTimeout) {
		return
	}
	o.Logger.Warn("external effects did not end in time; they are cut off and called again at the next start", "consumer", o.Name, "events", x.names())
	cut()
	if !x.idle(context.Background(), o.DrainTimeout) {
		o.Logger.Error("a handler ignores its context and is left behind", "consumer", o.Name, "events", x.names())
	}
}

// names lists the events whose handlers are at work.
func (x *effects) names() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	var out []string
	for _, e := range x.pending {
		if !e.since.IsZero() {
			out = append(out, e.Type+" "+e.EventID)
		}
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

// oldest is the effect whose handler has been at work the longest, nil if none
// is.
func (x *effects) oldest() *busy {
	x.mu.Lock()
	defer x.mu.Unlock()
	var b *busy
	for _, e := range x.pending {
		if !e.since.IsZero() && (b == nil || e.since.Before(b.since)) {
			b = &busy{e.Type, e.EventID, e.since}
		}
	}
	return b
}
