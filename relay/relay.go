package relay

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"outlog/internal/histogram"
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
	cursor  Cursor    // what the stream ends with; runs ahead of the stored one
	certain bool      // the stream ends at cursor; false after every doubt
	sureAt  time.Time // when that was last seen
	saver   *saver
	next    nextPage  // read while its predecessor was published
	outage  time.Time // since when the broker is unavailable, zero if it is not
	failed  int       // tries since then
	foreign bool      // it was said that a person must decide

	// About events that cannot be published; see park.go and refusal.go.
	lookAt    time.Time  // when to look for parked events that are due
	flowing   bool       // the last append succeeded
	suspect   *suspicion // what alone has failed since the last success
	convicted *suspicion // an attempt to be counted
	stuck     stuck      // how often the next event was not stored
	unproved  int        // failures in a row that were not counted
	draining  bool       // Run ends: nothing is tried again

	status  atomic.Pointer[Status]
	latency *histogram.Histogram
}

// Status is a relay's state, for people and metrics.
type Status struct {
	Position    int64     // every event up to here is on the stream, parked, or skipped
	StreamSeq   uint64    // what the stream ends with
	OutageSince time.Time // zero while the broker answers
	LastError   string    // of the outage
	Reconciled  int64     // how often stream and log had to be brought together
	Parked      int       // events set aside, those that wait behind others included
	Refused     int64     // attempts refused by the broker since New
	// Latency is from append until the broker has acknowledged, in seconds, of
	// the events published since New.
	Latency histogram.Snapshot
}

// New returns a relay from log to pub. It does no I/O.
func New(db *store.DB, log *outbox.Log, pub Publisher, o Options) (*Relay, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &Relay{db: db, log: log, pub: pub, opts: o, latency: histogram.Durations()}
	r.status.Store(&Status{})
	return r, nil
}

// Status returns the relay's state. Safe from any goroutine.
func (r *Relay) Status() Status {
	s := *r.status.Load()
	s.Latency = r.latency.Snapshot()
	return s
}

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
		case ctx.Err() != nil:
			continue // whatever failed, failed because of the stop
		case err != nil:
			r.wait(ctx, r.trouble(err))
			continue
		}
		r.recovered()
		if n > 0 {
			continue
		}
		poll.Reset(min(r.opts.Poll, max(0, time.Until(r.lookAt))))
		select {
		case <-ctx.Done():
		case <-wake:
		case <-poll.C:
			// Nothing to publish says nothing about what was: the stream may have
			// been lost meanwhile.
			if time.Since(r.sureAt) > recheckPolls*r.opts.Poll {
				r.certain = false
			}
		}
	}
	return r.drain(ctx)
}

// recheckPolls is after how many polls an idle relay looks whether the stream
// is still there.
const recheckPolls = 5

// step retries a parked event if one is due, and publishes one window. It
// returns how many events it got further with.
func (r *Relay) step(ctx context.Context) (int, error) {
	if s := r.convicted; s != nil {
		if err := r.countRefusal(ctx, &s.event, s.err, true); err != nil {
			return 0, err
		}
		r.convicted = nil
	}
	if err := r.sure(ctx); err != nil {
		return 0, err
	}
	retried, err := r.retryParked(ctx)
	if err != nil {
		return retried, err
	}
	if err := r.sure(ctx); err != nil {
		return retried, err
	}
	n, err := r.publishNext(ctx)
	return retried + n, err
}

// sure makes sure that the stream ends at the cursor, if that is in doubt.
func (r *Relay) sure(ctx context.Context) error {
	if err := r.saver.err(); err != nil || r.certain {
		return err
	}
	if err := r.saver.flush(ctx); err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		r.doubt()
		return err
	}
	r.certain, r.sureAt = true, time.Now()
	return nil
}

// publishNext publishes the log's next window, without what is parked, and
// moves the cursor over the part that is certainly on the stream or set aside.
func (r *Relay) publishNext(ctx context.Context) (int, error) {
	page, entries, err := r.nextWindow(ctx)
	if err != nil || len(page) == 0 {
		return 0, err
	}
	c := r.cursor
	n := 0
	if len(entries) > 0 {
		done := r.readAhead(ctx, page)
		n, err = r.append(ctx, entries)
		done()
	}
	if n > 0 {
		last := entries[n-1]
		c.EventPosition, c.EventID, c.StreamSeq = last.Position, last.EventID, c.StreamSeq+uint64(n)
	}
	for _, e := range page { // over what was stored, and what is parked before the next
		if n < len(entries) && e.Position == entries[n].Position {
			break
		}
		c.Position = e.Position
	}
	if c != r.cursor {
		pubs := publications(entries[:n], r.cursor.StreamSeq, r.db.Now())
		r.setCursor(c)
		r.saver.add(ctx, c, pubs)
	}
	if err != nil {
		if n == len(entries) {
			return 0, err
		}
		return r.failedNext(ctx, &entries[n].Record, n, err)
	}
	return len(page), nil
}

// nextWindow reads the page after the cursor and what of it is to be
// published. The rest of it is parked when it returns.
func (r *Relay) nextWindow(ctx context.Context) (page []outbox.Record, entries []entry, err error) {
	for {
		page, err = r.page(ctx)
		if err != nil || len(page) == 0 {
			return nil, nil, err
		}
		p, err := r.passedIn(ctx, page)
		if err != nil {
			return nil, nil, err
		}
		var waiting []outbox.Record
		entries, waiting = r.sift(page, p)
		again, err := r.parkStuck(ctx, entries)
		if err != nil {
			return nil, nil, err
		}
		if !again {
			return page, entries, r.park(ctx, waiting, "blocked", 0, "waits for an earlier event of its aggregate")
		}
	}
}

// append sends events for the end of the stream. It does not move the cursor.
func (r *Relay) append(ctx context.Context, events []entry) (int, error) {
	// What is on the stream must not vanish from the log in a power loss.
	if err := r.db.Durable(events[0].Position, events[len(events)-1].Position); err != nil {
		return 0, err
	}
	if err := r.hook("relay.before-publish"); err != nil {
		return 0, err
	}
	msgs := make([]Message, len(events))
	prev := r.cursor.EventPosition
	for i := range events {
		msgs[i] = Message{LogID: r.log.ID(), Prev: prev, Record: events[i].Record}
		prev = events[i].Position
	}
	n, err := r.pub.Append(ctx, r.cursor.StreamSeq, msgs)
	now := r.db.Now()
	for i := range events[:n] {
		r.latency.Observe(int64(now.Sub(events[i].CreatedAt)))
	}
	if r.certain = err == nil; r.certain {
		r.sureAt = time.Now()
	}
	if ctx.Err() != nil {
		r.doubt() // a stop is nobody's failure
	} else {
		r.judge(events, n, err)
	}
	if herr := r.hook("relay.after-publish"); herr != nil {
		r.certain = false
		return 0, herr
	}
	return n, err
}

// drain publishes the rest of the log and stores the cursor.
func (r *Relay) drain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.opts.DrainTimeout)
	defer cancel()
	r.draining = true
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
	begins := r.outage.IsZero()
	if begins {
		r.outage = time.Now()
	}
	if _, foreign := errors.AsType[*ForeignStreamError](err); foreign && !r.foreign {
		r.foreign = true
		r.opts.Logger.Error("relay is held up until a person decides about the stream", "position", r.cursor.Position, "error", err)
	} else if begins {
		r.opts.Logger.Warn("relay is held up", "position", r.cursor.Position, "error", err)
	}
	r.update(func(s *Status) { s.OutageSince, s.LastError = r.outage, err.Error() })
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
	r.outage, r.foreign = time.Time{}, false
	r.update(func(s *Status) { s.OutageSince, s.LastError = time.Time{}, "" })
}

func (r *Relay) setCursor(c Cursor) {
	r.cursor = c
	r.update(func(s *Status) { s.Position, s.StreamSeq = c.Position, c.StreamSeq })
}

// update changes the status. Only the goroutine in Run does.
func (r *Relay) update(fn func(*Status)) {
	s := *r.status.Load()
	fn(&s)
	r.status.Store(&s)
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
