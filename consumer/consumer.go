package consumer

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

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
	state   state
	high    int64      // highest position delivered
	waiting []Delivery // delivered, not yet acked, in stream order
	nextDue time.Time  // of the earliest parked event
	failed  int        // batches in a row that met database trouble
	trouble time.Time  // since when

	mu     sync.Mutex
	moved  chan struct{} // closed and replaced when the cursor moves
	status Status
	stray  atomic.Int64
}

// Status is a consumer's state, for people and metrics.
type Status struct {
	Name         string
	Position     int64     // the cursor
	Paused       bool      //
	Applied      int64     // events applied by this process
	Parked       int64     // events parked by this process
	Strays       int64     // deliveries that are not in the log, ignored
	SourceDown   bool      // the stream does not answer; the log is read instead
	TroubleSince time.Time // of the database, zero if there is none
	LastError    string
}

// New returns a consumer that reads log and is woken by source. It does no I/O.
func New(db *store.DB, log *outbox.Log, source Source, o Options) (*Consumer, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	c := &Consumer{db: db, log: log, source: source, opts: o, routes: map[string]Route{}, moved: make(chan struct{})}
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
	defer c.mu.Unlock()
	s := c.status
	s.Strays = c.stray.Load()
	return s
}

// Register makes or reads the consumer's row. Run does it too; a caller that
// wants to know early that the consumer cannot start calls it before.
//
// Errors: ErrNewTypes, ErrPruned, ErrInvalidOption, or the database's.
func (c *Consumer) Register(ctx context.Context) error { return c.register(ctx) }

// Run applies events until ctx ends, then returns nil: the batch under way is
// finished, and counts as nobody's failed attempt. Trouble of the database or
// the stream is not an error of Run; it backs off and goes on.
func (c *Consumer) Run(ctx context.Context) error {
	for {
		err := c.register(ctx)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return nil
		}
		if !store.IsUnavailable(err) {
			return err
		}
		c.sleep(ctx, c.inTrouble(err))
	}
	c.recovered(progress{state: c.state})

	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	deliveries := make(chan []Delivery)
	down := make(chan bool)
	wg.Go(func() { c.fetch(ctx, deliveries, down) })
	c.loop(ctx, deliveries, down)
	return nil
}

// fetch reads deliveries from the source and says when it goes down and comes
// back.
func (c *Consumer) fetch(ctx context.Context, deliveries chan<- []Delivery, down chan<- bool) {
	for failures := 0; ctx.Err() == nil; {
		ds, err := c.source.Fetch(ctx, fetchMax)
		if err != nil {
			if failures++; failures == 1 {
				select {
				case down <- true:
				case <-ctx.Done():
				}
			}
			c.sleep(ctx, jitter(10*time.Millisecond, time.Second, failures))
			continue
		}
		if failures > 0 {
			failures = 0
			select {
			case down <- false:
			case <-ctx.Done():
			}
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
func (c *Consumer) loop(ctx context.Context, deliveries <-chan []Delivery, down <-chan bool) {
	changed, unsubscribe := c.db.Subscribe()
	defer unsubscribe()
	poll := time.NewTimer(0) // look once at start, whatever the stream says
	defer poll.Stop()
	sourceDown := false
	for {
		through, lookAtParked := c.high, false
		in, wake := deliveries, changed
		if !sourceDown {
			wake = nil // the stream says how far, as long as it is there
		}
		if len(c.waiting) > maxWaiting {
			in = nil
		}
		var due <-chan time.Time
		if !c.nextDue.IsZero() {
			due = time.After(c.nextDue.Sub(c.db.Now()))
		}
		select {
		case <-ctx.Done():
			return
		case ds := <-in:
			c.receive(ds)
			through = c.high
		case sourceDown = <-down:
			c.setDown(sourceDown)
			through = endOfLog
		case <-wake:
			through = endOfLog
		case <-due:
		case <-poll.C:
			// A parked event's time may have been set by a clock that has since
			// stepped back: look, whatever the timer says.
			through, lookAtParked = endOfLog, !c.nextDue.IsZero()
		}
		c.catchUp(ctx, through, lookAtParked)
		poll.Reset(c.opts.Poll)
	}
}

const endOfLog = 1<<63 - 1

// receive takes deliveries over. Those that are not of this log are strays.
func (c *Consumer) receive(ds []Delivery) {
	for _, d := range ds {
		if d.LogID == c.log.ID() {
			c.high = max(c.high, d.Record.Position)
		} else {
			c.stray.Add(1)
		}
		c.waiting = append(c.waiting, d)
	}
}

// catchUp applies batch after batch until the cursor has reached through, or
// the log's end, and no parked event is due; and acks what that finishes.
func (c *Consumer) catchUp(ctx context.Context, through int64, lookAtParked bool) {
	for ctx.Err() == nil {
		rows, err := c.log.Read(ctx, c.state.position, outbox.Page{Rows: c.opts.BatchRows, Bytes: maxBatchBytes, Through: max(through, c.state.position)})
		if err == nil && len(rows) == 0 && !lookAtParked && !c.dueNow() {
			c.settle(c.state.position, nil, through < endOfLog)
			return
		}
		var p progress
		if err == nil {
			p, err = c.batch(ctx, rows)
		}
		if errors.Is(err, errChanged) {
			if err = c.register(ctx); err == nil {
				c.recovered(progress{state: c.state})
				continue
			}
		}
		if err != nil {
			if ctx.Err() == nil {
				c.sleep(ctx, c.inTrouble(err))
			}
			continue
		}
		from := c.state.position
		c.state, c.nextDue, lookAtParked = p.state, p.nextDue, false
		if c.hook("consumer.after-commit") != nil {
			return
		}
		c.recovered(p)
		if p.paused {
			return
		}
		c.settle(from, rows[:p.rows], false)
		if !p.more && !c.dueNow() && c.state.position == through {
			return
		}
	}
}

func (c *Consumer) dueNow() bool {
	return !c.nextDue.IsZero() && !c.nextDue.After(c.db.Now())
}

// settle compares the finished rows, all there are after position from, with
// what was delivered, and acks the deliveries up to the first that is not
// finished. exhausted: the log holds nothing between the cursor and the
// highest position delivered, so whatever is delivered above the cursor is a
// ghost.
func (c *Consumer) settle(from int64, rows []outbox.Record, exhausted bool) {
	n := 0
	for _, d := range c.waiting {
		if d.LogID == c.log.ID() {
			p := d.Record.Position
			if p > c.state.position && !exhausted {
				break
			}
			if p > from && !isRow(rows, d.Record) {
				c.stray.Add(1)
			}
		}
		n++
	}
	if n > 0 {
		_ = c.waiting[n-1].Ack() // a lost ack is redelivered, found finished, and acked again
		c.waiting = append(c.waiting[:0], c.waiting[n:]...)
	}
	if exhausted {
		c.high = min(c.high, c.state.position)
	}
}

// isRow reports whether a delivered event is one of the log's rows.
func isRow(rows []outbox.Record, d outbox.Record) bool {
	i, found := slices.BinarySearchFunc(rows, d.Position, func(r outbox.Record, p int64) int { return cmp.Compare(r.Position, p) })
	return found && rows[i].EventID == d.EventID
}

// inTrouble notes a failed batch, logs the first of a row, and returns how
// long to wait.
func (c *Consumer) inTrouble(err error) time.Duration {
	c.failed++
	if c.trouble.IsZero() {
		c.trouble = time.Now()
		c.opts.Logger.Warn("consumer is held up by the database", "consumer", c.opts.Name, "position", c.state.position, "error", err)
	}
	c.mu.Lock()
	c.status.TroubleSince, c.status.LastError = c.trouble, err.Error()
	c.mu.Unlock()
	return jitter(5*time.Millisecond, time.Second, c.failed) + time.Millisecond
}

// recovered publishes what a batch did and ends a spell of trouble.
func (c *Consumer) recovered(p progress) {
	if !c.trouble.IsZero() {
		c.opts.Logger.Info("consumer goes on", "consumer", c.opts.Name, "held_up_for", time.Since(c.trouble).Round(time.Millisecond))
		c.trouble = time.Time{}
	}
	c.failed = 0
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status.Position, c.status.Paused = p.position, p.paused
	c.status.Applied += int64(p.applied)
	c.status.Parked += int64(p.parked)
	c.status.TroubleSince, c.status.LastError = time.Time{}, ""
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
