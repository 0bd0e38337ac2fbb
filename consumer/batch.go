package consumer

import (
	"context"
	"database/sql"
	"errors"
	"runtime/debug"
	"time"

	"outlog/outbox"
	"outlog/store"
)

// The one loop that applies events, fresh or parked.
//
// A batch is one transaction: the consumer's row is read again, then each
// event gets its inbox row and its handler, then the cursor moves. There are
// no savepoints. When a handler fails, all of the batch is undone and run
// again up to that event, which is then parked instead of handled, in the same
// transaction: so everything before it is applied, its failure is recorded,
// and the cursor is behind it. That costs a failing event one repetition of
// the events before it, and a succeeding one nothing; and it treats an error,
// a panic, Goexit and a transaction that the handler broke all the same.

// item is one event to be applied.
type item struct {
	outbox.Record
	parked   bool // it has a row in outlog_parked
	attempts int  // failed ones so far
}

// errChanged is returned when the consumer's row is not what this instance
// last saw: a reset, or another instance was faster.
var errChanged = errors.New("the consumer's state was changed")

// progress is what a committed batch did.
type progress struct {
	state
	rows      int // log rows the cursor passed
	applied   int
	parked    int       // newly parked, for whatever reason
	failed    *item     // the event whose failure was recorded, if one was
	effects   []item    // external effects to start now that their rows are committed
	outage    error     // a handler's Outage that ended the batch
	more      bool      // the batch ended before its work did
	nextDue   time.Time // of the earliest parked event, zero if there is none
	anyParked bool
}

// limits bound one batch.
type limits struct {
	items   int // events handled
	effects int // external effects that may be started
}

// batch applies what is due among the parked events, and then rows, the log's
// next. On an error nothing was applied.
func (c *Consumer) batch(ctx context.Context, rows []outbox.Record, l limits, failed *failure) (progress, error) {
	for {
		p, err := c.attempt(ctx, rows, l, failed)
		if err == nil || isTrouble(err) {
			return p, err
		}
		failed, _ = errors.AsType[*failure](err)
	}
}

// maxBatchBytes bounds the payloads of a batch in memory.
const maxBatchBytes = 8 << 20

// attempt runs one transaction, on a goroutine of its own so that a handler's
// Goexit ends that and not the consumer.
func (c *Consumer) attempt(ctx context.Context, rows []outbox.Record, l limits, failed *failure) (p progress, err error) {
	done := make(chan struct{})
	returned := false
	var b *run
	go func() {
		defer close(done)
		err = c.db.UpdateLazy(ctx, func(tx *store.Tx) error {
			b = &run{c: c, ctx: ctx, tx: tx, now: tx.Now(), deadline: time.Now().Add(c.opts.BatchTime), limits: l, failed: failed}
			e := b.apply(rows)
			p = b.progress
			return e
		})
		returned = true
	}()
	<-done
	c.setBusy(nil)
	if !returned {
		err = &failure{b.current.EventID, errGoexit, b.stack}
	}
	return p, err
}

// run is one transaction of a batch.
type run struct {
	c        *Consumer
	ctx      context.Context
	tx       *store.Tx
	now      time.Time
	deadline time.Time
	limits   limits
	failed   *failure // the event to park instead of handling it
	current  *item    // being handled
	stack    string   // of a handler that did not return
	progress progress
	done     int
	stop     bool
}

// apply is the body of the transaction.
func (b *run) apply(rows []outbox.Record) error {
	c, p := b.c, &b.progress
	s, err := readState(b.ctx, b.tx, c.opts.Name)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if err != nil || s != c.state { // no row: reload says that it was removed
		return errChanged
	}
	p.state = s
	if s.paused {
		return nil
	}
	if err := b.parkedEvents(); err != nil {
		return err
	}
	for i := range rows {
		if b.over() {
			p.more = true
			break
		}
		passed, err := b.fresh(&rows[i])
		if err != nil {
			return err
		}
		if !passed {
			p.more = true
			break
		}
		p.position = rows[i].Position
		p.rows++
	}
	if p.position != s.position {
		if err := b.moveCursor(s); err != nil {
			return err
		}
	}
	if p.anyParked {
		if p.nextDue, err = nextDue(b.ctx, b.tx, c.opts.Name); err != nil {
			return err
		}
	}
	return c.hook("consumer.after-handler")
}

// moveCursor writes the cursor, and with it the proof that this run of the
// program makes progress. It must hit the row that was read.
func (b *run) moveCursor(from state) error {
	r, err := b.tx.ExecContext(b.ctx, `UPDATE outlog_consumers SET position = ?, updated_at = ?
		WHERE name = ? AND generation = ? AND position = ?`, b.progress.position, b.now.UnixMicro(), b.c.opts.Name, from.generation, from.position)
	if err != nil {
		return err
	}
	if n, err := r.RowsAffected(); err != nil || n != 1 {
		return errors.Join(errChanged, err)
	}
	return nil
}

// over reports whether the batch has to end: its time or number is up, the
// consumer stops, or an event has just failed.
func (b *run) over() bool {
	return b.stop || b.done > 0 && (b.done >= b.limits.items || time.Now().After(b.deadline) || b.ctx.Err() != nil)
}

// parkedEvents applies the parked events that are due, and after each success
// the next of its aggregate.
func (b *run) parkedEvents() error {
	var err error
	p := &b.progress
	if p.anyParked, err = hasParked(b.ctx, b.tx, b.c.opts.Name); err != nil || !p.anyParked {
		return err
	}
	due, err := dueEvents(b.ctx, b.tx, b.c.opts.Name, b.now, b.c.opts.BatchRows)
	if err != nil {
		return err
	}
	for len(due) > 0 {
		if b.over() {
			p.more = true
			return nil
		}
		it := due[0]
		due = due[1:]
		if b.c.routes[it.Type].do != nil {
			if len(p.effects) >= b.limits.effects {
				continue // stays due
			}
			if err := b.startEffect(&it); err != nil {
				return err
			}
			continue
		}
		applied, err := b.handle(&it)
		if err != nil {
			return err
		}
		if applied {
			next, err := b.release(&it)
			if err != nil {
				return err
			}
			due = append(next, due...)
		}
	}
	return nil
}

// fresh applies one row of the log, or parks it behind an earlier event of its
// aggregate, or starts its external effect. passed: the cursor may move over
// it.
func (b *run) fresh(r *outbox.Record) (passed bool, err error) {
	route, routed := b.c.routes[r.Type]
	if !routed {
		return true, nil
	}
	if b.progress.anyParked {
		waits, err := b.waits(r.Aggregate())
		if err != nil {
			return false, err
		}
		if waits {
			// One that was discarded and stays so over a reset.
			if applied, err := inInbox(b.ctx, b.tx, b.c.opts.Name, r.EventID); err != nil || applied {
				return err == nil, err
			}
			b.progress.parked++
			b.progress.anyParked = true
			return true, insertParked(b.ctx, b.tx, b.c.opts.Name, r, "blocked", b.now, "waits for an earlier event of its aggregate")
		}
	}
	it := &item{Record: *r}
	if route.do != nil {
		if len(b.progress.effects) >= b.limits.effects {
			return false, nil
		}
		b.progress.anyParked = true
		applied, err := inInbox(b.ctx, b.tx, b.c.opts.Name, r.EventID)
		if err != nil || applied {
			return true, err
		}
		if err := insertParked(b.ctx, b.tx, b.c.opts.Name, r, "running", b.now, ""); err != nil {
			return false, err
		}
		return true, b.startEffect(it)
	}
	if _, err := b.handle(it); err != nil {
		return false, err
	}
	return b.progress.outage == nil, nil
}

// handle applies one event unless its inbox row is there already. A failure
// ends the batch; the event that failed in the run before this one is parked.
func (b *run) handle(it *item) (applied bool, err error) {
	if b.failed != nil && b.failed.eventID == it.EventID {
		b.stop = true
		if isOutage(b.failed.err) {
			b.progress.outage = b.failed.err
			return false, nil
		}
		b.progress.failed, b.progress.anyParked = it, true
		if !it.parked {
			b.progress.parked++
		}
		return false, b.recordFailure(it, b.failed)
	}
	b.done++
	r, err := b.tx.ExecContext(b.ctx, insertInbox, b.c.opts.Name, it.EventID, it.Position, b.now.UnixMicro())
	if err != nil {
		return false, err
	}
	if n, err := r.RowsAffected(); err != nil || n == 0 {
		return true, err // applied before: never twice
	}
	b.current = it
	err = b.call(it)
	if err == nil {
		err = b.tx.Err() // a handler can break the transaction and hide it
	}
	if err != nil {
		return false, &failure{it.EventID, err, b.stack}
	}
	b.progress.applied++
	return true, nil
}

const insertInbox = `INSERT INTO outlog_inbox (consumer, event_id, position, applied_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`

// call runs the handler and turns a panic into an error.
func (b *run) call(it *item) (err error) {
	start := time.Now()
	returned := false
	b.c.setBusy(&busy{it.Type, it.EventID, start})
	defer func() {
		if p := recover(); p != nil {
			err, b.stack = panicked(p), string(debug.Stack())
		} else if !returned {
			b.stack = string(debug.Stack())
		}
		if d := time.Since(start); d > slowHandler {
			b.c.opts.Logger.Warn("slow handler held up all writers", "consumer", b.c.opts.Name, "type", it.Type,
				"event", it.EventID, "held", d.Round(time.Millisecond))
		}
	}()
	route, ok := b.c.routes[it.Type]
	if !ok || route.apply == nil {
		returned = true
		return Permanent(errNoRoute)
	}
	// Not cancelled when the consumer stops: a stop is not a failed attempt.
	ctx := outbox.WithInput(context.WithoutCancel(b.ctx), b.c.opts.Name, &it.Record)
	err = route.apply(ctx, b.tx, &it.Record, it.attempts+1)
	returned = true
	return err
}

// errNoRoute is why a parked event is dead whose type the program no longer
// handles.
var errNoRoute = errors.New("the consumer has no route for this event type any more")

// slowHandler is how long a handler may hold the database before it is named.
const slowHandler = 50 * time.Millisecond

// scanNoRow treats no row as not found.
func scanNoRow(row *sql.Row, dest ...any) (found bool, err error) {
	err = row.Scan(dest...)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}
