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
// event gets its inbox row, a run of them with one statement, and its handler,
// then the cursor moves. There are no savepoints. When a handler fails, all of the batch is undone and run
// again up to that event, which is then parked instead of handled, in the same
// transaction: so everything before it is applied, its failure is recorded,
// and the cursor is behind it. That costs a failing event one repetition of
// the events before it, and a succeeding one nothing; and it treats an error,
// a panic, Goexit and a transaction that the handler broke all the same.

// item is one event to be applied.
type item struct {
	outbox.Record
	parked   bool // it has a row in outlog_parked
	missing  bool // and none in the log any more
	attempts int  // failed ones so far
}

// errChanged is returned when the consumer's row is not what this instance
// last saw: a reset, or another instance was faster.
var errChanged = errors.New("the consumer's state was changed")

// progress is what a committed batch did.
type progress struct {
	state
	rows      int       // log rows the cursor passed
	applied   []int64   // the events applied: when they were appended, in microseconds
	parked    int       // newly parked, for whatever reason
	done      int       // events looked at, whatever became of them
	failed    *item     // the event whose failure was recorded, if one was
	effects   []item    // external effects to start now that their rows are committed
	outage    *failure  // a handler's Outage that ended the batch
	more      bool      // the batch ended before its work did
	nextDue   time.Time // of the earliest parked event, zero if there is none
	anyParked bool
}

// limits bound one batch.
type limits struct {
	items   int  // events handled
	effects int  // external effects that may be started
	singly  bool // give each event its inbox row by itself
	alone   bool // of the parked events that are due, handle this one alone, if any
	only    string
}

// batch applies what is due among the parked events, and then rows, the log's
// next. On an error nothing was applied.
func (c *Consumer) batch(ctx context.Context, rows []outbox.Record, l limits, failed *failure) (progress, error) {
	for {
		p, err := c.attempt(ctx, rows, l, failed)
		if err == nil {
			return p, nil
		}
		if errors.Is(err, errApplied) && !l.singly {
			l.singly = true
			continue
		}
		if failed = blamed(err); failed == nil {
			return p, err
		}
	}
}

// maxBatchBytes bounds the payloads of a batch in memory.
const maxBatchBytes = 8 << 20

// attempt runs one transaction, on a goroutine of its own so that a handler's
// Goexit ends that and not the consumer, and so that a handler that never
// returns does not keep the consumer from stopping.
func (c *Consumer) attempt(ctx context.Context, rows []outbox.Record, l limits, failed *failure) (progress, error) {
	late := time.AfterFunc(c.opts.HandlerTimeout, func() { c.warnLate(c.busy.Load()) })
	defer late.Stop()
	var b *run
	err := errGoexit
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = c.db.UpdateLazy(ctx, func(tx *store.Tx) error {
			b = &run{c: c, ctx: ctx, tx: tx, now: tx.Now(), deadline: time.Now().Add(c.opts.BatchTime), limits: l, failed: failed}
			return b.apply(rows)
		})
	}()
	select {
	case <-done:
	case <-ctx.Done():
		select {
		case <-done:
		case <-time.After(c.opts.DrainTimeout):
			return progress{}, c.stuck()
		}
	}
	c.setBusy(nil)
	if b == nil {
		return progress{}, err
	}
	if err == errGoexit && b.unwound != nil {
		err = b.unwound
	}
	return b.progress, err
}

// stuck gives up waiting for the handler at work.
func (c *Consumer) stuck() error {
	what := "a batch"
	if w := c.busy.Load(); w != nil {
		what = w.eventType + " " + w.eventID
	}
	c.opts.Logger.Error("a handler did not return in time and is left behind; the database cannot be closed", "consumer", c.opts.Name, "event", what)
	return fmt.Errorf("%w: consumer %s, %s", ErrStuck, c.opts.Name, what)
}

// warnLate names a handler that is past its deadline.
func (c *Consumer) warnLate(w *busy) {
	if w != nil {
		c.opts.Logger.Warn("handler is past its deadline", "consumer", c.opts.Name, "type", w.eventType, "event", w.eventID, "deadline", c.opts.HandlerTimeout)
	}
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
	unwound  *failure // a handler that ended its goroutine
	progress progress
	stop     bool
	// Fresh events up to this position have their inbox rows already.
	inboxed int64
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
		if err := b.inbox(rows[i:]); err != nil {
			return err
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
	if err := b.uninbox(); err != nil {
		return err
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
	if b.limits.only != "" && len(p.effects) == 0 {
		if err := c.unmark(b.ctx, b.tx); err != nil {
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
//
// Time does not end a batch that runs again to park an event: it got that far
// in time before, and ending it here would forget the failure.
func (b *run) over() bool {
	done := b.progress.done
	return b.stop || done > 0 && (done >= b.limits.items || b.failed == nil && time.Now().After(b.deadline) || b.ctx.Err() != nil)
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
		if b.limits.alone && it.EventID != b.limits.only {
			continue
		}
		next, err := b.due(&it)
		if err != nil {
			return err
		}
		due = append(next, due...)
	}
	return nil
}

// due applies a parked event whose time has come, or starts its external
// effect, and returns the event that this released.
func (b *run) due(it *item) (released []item, err error) {
	if behind, err := b.behind(it); err != nil || behind {
		return nil, err
	}
	switch {
	case it.missing:
		return nil, b.park(it, newFailure(it.EventID, Permanent(errMissing), ""))
	case b.c.routes[it.Type].do == nil:
	case len(b.progress.effects) >= b.limits.effects:
		return nil, nil // stays due
	default:
		if failed, err := b.failedBefore(it); failed || err != nil {
			return nil, err
		}
		return nil, b.startEffect(it)
	}
	applied, err := b.handle(it)
	if err != nil || !applied {
		return nil, err
	}
	return b.release(it)
}

// errMissing is why a parked event is dead that the log does not hold.
var errMissing = errors.New("the event is not in the log any more")

// fresh applies one row of the log, or parks it behind an earlier event of its
// aggregate, or starts its external effect. passed: the cursor may move over
// it.
func (b *run) fresh(r *outbox.Record) (passed bool, err error) {
	route, routed := b.c.routes[r.Type]
	if !routed {
		return true, nil
	}
	if b.progress.anyParked {
		waits, err := b.waits(r)
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
		applied, err := inInbox(b.ctx, b.tx, b.c.opts.Name, r.EventID)
		if err != nil || applied {
			return true, err
		}
		if failed, err := b.failedBefore(it); failed || err != nil {
			return true, err
		}
		b.progress.anyParked = true
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

// inboxRun is how many events get their inbox rows with one statement.
const inboxRun = 64

// errApplied is returned when one of a run of events was applied before: the
// batch runs again and looks at each.
var errApplied = errors.New("an event of the batch was applied before")

// inbox gives the first of rows its inbox row, and with it those behind it that
// are certain to be handled too if nothing fails: that costs half of what a
// statement for each would. rows are the log's next, so a run of them is a range
// of positions.
func (b *run) inbox(rows []outbox.Record) error {
	if rows[0].Position <= b.inboxed || b.limits.singly || b.failed != nil || b.progress.anyParked {
		return nil
	}
	n := 0
	for n < min(len(rows), inboxRun, b.limits.items-b.progress.done) && b.c.routes[rows[n].Type].apply != nil {
		n++
	}
	if n < 2 {
		return nil
	}
	r, err := b.tx.ExecContext(b.ctx, `INSERT INTO outlog_inbox (consumer, event_id, position, applied_at)
		SELECT ?, event_id, position, ? FROM outbox WHERE position BETWEEN ? AND ? ON CONFLICT DO NOTHING`,
		b.c.opts.Name, b.now.UnixMicro(), rows[0].Position, rows[n-1].Position)
	if err != nil {
		return err
	}
	if inserted, err := r.RowsAffected(); err != nil || inserted != int64(n) {
		return errors.Join(errApplied, err)
	}
	b.inboxed = rows[n-1].Position
	return nil
}

// uninbox takes the inbox rows back of events that the batch did not get to.
func (b *run) uninbox() error {
	if b.inboxed <= b.progress.position {
		return nil
	}
	_, err := b.tx.ExecContext(b.ctx, `DELETE FROM outlog_inbox WHERE consumer = ? AND event_id IN
		(SELECT event_id FROM outbox WHERE position > ? AND position <= ?)`, b.c.opts.Name, b.progress.position, b.inboxed)
	return err
}

// handle applies one event unless its inbox row is there already. A failure
// ends the batch; the event that failed in the run before this one is parked.
func (b *run) handle(it *item) (applied bool, err error) {
	if failed, err := b.failedBefore(it); failed || err != nil {
		return false, err
	}
	b.progress.done++
	if it.parked || it.Position > b.inboxed {
		r, err := b.tx.ExecContext(b.ctx, insertInbox, b.c.opts.Name, it.EventID, it.Position, b.now.UnixMicro())
		if err != nil {
			return false, err
		}
		if n, err := r.RowsAffected(); err != nil || n == 0 {
			return true, err // applied before: never twice
		}
	}
	if f := b.call(it); f != nil {
		return false, f
	}
	b.progress.applied = append(b.progress.applied, it.CreatedAt.UnixMicro())
	return true, nil
}

// failedBefore parks the event that failed in the run before this one, which
// ends the batch.
func (b *run) failedBefore(it *item) (bool, error) {
	f := b.failed
	if f == nil || f.eventID != it.EventID {
		return false, nil
	}
	b.stop = true
	if !f.counts() {
		b.progress.outage = f
		return true, nil
	}
	return true, b.park(it, f)
}

// park records a failure of this batch.
func (b *run) park(it *item, f *failure) error {
	p := &b.progress
	p.done++
	p.failed, p.anyParked = it, true
	if !it.parked {
		p.parked++
	}
	return b.c.recordFailure(b.ctx, b.tx, b.now, it, f)
}

const insertInbox = `INSERT INTO outlog_inbox (consumer, event_id, position, applied_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`

// call runs the handler. Whatever it says, an unavailable database that one of
// its statements met is what counts, and so is a transaction it broke.
func (b *run) call(it *item) (f *failure) {
	start := time.Now()
	returned := false
	b.c.setBusy(&busy{it.Type, it.EventID, start})
	// Not cancelled when the consumer stops, which is not a failed attempt; but
	// over when the handler is.
	ctx, over := context.WithCancel(context.WithoutCancel(b.ctx))
	defer func() {
		over()
		if p := recover(); p != nil {
			f = newFailure(it.EventID, panicked(p), string(debug.Stack()))
		} else if !returned {
			f = newFailure(it.EventID, errGoexit, string(debug.Stack()))
		}
		if err := b.tx.Err(); err != nil && (f == nil || store.IsUnavailable(err)) {
			f = newFailure(it.EventID, err, "")
		}
		b.unwound = f
		d := time.Since(start)
		b.c.handlers.Observe(int64(d))
		if d > slowHandler {
			b.c.opts.Logger.Warn("slow handler held up all writers", "consumer", b.c.opts.Name, "type", it.Type,
				"event", it.EventID, "held", d.Round(time.Millisecond))
		}
	}()
	route, ok := b.c.routes[it.Type]
	if !ok || route.apply == nil {
		returned = true
		return newFailure(it.EventID, Permanent(errNoRoute), "")
	}
	err := route.apply(outbox.WithInput(ctx, b.c.opts.Name, &it.Record), b.tx, &it.Record, it.attempts+1)
	returned = true
	if err != nil {
		f = newFailure(it.EventID, err, "")
	}
	return f
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
