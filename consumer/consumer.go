package consumer

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"outlog/internal/attempt"
	"outlog/internal/histogram"
	"outlog/outbox"
	"outlog/store"
)

// Consumer applies the events of a log, each once, in order per aggregate.
type Consumer struct {
	db     *store.DB
	log    *outbox.Log
	source Source
	opts   Options
	routes map[string]Route

	// Of the goroutine in Run:
	state    state
	isolate  int        // events still to run one by one, see isolate.go
	high     int64      // highest position delivered
	wanted   int64      // position to reach, 0 once it is reached
	logsTurn bool       // the next batch leaves parked events alone
	ticked   time.Time  // when tick last ran
	waiting  []Delivery // delivered, not yet acked, in stream order
	nextDue  time.Time  // of the earliest parked event
	failures int        // batches in a row that met database trouble

	generation atomic.Int64
	paused     atomic.Bool
	stray      atomic.Int64
	busy       atomic.Pointer[busy]
	effects    atomic.Pointer[effects] // of the current Run
	pause      pauser
	nudged     chan struct{} // capacity 1: look at the parked events
	latency    *histogram.Histogram
	handlers   *histogram.Histogram

	mu     sync.Mutex
	moved  chan struct{} // closed and replaced when the cursor moves
	status Status
}

// Status is a consumer's state, for people and metrics.
type Status struct {
	Name         string
	Position     int64     // the cursor
	Paused       bool      // by a person
	PausedSince  time.Time // by itself, zero if it is not
	PausedReason string
	Applied      int64     // events applied by this process
	Parked       int64     // events parked by this process
	Failed       int64     // attempts that failed and were counted
	Outages      int64     // those that a handler called an outage, and that were not
	Strays       int64     // deliveries that are not in the log, ignored
	SourceDown   bool      // the stream does not answer; the log is read instead
	TroubleSince time.Time // of the database, zero if there is none
	LastError    string    // of that trouble
	Handling     string    // type and id of the event in a handler now, the longest there, "" if none
	HandlingFor  time.Duration
	// Latency is from append until the effect was stored, and Handlers the time
	// spent in handlers, in seconds, of the events of this process.
	Latency, Handlers histogram.Snapshot
}

// busy is the event in a handler.
type busy struct {
	eventType, eventID string
	since              time.Time
}

func (c *Consumer) setBusy(b *busy) { c.busy.Store(b) }

var (
	// ErrRemoved is returned by Run when the consumer was removed while it ran.
	ErrRemoved = errors.New("consumer was removed")
	// ErrStuck is returned by Run when an Apply handler did not return within
	// Options.DrainTimeout of the stop. It is left behind with the database's
	// writer in hand: the caller should end the process and not close the store,
	// which would wait for it. Nothing of that batch is stored.
	ErrStuck = errors.New("a handler does not return")
)

// New returns a consumer that reads log and is woken by source. It does no I/O.
func New(db *store.DB, log *outbox.Log, source Source, o Options) (*Consumer, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	c := &Consumer{db: db, log: log, source: source, opts: o, routes: map[string]Route{}, moved: make(chan struct{}), nudged: make(chan struct{}, 1),
		latency: histogram.Durations(), handlers: histogram.Durations()}
	c.pause.log, c.pause.name = o.Logger, o.Name
	c.status.Name = o.Name
	for _, r := range o.Routes {
		c.routes[r.eventType] = r
	}
	return c, nil
}

// Name returns the consumer's name.
func (c *Consumer) Name() string { return c.opts.Name }

// Status returns the consumer's state. Safe from any goroutine.
func (c *Consumer) Status() Status {
	c.mu.Lock()
	s := c.status
	c.mu.Unlock()
	s.Strays = c.stray.Load()
	s.Latency, s.Handlers = c.latency.Snapshot(), c.handlers.Snapshot()
	s.PausedSince, s.PausedReason = c.pause.spell()
	b := c.busy.Load()
	if x := c.effects.Load(); b == nil && x != nil {
		b = x.oldest()
	}
	if b != nil {
		s.Handling, s.HandlingFor = b.eventType+" "+b.eventID, time.Since(b.since)
	}
	return s
}

// Run applies events until ctx ends, then returns nil: the batch under way is
// finished, external effects have Options.DrainTimeout to end, and nothing
// counts as a failed attempt. Trouble of the database or the stream is not an
// error of Run; it backs off and goes on. One instance of a consumer with Do
// routes may run at a time.
//
// Errors: ErrNewTypes, ErrPruned, ErrInvalidOption, ErrRemoved, ErrStuck.
func (c *Consumer) Run(ctx context.Context) error {
	effectsCtx, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	effects := newEffects(ctx, effectsCtx, c)
	c.effects.Store(effects)
	for {
		err := c.begin(ctx)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, ErrNewTypes) || errors.Is(err, ErrPruned) { // unless the reset that mends it is asked for
			if served, err := c.serveRequest(ctx); err == nil && served {
				continue
			}
		}
		if !store.IsUnavailable(err) {
			return err
		}
		c.sleep(ctx, c.inTrouble(err))
	}
	c.recovered(progress{state: c.state})

	fetchCtx, stopFetch := context.WithCancel(ctx)
	var wg sync.WaitGroup
	deliveries := make(chan []Delivery)
	down := make(chan bool)
	wg.Go(func() { c.fetch(fetchCtx, deliveries, down) })
	err := c.loop(ctx, deliveries, down)
	stopFetch()
	wg.Wait()
	effects.drain(cut)
	if err == nil {
		endCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.opts.DrainTimeout)
		defer cancel()
		_ = c.end(endCtx) // otherwise this was an unclean end, which is harmless
	}
	return err
}

// fetch reads deliveries from the source and says when it goes down and comes
// back.
func (c *Consumer) fetch(ctx context.Context, deliveries chan<- []Delivery, down chan<- bool) {
	say := func(isDown bool) {
		select {
		case down <- isDown:
		case <-ctx.Done():
		}
	}
	for failures := 0; ctx.Err() == nil; {
		ds, err := c.source.Fetch(ctx, fetchMax)
		if err != nil {
			if failures++; failures == 1 {
				say(true)
			}
			c.sleep(ctx, attempt.Jitter(10*time.Millisecond, time.Second, failures))
			continue
		}
		if failures > 0 {
			failures = 0
			say(false)
		}
		select {
		case deliveries <- ds:
		case <-ctx.Done():
		}
	}
}

const (
	fetchMax   = 1024
	maxWaiting = 16 * fetchMax // deliveries held above the cursor
)

// loop waits for a reason to look at the log, and applies what there is.
func (c *Consumer) loop(ctx context.Context, deliveries <-chan []Delivery, down <-chan bool) error {
	changed, unsubscribe := c.db.Subscribe()
	defer unsubscribe()
	poll := time.NewTimer(0) // look once at start, whatever the stream says
	defer poll.Stop()
	// Its own, because a stream that is never silent keeps putting poll off.
	ticks := time.NewTicker(c.opts.Poll)
	defer ticks.Stop()
	timer := time.NewTimer(0) // of parked events and pauses
	defer timer.Stop()
	sourceDown := false
	if err := c.tick(ctx); err != nil {
		return err
	}
	for {
		through := c.high
		in, wake := deliveries, changed
		if !sourceDown {
			wake = nil // the stream says how far, as long as it is there
		}
		if len(c.waiting) > maxWaiting {
			in = nil
		}
		timer.Reset(c.untilDue())
		select {
		case <-ctx.Done():
			return nil
		case ds := <-in:
			c.receive(ds)
			through = c.high
			poll.Reset(c.opts.Poll) // the stream is alive
		case sourceDown = <-down:
			c.setDown(sourceDown)
			through = endOfLog
		case <-wake:
			through = endOfLog
		case <-c.nudged: // an effect ended: there is room, and maybe its next is due
			c.lookAtParked(ctx)
		case <-timer.C:
			c.lookAtParked(ctx)
		case <-poll.C:
			through = endOfLog
			poll.Reset(c.opts.Poll)
		case <-ticks.C:
			before := c.state
			if err := c.tick(ctx); err != nil {
				return err
			}
			if c.state == before {
				continue // a parked event that became due is the timer's
			}
			through = endOfLog
		}
		if ctx.Err() != nil {
			return nil
		}
		c.wanted = max(c.wanted, through)
		if err := c.catchUp(ctx); err != nil {
			return err
		}
	}
}

const endOfLog = 1<<63 - 1

// untilDue is how long until a parked event is due or a pause is over.
func (c *Consumer) untilDue() time.Duration {
	if d := c.pause.left(); d > 0 {
		return d
	}
	if c.nextDue.IsZero() || c.state.paused || c.effects.Load().room() <= 0 { // the end of an effect nudges
		return time.Hour
	}
	return c.nextDue.Sub(c.db.Now())
}

// tick looks for what other programs have done to the consumer: requests, a
// pause or its end, and parked events made due. It only reads, unless there is
// something to mend; what goes wrong is looked at again at the next tick.
func (c *Consumer) tick(ctx context.Context) error {
	c.ticked = time.Now()
	if _, err := c.serveRequest(ctx); err != nil {
		return err
	}
	before := c.state
	if err := c.reload(ctx); errors.Is(err, ErrRemoved) {
		return err
	}
	if c.state != before {
		c.recovered(progress{state: c.state})
	}
	err := c.reschedule(ctx)
	if err == nil && c.hasDo() {
		err = c.effects.Load().orphans(ctx)
	}
	if err != nil && ctx.Err() == nil {
		c.opts.Logger.Warn("parked events not looked at, trying again", "consumer", c.opts.Name, "error", err)
	}
	c.lookAtParked(ctx)
	return nil
}

// lookAtParked finds out when the next parked event is due.
func (c *Consumer) lookAtParked(ctx context.Context) {
	if due, err := nextDue(ctx, c.db.Reader(), c.opts.Name); err == nil {
		c.nextDue = due
	}
}

func (c *Consumer) hasDo() bool {
	return slices.ContainsFunc(c.opts.Routes, func(r Route) bool { return r.do != nil })
}

// held reports whether the consumer must not begin anything now. Safe from any
// goroutine.
func (c *Consumer) held() bool { return c.paused.Load() || c.pause.left() > 0 }

// nudge makes the loop look at the parked events.
func (c *Consumer) nudge() {
	select {
	case c.nudged <- struct{}{}:
	default:
	}
}

// catchUp applies batch after batch until the cursor has reached what is
// wanted, or the log's end, and no parked event is due; and acks what that
// finishes. When it has to stop before that (a pause, no room for external
// effects), whatever ends the cause wakes the loop.
func (c *Consumer) catchUp(ctx context.Context) error {
	effects := c.effects.Load()
	for ctx.Err() == nil && c.pause.left() <= 0 {
		if time.Since(c.ticked) >= c.opts.Poll { // a long way to go keeps nobody waiting
			if err := c.tick(ctx); err != nil {
				return err
			}
		}
		if c.state.paused {
			return nil
		}
		rows, err := c.log.Follow(ctx, c.state.position, outbox.Page{Rows: c.opts.BatchRows, Bytes: maxBatchBytes, Through: max(c.wanted, c.state.position)})
		if err == nil && len(rows) == 0 && !c.dueNow() {
			c.settle(c.state.position, nil, true)
			if c.wanted == endOfLog {
				c.isolate = 0 // what could have ended the process is behind
			}
			c.wanted = 0
			return nil
		}
		from := c.state.position
		var p progress
		switch {
		case err != nil:
		case c.isolate > 0:
			p, err = c.isolated(ctx, rows)
		default:
			// A parked event that failed has ended its batch: the log's turn, or
			// those that fail faster than they can be tried would be all there is.
			l := limits{items: c.opts.BatchRows, effects: effects.room(), alone: c.logsTurn && len(rows) > 0}
			if p, err = c.batch(ctx, rows, l, nil); err == nil {
				c.logsTurn = p.failed != nil && p.failed.parked
				c.committed(p)
			}
		}
		if errors.Is(err, errChanged) {
			if err = c.reload(ctx); err == nil {
				c.recovered(progress{state: c.state})
				continue
			}
		}
		if errors.Is(err, ErrRemoved) || errors.Is(err, ErrStuck) {
			return err
		}
		if err != nil {
			if ctx.Err() == nil {
				c.sleep(ctx, c.inTrouble(err))
			}
			continue
		}
		if c.hook("consumer.after-commit") != nil || p.paused {
			return nil
		}
		c.settle(from, rows[:p.rows], false)
		if p.rows == 0 && p.done == 0 { // no room, or an outage
			return nil
		}
	}
	return nil
}

// committed takes over what a batch did.
func (c *Consumer) committed(p progress) {
	c.setState(p.state)
	c.nextDue = p.nextDue
	for _, it := range p.effects {
		c.effects.Load().start(it)
	}
	if len(p.applied) > 0 {
		now := c.db.Now().UnixMicro()
		for _, at := range p.applied {
			c.latency.Observe((now - at) * int64(time.Microsecond))
		}
		c.pause.success()
	}
	if p.failed != nil {
		c.pause.failure(p.failed.Aggregate())
	}
	if p.outage != nil {
		c.pause.outage(p.outage)
	}
	c.recovered(p)
}

// effectEnded takes over the stored result of an external effect. It runs on
// the effect's goroutine.
func (c *Consumer) effectEnded(it *item, f *failure) {
	switch {
	case f == nil:
		c.pause.success()
	case f.counts():
		c.pause.failure(it.Aggregate())
	default:
		c.pause.outage(f)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case f == nil:
		c.status.Applied++
		c.latency.Observe(int64(c.db.Now().Sub(it.CreatedAt)))
	case f.counts():
		c.status.Failed++
	default:
		c.status.Outages++
	}
	close(c.moved)
	c.moved = make(chan struct{})
}

func (c *Consumer) dueNow() bool {
	return !c.nextDue.IsZero() && !c.nextDue.After(c.db.Now())
}

// inTrouble notes a failed batch, logs the first of a row, and returns how
// long to wait.
func (c *Consumer) inTrouble(err error) time.Duration {
	c.failures++
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.status.TroubleSince.IsZero() {
		c.status.TroubleSince = time.Now()
		c.opts.Logger.Warn("consumer is held up by the database", "consumer", c.opts.Name, "position", c.state.position, "error", err)
	}
	c.status.LastError = err.Error()
	return attempt.Jitter(5*time.Millisecond, time.Second, c.failures) + time.Millisecond
}

// recovered publishes what a batch did and ends a spell of trouble.
func (c *Consumer) recovered(p progress) {
	c.failures = 0
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.status
	if !s.TroubleSince.IsZero() {
		c.opts.Logger.Info("consumer goes on", "consumer", c.opts.Name, "held_up_for", time.Since(s.TroubleSince).Round(time.Millisecond))
		s.TroubleSince, s.LastError = time.Time{}, ""
	}
	s.Position, s.Paused = p.position, p.state.paused
	s.Applied += int64(len(p.applied))
	s.Parked += int64(p.parked)
	if p.failed != nil {
		s.Failed++
	}
	if p.outage != nil {
		s.Outages++
	}
	close(c.moved)
	c.moved = make(chan struct{})
}

func (c *Consumer) setDown(down bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status.SourceDown = down
}

func (c *Consumer) sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

func (c *Consumer) hook(point string) error {
	if c.opts.Failpoint == nil {
		return nil
	}
	return c.opts.Failpoint(point)
}
