package consumer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
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

// failure is a handler that did not succeed.
type failure struct {
	eventID string
	err     error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// errChanged is returned when the consumer's row is not what this instance
// last saw: a reset, or another instance was faster.
var errChanged = errors.New("the consumer's state was changed")

// progress is what a committed batch did.
type progress struct {
	state
	rows    int // log rows the cursor passed
	applied int
	parked  int // newly parked, for whatever reason
	more    bool
	nextDue time.Time // of the earliest parked event, zero if there is none
}

// batch applies what is due among the parked events, and then rows, the log's
// next. On an error nothing was applied.
func (c *Consumer) batch(ctx context.Context, rows []outbox.Record) (progress, error) {
	var failed *failure
	for {
		p, err := c.attempt(ctx, rows, failed)
		f, isFailure := errors.AsType[*failure](err)
		if !isFailure || store.IsUnavailable(err) {
			return p, err
		}
		failed = f
	}
}

// maxBatchBytes bounds the payloads of a batch in memory.
const maxBatchBytes = 8 << 20

// attempt runs one transaction, on a goroutine of its own so that a handler's
// Goexit ends that and not the consumer.
func (c *Consumer) attempt(ctx context.Context, rows []outbox.Record, failed *failure) (p progress, err error) {
	done := make(chan struct{})
	returned := false
	var current *item
	go func() {
		defer close(done)
		err = c.db.Update(ctx, func(tx *store.Tx) error {
			var e error
			p, e = c.apply(ctx, tx, rows, failed, &current)
			return e
		})
		returned = true
	}()
	<-done
	if !returned {
		err = &failure{current.EventID, fmt.Errorf("handler ended its goroutine (runtime.Goexit)")}
	}
	return p, err
}

// apply is the body of the transaction.
func (c *Consumer) apply(ctx context.Context, tx *store.Tx, rows []outbox.Record, failed *failure, current **item) (progress, error) {
	s, err := readState(ctx, tx, c.opts.Name)
	if err != nil {
		return progress{}, err
	}
	if s != c.state {
		return progress{}, errChanged
	}
	p := progress{state: s}
	if s.paused {
		return p, nil
	}
	b := &run{c: c, ctx: ctx, tx: tx, now: tx.Now(), deadline: time.Now().Add(c.opts.BatchTime), progress: &p, failed: failed, current: current}
	if err := b.parkedEvents(); err != nil {
		return p, err
	}
	for i := range rows {
		if b.over() {
			p.more = true
			break
		}
		if err := b.fresh(&rows[i]); err != nil {
			return p, err
		}
		p.position = rows[i].Position
		p.rows++
	}
	if p.position != s.position {
		r, err := tx.ExecContext(ctx, `UPDATE outlog_consumers SET position = ?, updated_at = ? WHERE name = ? AND generation = ? AND position = ?`,
			p.position, b.now.UnixMicro(), c.opts.Name, s.generation, s.position)
		if err != nil {
			return p, err
		}
		if n, err := r.RowsAffected(); err != nil || n != 1 {
			return p, errors.Join(errChanged, err)
		}
	}
	if b.anyParked {
		if p.nextDue, err = nextDue(ctx, tx, c.opts.Name); err != nil {
			return p, err
		}
	}
	return p, c.hook("consumer.after-handler")
}

// run is one run of apply.
type run struct {
	c         *Consumer
	ctx       context.Context
	tx        *store.Tx
	now       time.Time
	deadline  time.Time
	progress  *progress
	failed    *failure // the event to park instead of handling it
	current   **item   // being handled
	anyParked bool
	done      int
	stop      bool
}

// over reports whether the batch has to end: its time is up, the consumer
// stops, or an event has just failed.
func (b *run) over() bool {
	return b.stop || b.done > 0 && (time.Now().After(b.deadline) || b.ctx.Err() != nil)
}

// parkedEvents applies the parked events that are due, and after each success
// the next of its aggregate.
func (b *run) parkedEvents() error {
	var err error
	if b.anyParked, err = hasParked(b.ctx, b.tx, b.c.opts.Name); err != nil || !b.anyParked {
		return err
	}
	due, err := dueEvents(b.ctx, b.tx, b.c.opts.Name, b.now, b.c.opts.BatchRows)
	if err != nil {
		return err
	}
	for len(due) > 0 {
		if b.over() {
			b.progress.more = true
			return nil
		}
		it := due[0]
		due = due[1:]
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
// aggregate.
func (b *run) fresh(r *outbox.Record) error {
	if _, routed := b.c.routes[r.Type]; !routed {
		return nil
	}
	if b.anyParked {
		waits, err := hasParkedAggregate(b.ctx, b.tx, b.c.opts.Name, r.Aggregate())
		if err != nil {
			return err
		}
		if waits {
			b.progress.parked++
			return b.park(r, "blocked", 0, 0, "waits for an earlier event of its aggregate")
		}
	}
	_, err := b.handle(&item{Record: *r})
	return err
}

// handle applies one event unless its inbox row is there already. A failure
// ends the batch; the event that failed in the run before this one is parked.
func (b *run) handle(it *item) (applied bool, err error) {
	if b.failed != nil && b.failed.eventID == it.EventID {
		b.stop = true
		return false, b.recordFailure(it, b.failed.err)
	}
	b.done++
	r, err := b.tx.ExecContext(b.ctx, `INSERT INTO outlog_inbox (consumer, event_id, position, applied_at) VALUES (?, ?, ?, ?)
		ON CONFLICT DO NOTHING`, b.c.opts.Name, it.EventID, it.Position, b.now.UnixMicro())
	if err != nil {
		return false, err
	}
	if n, err := r.RowsAffected(); err != nil || n == 0 {
		return true, err // applied before: never twice
	}
	*b.current = it
	err = b.call(it)
	if err == nil {
		err = b.tx.Err() // a handler can break the transaction and hide it
	}
	if err != nil {
		return false, &failure{it.EventID, err}
	}
	b.progress.applied++
	return true, nil
}

// call runs the handler and turns a panic into an error.
func (b *run) call(it *item) (err error) {
	start := time.Now()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("handler panicked: %v\n%s", p, debug.Stack())
		}
		if d := time.Since(start); d > slowHandler {
			b.c.opts.Logger.Warn("slow handler held up all writers", "consumer", b.c.opts.Name, "type", it.Type,
				"event", it.EventID, "held", d.Round(time.Millisecond))
		}
	}()
	// Not cancelled when the consumer stops: a stop is not a failed attempt.
	return b.c.routes[it.Type].apply(context.WithoutCancel(b.ctx), b.tx, &it.Record, it.attempts+1)
}

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
