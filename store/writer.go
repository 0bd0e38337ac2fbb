package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// The group-commit writer.
//
// Concurrent Update calls share one SQLite transaction and so one fsync. There
// is no writer goroutine: a baton goes from caller to caller, and the holder
// runs its own callback, on its own goroutine. A holder that finds nobody
// waiting, or the group full, commits for all and tells each caller the outcome.
//
//	Update ─► queue ─► holds the baton: BEGIN if none is open, run fn
//	                     ├─ fn failed: undo what it wrote, pass the baton on
//	                     ├─ that takes the whole transaction: earlier members of
//	                     │     the group go back to the head of the queue and run again
//	                     └─ fn succeeded: joins the group, then
//	                          ├─ somebody waits: pass the baton on
//	                          └─ else: COMMIT, wake the whole group
//
// A savepoint costs every callback as much as a small statement and helps only
// one that fails after it wrote. So there is none until such a failure, which
// costs the group a second run; then the next thousand callbacks have one.

const (
	savepointName = "outlog_update"

	carefulTurns = 1024 // callbacks that get a savepoint after one has failed

	maxGroup     = 256                   // callers per transaction
	maxGroupTime = 10 * time.Millisecond // and how long a group goes on taking more
	slowHold     = 50 * time.Millisecond // a callback longer than this is named in a warning
	nestedAfter  = 10 * time.Millisecond // waiting longer than this, a caller looks whether it waits for itself

	// A saturated writer hardly ever leaves the file unlocked, and SQLite's
	// own waiters poll at up to 100 ms: after saturatedFor without an idle
	// moment the writer pauses, longer if other processes were seen writing.
	saturatedFor = 100 * time.Millisecond
	gapAlone     = 1 * time.Millisecond
	gapOutsiders = 10 * time.Millisecond
	outsiderSeen = time.Minute
)

type writer struct {
	db   *DB
	conn *sql.Conn

	mu      sync.Mutex
	queue   []*call // waiting for the baton, in order
	held    bool    // somebody has the baton
	closed  bool
	refusal error         // of every further caller, nil if there is none
	drained chan struct{} // closed when closed and the baton is free

	// The rest belongs to the holder of the baton.
	open    bool      // a transaction is open
	lazy    bool      // which commits without an fsync
	group   []*call   // callers whose callbacks succeeded in it
	began   time.Time // when it was begun
	careful int       // so many callbacks more get a savepoint
	lastGap time.Time // when the queue was last empty, or others were let in
	first   int64     // positions the group appended, 0 if none
	last    int64

	holder       atomic.Pointer[hold]
	lastOutsider atomic.Int64 // unix nanoseconds of the last foreign commit
	commits      atomic.Int64 // commits of this writer
	counts       *counts
}

// call is one Update.
type call struct {
	fn   func(*Tx) error
	lazy bool         // its commit need not reach the disk by itself
	wake chan outcome // capacity 1: at most one is under way
}

// outcome is what a waiting caller is told: take the baton and run (again), or
// how the commit ended.
type outcome struct {
	run bool
	err error
}

// Update runs fn in a write transaction and commits it, together with those of
// other callers that run at the same time. When it returns nil, what fn did is
// durable as Options.Synchronous says, and visible to readers.
//
// An error, a panic or runtime.Goexit in fn undoes what fn did and only that.
// fn may be called again if another callback of the group failed: it must
// assign its results, not accumulate them. fn runs on the
// caller's goroutine, must not call Update, and should not wait for anything:
// all other writers wait for it. ctx bounds the wait for the turn; once fn has
// started it is not cancelled.
//
// Errors: fn's own, ErrNested, ErrForeignKey, ErrTxAborted, ErrClosed, ctx's,
// or SQLite's from BEGIN or COMMIT (then nothing of fn is stored).
func (db *DB) Update(ctx context.Context, fn func(*Tx) error) error {
	return db.writer.update(ctx, &call{fn: fn, wake: make(chan outcome, 1)})
}

// UpdateLazy is Update for work that can be done again: it survives the death
// of the process, but its commit does not wait for the disk. A power loss may
// take it back, never without everything committed after it; the next fsync of
// anybody makes it durable. Consumers use it: their effect, inbox row and
// cursor go back together, and the log has the event.
func (db *DB) UpdateLazy(ctx context.Context, fn func(*Tx) error) error {
	return db.writer.update(ctx, &call{fn: fn, lazy: true, wake: make(chan outcome, 1)})
}

func (w *writer) update(ctx context.Context, c *call) error {
	if err := w.acquire(ctx, c); err != nil {
		return err
	}
	for {
		if err, joined := w.turn(ctx, c); !joined {
			return err
		}
		if o := <-c.wake; !o.run {
			return o.err
		}
	}
}

// acquire returns when c has the baton.
func (w *writer) acquire(ctx context.Context, c *call) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	w.mu.Lock()
	switch {
	case w.closed:
		w.mu.Unlock()
		return ErrClosed
	case w.refusal != nil:
		defer w.mu.Unlock()
		return w.refusal
	case !w.held:
		w.held = true
		w.mu.Unlock()
		w.lastGap = time.Now()
		return nil
	}
	w.queue = append(w.queue, c)
	w.mu.Unlock()

	nested := time.NewTimer(nestedAfter)
	defer nested.Stop()
	for {
		select {
		case o := <-c.wake:
			return o.err
		case <-ctx.Done():
			if w.leave(c) {
				return ctx.Err()
			}
			return (<-c.wake).err // the baton is on its way already
		case <-nested.C:
			if insideUpdate() && w.leave(c) {
				return ErrNested
			}
		}
	}
}

// leave takes c out of the queue; false means that it was given the baton.
func (w *writer) leave(c *call) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, q := range w.queue {
		if q == c {
			w.queue = append(w.queue[:i], w.queue[i+1:]...)
			return true
		}
	}
	return false
}

// turn runs c's callback while c holds the baton, and passes the baton on.
// joined: the callback succeeded and c must wait for the group's outcome.
func (w *writer) turn(ctx context.Context, c *call) (err error, joined bool) {
	if err := ctx.Err(); err != nil {
		w.next()
		return err, false
	}
	if !w.open {
		if err := w.begin(c.lazy); err != nil {
			w.failWaiting(err)
			return err, false
		}
	}
	savepoint := w.careful > 0 && len(w.group) > 0 // to undo the first is to undo all
	w.careful = max(0, w.careful-1)
	if err := w.raw(func(k *conn) error { return k.enter(savepoint) }); err != nil {
		return w.settle(false, err), false
	}
	tx := &Tx{conn: w.conn, now: w.db.now()}
	h := &hold{fn: c.fn, since: time.Now()}
	w.holder.Store(h)
	returned := false
	defer func() {
		if !returned { // panic or Goexit: the goroutine is ending, the group is not
			_ = w.settle(savepoint, w.finish(tx, h, savepoint, errUnwound))
		}
	}()
	err = runCallback(c.fn, tx)
	returned = true
	if err = w.finish(tx, h, savepoint, err); err != nil {
		return w.settle(savepoint, err), false
	}
	if tx.first != 0 {
		if w.first == 0 {
			w.first = tx.first
		}
		w.last = tx.last
	}
	w.group = append(w.group, c)
	w.next()
	return nil, true
}

// errUnwound stands for a callback that did not return.
var errUnwound = errors.New("callback did not return")

// runCallback exists to be found on the stack by insideUpdate.
//
//go:noinline
func runCallback(fn func(*Tx) error, tx *Tx) error { return fn(tx) }

var runCallbackName = runtime.FuncForPC(reflect.ValueOf(runCallback).Pointer()).Name()

// finish ends a callback's hold on its transaction, and returns the error of
// the callback, which conn.leave may find.
func (w *writer) finish(tx *Tx, h *hold, savepoint bool, err error) error {
	tx.revoke()
	err = w.raw(func(k *conn) error { return k.leave(savepoint, err) })
	w.holder.Store(nil)
	d := time.Since(h.since)
	w.counts.holds.Observe(int64(d))
	if d > slowHold {
		w.counts.slowHold(h.name())
		w.db.log.Warn("slow Update callback held up all writers", "callback", h.name(), "held", d)
	}
	return err
}

// settle undoes a failed callback, in the cheapest way there is, and passes the
// baton on. It returns the error for the callback's caller.
func (w *writer) settle(savepoint bool, err error) error {
	var dead, wrote bool
	undo := w.raw(func(k *conn) error {
		dead, wrote = k.dead, k.wrote
		if dead || !savepoint {
			return nil
		}
		if e := k.control("ROLLBACK TO " + savepointName); e != nil {
			return e
		}
		return k.control("RELEASE " + savepointName)
	})
	if dead && !errors.Is(err, ErrTxAborted) {
		err = fmt.Errorf("%w (the transaction is gone)", err)
	}
	if undo != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w", undo))
	}
	if dead || undo != nil || wrote && !savepoint {
		if wrote && len(w.group) > 0 {
			w.careful = carefulTurns
		}
		w.restart()
	}
	w.next()
	return err
}

// restart gives up the open transaction and puts the group's members, whose
// work is lost through no fault of theirs, back at the head of the queue.
func (w *writer) restart() {
	w.rollback()
	w.mu.Lock()
	w.queue = append(append(make([]*call, 0, len(w.group)+len(w.queue)), w.group...), w.queue...)
	w.mu.Unlock()
	w.group = w.group[:0]
}

// next passes the baton to the next caller, committing first when the group is
// complete.
func (w *writer) next() {
	w.mu.Lock()
	if len(w.queue) > 0 && w.takes(w.queue[0]) {
		w.hand()
		return
	}
	w.mu.Unlock()

	w.commit()
	w.fairGap()

	w.mu.Lock()
	if len(w.queue) > 0 {
		w.hand()
		return
	}
	w.held = false
	if w.closed {
		close(w.drained)
	}
	w.mu.Unlock()
}

// takes reports whether c can join the open transaction, if there is one.
func (w *writer) takes(c *call) bool {
	if !w.open {
		return true
	}
	return (c.lazy || !w.lazy) && len(w.group) < maxGroup && time.Since(w.began) < maxGroupTime
}

// hand gives the baton to the head of the queue. It unlocks w.mu.
func (w *writer) hand() {
	c := w.queue[0]
	w.queue[0] = nil
	w.queue = w.queue[1:]
	w.mu.Unlock()
	c.wake <- outcome{run: true}
}

// failWaiting tells all that wait now that the database cannot be written:
// each of them would only wait busy_timeout in turn.
func (w *writer) failWaiting(err error) {
	w.mu.Lock()
	waiting := w.queue
	w.queue = nil
	w.mu.Unlock()
	for _, c := range waiting {
		c.wake <- outcome{err: err}
	}
	w.next()
}

// begin opens the group's transaction. SQLite takes no other synchronous
// setting inside one, so whether the commit syncs is decided here: a lazy group
// takes only lazy callers.
func (w *writer) begin(lazy bool) error {
	err := w.raw(func(k *conn) error {
		if err := k.setLazy(lazy && w.db.opts.Synchronous == "FULL"); err != nil {
			return err
		}
		return k.begin()
	})
	if err != nil {
		w.counts.failed.Add(1)
		return fmt.Errorf("begin: %w", err)
	}
	w.open, w.lazy, w.began = true, lazy, time.Now()
	return nil
}

// commit ends the open transaction for all and tells them. A failed COMMIT
// fails the whole group.
func (w *writer) commit() {
	if !w.open {
		return
	}
	if len(w.group) == 0 {
		w.rollback()
		return
	}
	if err := w.db.hook("store.before-commit"); err != nil {
		w.tell(err)
		w.rollback()
		return
	}
	start := time.Now()
	err := w.raw(func(k *conn) error {
		if k.dead {
			return k.aborted()
		}
		k.inTx = false // a rollback from here on is the COMMIT's own
		return k.control("COMMIT")
	})
	if err != nil {
		err = fmt.Errorf("commit: %w", err)
		w.counts.failed.Add(1)
		w.rollback()
	} else {
		w.commits.Add(1)
		w.counts.commits.Observe(int64(time.Since(start)))
		w.counts.groups.Observe(int64(len(w.group)))
		err = w.db.hook("store.after-commit")
	}
	appended := w.first != 0 && err == nil
	if appended && !w.lazy {
		w.db.noteDurable(w.first, w.last)
	}
	w.ended()
	if appended {
		w.db.signal.fire()
	}
	w.tell(err)
}

// tell wakes the group with its outcome.
func (w *writer) tell(err error) {
	for i, c := range w.group {
		c.wake <- outcome{err: err}
		w.group[i] = nil
	}
	w.group = w.group[:0]
}

// rollback gives the transaction up, whatever state it is in.
func (w *writer) rollback() {
	_ = w.raw(func(k *conn) error {
		dead := k.dead
		k.inTx, k.dead = false, false
		if dead {
			return nil
		}
		return k.control("ROLLBACK") // fails if a failed COMMIT has done it already
	})
	w.ended()
}

// ended notes that no transaction is open.
func (w *writer) ended() {
	w.open, w.first, w.last = false, 0, 0
	_ = w.raw(func(k *conn) error { k.inTx, k.dead = false, false; return nil })
}

// fairGap leaves the file unlocked for a moment when the writer has been busy
// without pause, so that other processes get in.
func (w *writer) fairGap() {
	w.mu.Lock()
	idle := len(w.queue) == 0
	w.mu.Unlock()
	now := time.Now()
	switch {
	case idle:
		w.lastGap = now
	case now.Sub(w.lastGap) > saturatedFor:
		gap := gapAlone
		if now.Sub(time.Unix(0, w.lastOutsider.Load())) < outsiderSeen {
			gap = gapOutsiders
		}
		time.Sleep(gap)
		w.lastGap = time.Now()
	}
}

// raw runs fn with the wrapped connection, which no statement uses meanwhile.
func (w *writer) raw(fn func(*conn) error) error {
	return w.conn.Raw(func(dc any) error { return fn(dc.(*conn)) })
}

// refuse makes every further Update fail with err.
func (w *writer) refuse(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refusal = err
}

// close refuses new callers, waits until those waiting are done, and closes
// the connection.
func (w *writer) close() error {
	w.mu.Lock()
	if !w.closed {
		w.closed = true
		if !w.held {
			close(w.drained)
		}
	}
	w.mu.Unlock()
	<-w.drained
	return w.conn.Close()
}
