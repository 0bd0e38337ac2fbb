package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"outlog/outbox"
	"outlog/store"
)

// Relay follows the log and publishes it to a stream.
type Relay struct {
	db   *store.DB
	log  *outbox.Log
	pub  Publisher
	opts Options

	// Of the goroutine in Run:
	token   int64
	cursor  Cursor // what the stream ends with; runs ahead of the stored one
	certain bool   // the stream ends at cursor; false after every doubt
	saver   *saver
	outage  time.Time // since when the broker is unavailable, zero if it is not
	failed  int       // tries since then

	reconciled atomic.Int64
	status     atomic.Pointer[Status]
}

// Status is a relay's state, for people and metrics.
type Status struct {
	Position    int64     // of the last event on the stream
	StreamSeq   uint64    // and its sequence
	OutageSince time.Time // zero while the broker answers
	LastError   string    // of the outage
	Reconciled  int64     // how often stream and log had to be brought together
}

// New returns a relay from log to pub. It does no I/O.
func New(db *store.DB, log *outbox.Log, pub Publisher, o Options) (*Relay, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &Relay{db: db, log: log, pub: pub, opts: o}
	r.status.Store(&Status{})
	return r, nil
}

// Status returns the relay's state. Safe from any goroutine.
func (r *Relay) Status() Status { return *r.status.Load() }

// Run publishes until ctx ends; then it publishes what is left of the log
// within Options.DrainTimeout, stores the cursor and returns nil. It returns
// ErrFenced when another owner took the database over.
//
// An unavailable broker or database is never an error of Run: it backs off and
// goes on. After every doubt about what the stream holds it reconciles before
// it publishes again.
func (r *Relay) Run(ctx context.Context) error {
	if err := r.retry(ctx, r.claim); err != nil {
		return ignoreEnd(ctx, err)
	}
	r.setCursor(r.cursor)
	r.certain = false
	r.saver = newSaver(r)
	var wg sync.WaitGroup
	saverCtx, stopSaver := context.WithCancel(context.WithoutCancel(ctx))
	wg.Go(func() { r.saver.run(saverCtx) })
	defer wg.Wait()
	defer stopSaver()

	wake, unsubscribe := r.db.Subscribe()
	defer unsubscribe()
	poll := time.NewTimer(r.opts.Poll)
	defer poll.Stop()
	for ctx.Err() == nil {
		n, err := r.step(ctx)
		switch {
		case errors.Is(err, ErrFenced):
			return err
		case err != nil:
			r.wait(ctx, r.trouble(err))
			continue
		}
		r.recovered()
		if n > 0 {
			continue
		}
		poll.Reset(r.opts.Poll)
		select {
		case <-ctx.Done():
		case <-wake:
		case <-poll.C:
		}
	}
	return r.drain(ctx)
}

// step makes sure of the stream if it must, and publishes one window. It
// returns the number of rows published.
func (r *Relay) step(ctx context.Context) (int, error) {
	if err := r.saver.err(); err != nil {
		return 0, err
	}
	if !r.certain {
		if err := r.saver.flush(ctx); err != nil {
			return 0, err
		}
		if err := r.settle(ctx); err != nil {
			return 0, err
		}
		r.certain = true
	}
	page, err := r.log.Read(ctx, r.cursor.Position, outbox.Page{Rows: r.opts.WindowRows, Bytes: r.opts.WindowBytes})
	if err != nil || len(page) == 0 {
		return 0, err
	}
	// What is on the stream must not vanish from the log in a power loss.
	if err := r.db.Durable(page[0].Position, page[len(page)-1].Position); err != nil {
		return 0, err
	}
	return r.publish(ctx, page)
}

// publish puts one window on the stream and moves the cursor over the part
// that is certainly there.
func (r *Relay) publish(ctx context.Context, page []outbox.Record) (int, error) {
	msgs := make([]Message, len(page))
	prev := r.cursor.Position
	for i := range page {
		msgs[i] = Message{LogID: r.log.ID(), Prev: prev, Record: page[i]}
		prev = page[i].Position
	}
	base := r.cursor.StreamSeq
	n, err := r.pub.Append(ctx, base, msgs)
	r.certain = err == nil
	if herr := r.hook("relay.after-publish"); herr != nil {
		r.certain = false
		return 0, herr
	}
	if n > 0 {
		last := page[n-1]
		r.setCursor(Cursor{Position: last.Position, EventID: last.EventID, StreamSeq: base + uint64(n)})
		r.saver.add(ctx, r.cursor, publication{page[0].Position, last.Position, base + 1, r.cursor.StreamSeq, r.db.Now().UnixMicro()})
	}
	if err != nil {
		return n, fmt.Errorf("publish after position %d: %w", r.cursor.Position, err)
	}
	return n, nil
}

// drain publishes the rest of the log and stores the cursor.
func (r *Relay) drain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.opts.DrainTimeout)
	defer cancel()
	n, err := 1, error(nil)
	for n > 0 && err == nil {
		n, err = r.step(ctx)
	}
	if err != nil {
		r.opts.Logger.Warn("stopped before the whole log was published; the rest follows at the next start",
			"position", r.cursor.Position, "error", err)
	}
	if err := r.saver.flush(ctx); err != nil {
		r.opts.Logger.Warn("cursor not stored; the next start finds it on the stream", "error", err)
	}
	return nil
}

// retry calls fn until it succeeds, ctx ends, or it is fenced.
func (r *Relay) retry(ctx context.Context, fn func(context.Context) error) error {
	for {
		err := fn(ctx)
		if err == nil || ctx.Err() != nil || errors.Is(err, ErrFenced) {
			return err
		}
		r.wait(ctx, r.trouble(err))
	}
}

// trouble notes a failed try, logs the start of an outage, and returns how
// long to wait.
func (r *Relay) trouble(err error) time.Duration {
	if errors.Is(err, ErrConflict) && r.failed == 0 {
		r.failed++
		return 0 // reconcile at once, but not in a tight loop
	}
	if r.outage.IsZero() {
		r.outage = time.Now()
		r.opts.Logger.Warn("relay is held up", "position", r.cursor.Position, "error", err)
	}
	s := r.Status()
	s.OutageSince, s.LastError = r.outage, err.Error()
	r.status.Store(&s)
	r.failed++
	return backoff(r.failed, r.opts.BackoffMax, rand.Int64N)
}

// recovered logs the end of an outage.
func (r *Relay) recovered() {
	r.failed = 0
	if r.outage.IsZero() {
		return
	}
	r.opts.Logger.Info("relay goes on", "position", r.cursor.Position, "held_up_for", time.Since(r.outage).Round(time.Millisecond))
	r.outage = time.Time{}
	r.setCursor(r.cursor)
}

func (r *Relay) setCursor(c Cursor) {
	r.cursor = c
	r.status.Store(&Status{Position: c.Position, StreamSeq: c.StreamSeq, Reconciled: r.reconciled.Load(), OutageSince: r.outage})
}

func (r *Relay) wait(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

func (r *Relay) hook(point string) error {
	if r.opts.Failpoint == nil {
		return nil
	}
	return r.opts.Failpoint(point)
}

// ignoreEnd turns the end of ctx into a requested stop.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
