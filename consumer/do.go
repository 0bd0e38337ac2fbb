package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

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
// An error parks the event; see Permanent, RetryAfter and Outage.
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
	b.done++
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
	ctx   context.Context // of the handlers: outlives a requested stop by the drain time
	slots chan struct{}   // one per handler at work
	wg    sync.WaitGroup

	mu      sync.Mutex
	pending int // started by a batch, result not yet stored
}

// maxEffects bounds the rows in state running, started or waiting for a slot.
const maxEffects = 1024

func newEffects(ctx context.Context, c *Consumer) *effects {
	return &effects{c: c, ctx: ctx, slots: make(chan struct{}, c.opts.Concurrency)}
}

// room is how many more effects may be started.
func (x *effects) room() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return maxEffects - x.pending
}

// start runs an effect as soon as there is a slot.
func (x *effects) start(it item) {
	x.mu.Lock()
	x.pending++
	x.mu.Unlock()
	x.wg.Go(func() {
		defer func() {
			x.mu.Lock()
			x.pending--
			x.mu.Unlock()
			x.c.nudge()
		}()
		select {
		case x.slots <- struct{}{}:
		case <-x.ctx.Done():
			return // not called: it stays running, and is due at the next start
		}
		defer func() { <-x.slots }()
		f := x.call(&it)
		if x.ctx.Err() != nil && f != nil {
			return // cut off by the stop: not its fault
		}
		x.finish(&it, f)
	})
}

// call runs the handler on a goroutine of its own, which it may end.
func (x *effects) call(it *item) (f *failure) {
	c := x.c
	ctx, cancel := context.WithTimeout(x.ctx, c.opts.HandlerTimeout)
	defer cancel()
	late := time.AfterFunc(c.opts.HandlerTimeout, func() {
		c.opts.Logger.Warn("handler is past its deadline", "consumer", c.opts.Name, "type", it.Type, "event", it.EventID, "deadline", c.opts.HandlerTimeout)
	})
	defer late.Stop()
	done := make(chan struct{})
	go func() {
		returned := false
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				f = &failure{it.EventID, panicked(p), string(debug.Stack())}
			} else if !returned {
				f = &failure{it.EventID, errGoexit, string(debug.Stack())}
			}
		}()
		if err := c.routes[it.Type].do(ctx, &it.Record, it.attempts+1); err != nil {
			f = &failure{it.EventID, err, ""}
		}
		returned = true
	}()
	<-done
	return f
}

// finish stores an effect's result. Database trouble is not the effect's: it
// tries again until the node has to end, and then leaves the row running.
func (x *effects) finish(it *item, f *failure) {
	for failures := 1; ; failures++ {
		err := x.c.hook("consumer.after-effect")
		if err == nil {
			err = x.c.storeResult(x.ctx, it, f)
		}
		if err == nil || x.ctx.Err() != nil {
			return
		}
		if errors.Is(err, errChanged) {
			x.c.opts.Logger.Warn("an external effect ended after its consumer was reset", "consumer", x.c.opts.Name, "event", it.EventID)
			return
		}
		x.c.opts.Logger.Warn("result of an external effect not stored, trying again", "consumer", x.c.opts.Name, "event", it.EventID, "error", err)
		x.c.sleep(x.ctx, jitter(10*time.Millisecond, time.Second, failures)+time.Millisecond)
	}
}

// storeResult turns a running row into an inbox row or a recorded failure.
func (c *Consumer) storeResult(ctx context.Context, it *item, f *failure) error {
	var pause error
	err := c.db.UpdateLazy(ctx, func(tx *store.Tx) error {
		pause = nil
		now := tx.Now()
		var mine bool
		err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outlog_parked k JOIN outlog_consumers c ON c.name = k.consumer
			WHERE k.consumer = ? AND k.event_id = ? AND k.state = 'running' AND c.generation = ?)`, c.opts.Name, it.EventID, c.generation.Load()).Scan(&mine)
		if err != nil {
			return err
		}
		if !mine {
			return errChanged
		}
		switch {
		case f != nil && isOutage(f.err):
			pause = f.err
			_, err = tx.ExecContext(ctx, `UPDATE outlog_parked SET state = 'retrying', next_attempt_at = ?, delay_us = 0, last_error = ? WHERE consumer = ? AND event_id = ?`,
				now.UnixMicro(), shorten(f.err.Error()), c.opts.Name, it.EventID)
			return err
		case f != nil:
			return c.recordFailure(ctx, tx, now, it, f)
		}
		if _, err := tx.ExecContext(ctx, insertInbox, c.opts.Name, it.EventID, it.Position, now.UnixMicro()); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, deleteParked, c.opts.Name, it.EventID); err != nil {
			return err
		}
		_, err = releaseNext(ctx, tx, c.opts.Name, it.Aggregate(), now)
		return err
	})
	if err != nil {
		return fmt.Errorf("store result of %s: %w", it.EventID, err)
	}
	c.effectEnded(it, f, pause)
	return nil
}

// idle waits until no effect is under way, at most for d. It asks again and
// again, because a WaitGroup must not be added to while an abandoned Wait is
// still on it.
func (x *effects) idle(d time.Duration) bool {
	late := time.NewTimer(d)
	defer late.Stop()
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for x.room() < maxEffects {
		select {
		case <-again.C:
		case <-late.C:
			return false
		}
	}
	return true
}

// drain waits for the effects under way, at most for the drain time, and then
// cuts them off.
func (x *effects) drain(cut context.CancelFunc) {
	if x.idle(x.c.opts.DrainTimeout) {
		return
	}
	x.c.opts.Logger.Warn("external effects did not end in time; they are cut off and called again at the next start", "consumer", x.c.opts.Name)
	cut()
	if !x.idle(x.c.opts.DrainTimeout) {
		x.c.opts.Logger.Error("a handler ignores its context and is left behind", "consumer", x.c.opts.Name)
	}
}
