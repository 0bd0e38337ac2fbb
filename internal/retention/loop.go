package retention

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"outlog/consumer"
	"outlog/outbox"
	"outlog/store"
)

const (
	// every is how often a running node looks for what has expired.
	every = time.Minute
	// fileEvents are worth an archive file; fewer wait, but not longer than
	// fileWithin.
	fileEvents = 10_000
	fileWithin = time.Hour
	// step is by how much the clock must be set for age to count no more, and
	// distrust for how long: time to see that events would go too early.
	step     = time.Hour
	distrust = time.Hour
)

// LoopOptions say what a running node keeps.
type LoopOptions struct {
	Options                   // a zero Rule: every event
	InboxWindow int64         // positions below what a consumer needs; negative: every inbox row
	HistoryAge  time.Duration // of failed attempts; negative: for ever
	Logger      *slog.Logger
}

// Loop prunes a node's log and its consumers' inboxes as they grow.
type Loop struct {
	db    *store.DB
	log   *outbox.Log
	opts  LoopOptions
	sizer *sizer

	clock   clock
	filed   time.Time // when an archive file was last written, or the loop began
	trouble bool      // the last round failed, and said so
}

// NewLoop returns the loop of a node. It does no I/O.
func NewLoop(db *store.DB, log *outbox.Log, o LoopOptions) *Loop {
	return &Loop{db: db, log: log, opts: o, sizer: &sizer{log: log}, filed: time.Now()}
}

// Run looks every minute until ctx ends. What goes wrong is logged and tried
// again.
func (l *Loop) Run(ctx context.Context) {
	l.clock.stepped(l.db.Now()) // from here on
	t := time.NewTimer(every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		l.round(ctx)
		t.Reset(every)
	}
}

// round prunes what there is to prune. It writes nothing when there is nothing.
func (l *Loop) round(ctx context.Context) {
	err := errors.Join(l.events(ctx), l.inboxes(ctx), l.history(ctx))
	switch {
	case err == nil && l.trouble:
		l.opts.Logger.Info("pruning goes on")
	case err != nil && ctx.Err() == nil && !l.trouble:
		l.opts.Logger.Warn("pruning is held up", "error", err)
	}
	l.trouble = err != nil
}

func (l *Loop) events(ctx context.Context) error {
	o := l.opts.Options
	if by, stepped := l.clock.stepped(l.db.Now()); stepped {
		l.opts.Logger.Warn("the clock was set; no event is pruned for its age until it has gone right for an hour", "by", by.Round(time.Second))
	}
	if l.clock.distrusted() {
		o.OlderThan = 0
	}
	if o.Rule == (Rule{}) {
		return nil
	}
	if time.Since(l.filed) < fileWithin {
		o.MinArchive = fileEvents
	}
	r, err := prune(ctx, l.db, l.log, o, l.sizer)
	if len(r.Files) > 0 {
		l.filed = time.Now()
	}
	if r.Events > 0 {
		l.opts.Logger.Info("events pruned", "events", r.Events, "bytes", r.Bytes, "through", r.Through, "archived", len(r.Files))
	}
	return err
}

// inboxes removes the inbox rows of all consumers that are out of the window.
func (l *Loop) inboxes(ctx context.Context) error {
	if l.opts.InboxWindow < 0 {
		return nil
	}
	names, err := consumer.Names(ctx, l.db.Reader())
	if err != nil {
		return err
	}
	for _, name := range names {
		err := l.repeat(ctx, func(rows int) (bool, error) { return consumer.TrimInbox(ctx, l.db, name, l.opts.InboxWindow, rows) })
		if err != nil {
			return err
		}
	}
	return nil
}

func (l *Loop) history(ctx context.Context) error {
	if l.opts.HistoryAge < 0 || l.clock.distrusted() {
		return nil
	}
	return l.repeat(ctx, func(rows int) (bool, error) { return consumer.TrimAttempts(ctx, l.db, l.opts.HistoryAge, rows) })
}

// repeat calls fn until there is no more to do, and leaves the database to
// others in between.
func (l *Loop) repeat(ctx context.Context, fn func(rows int) (more bool, err error)) error {
	for more := true; more; {
		start := time.Now()
		var err error
		if more, err = fn(chunkRows); err != nil {
			return err
		}
		if more {
			if err := sleep(ctx, rest*time.Since(start)); err != nil {
				return err
			}
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(min(d, time.Second))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// clock notices that the time was set, by comparing it with a clock that cannot
// be. A machine that was asleep looks the same, which does no harm.
type clock struct {
	wall, steady time.Time
	until        time.Time // by the steady clock
}

// stepped reports whether the time was set since the last call, and by how
// much.
func (c *clock) stepped(wall time.Time) (by time.Duration, ok bool) {
	steady := time.Now()
	if !c.wall.IsZero() {
		by = wall.Sub(c.wall) - steady.Sub(c.steady)
	}
	c.wall, c.steady = wall, steady
	if ok = by > step || by < -step; ok {
		c.until = steady.Add(distrust)
	}
	return by, ok
}

func (c *clock) distrusted() bool { return time.Now().Before(c.until) }
