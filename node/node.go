// Package node puts store, log, broker, relay and consumers together in one
// process.
//
//	n, err := node.Open(ctx, node.Options{Dir: "data"})
//	n.Handle(consumer.Options{…})
//	go n.Run(ctx)
//	n.Update(ctx, func(tx *store.Tx) error { … n.Append(ctx, tx, event) … })
//	n.Close()
//
// Open takes the ownership of the database and needs no broker: Update and
// Append work from then on. Run starts everything that moves, in the order
// broker, relay, consumers, and stops it in reverse: consumers finish their
// batch, the relay publishes to the head of the log, the broker ends.
package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"outlog/broker"
	"outlog/consumer"
	"outlog/internal/archive"
	"outlog/internal/lock"
	"outlog/internal/retention"
	"outlog/outbox"
	"outlog/relay"
	"outlog/store"
)

// Node is one owner of a database.
type Node struct {
	opts   Options
	lock   *lock.Lock
	db     *store.DB
	log    *outbox.Log
	broker *broker.Broker // nil with NoBroker
	relay  *relay.Relay   // nil with NoBroker
	pruner *retention.Loop

	mu        sync.Mutex
	consumers []*consumer.Consumer
	sources   []*broker.Source
	running   bool
	stopped   chan struct{} // closed when Run has returned
	cancel    context.CancelFunc
	stuck     atomic.Bool // a handler did not return: the database cannot be closed
	closed    sync.Once
}

var (
	// ErrRunning is returned by Handle and Run while Run runs.
	ErrRunning = errors.New("the node is running")
	// ErrNoConsumer is returned for a name that no Handle call has given.
	ErrNoConsumer = errors.New("no such consumer")
)

// Open takes the ownership of the database, creates or migrates it, and
// returns a node that does not move yet.
//
// Errors: *lock.HeldError when another process is the owner, ErrInvalidOption,
// store.ErrNewer, store.ErrForeign, or the operating system's.
func Open(ctx context.Context, o Options) (*Node, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	dbPath, streamDir := o.paths()
	if o.Dir != "" {
		if err := makeDir(o.Dir); err != nil {
			return nil, fmt.Errorf("data directory: %w", err)
		}
	}
	n := &Node{opts: o, stopped: make(chan struct{})}
	if n.lock, err = acquire(ctx, dbPath, o.Standby); err != nil {
		return nil, err
	}
	if o.Failpoint != nil {
		err = o.Failpoint("node.after-lock")
	}
	if err == nil {
		err = n.open(ctx, dbPath, streamDir)
	}
	if err != nil {
		if n.db != nil {
			err = errors.Join(err, n.db.Close())
		}
		return nil, errors.Join(err, n.lock.Release())
	}
	return n, nil
}

func acquire(ctx context.Context, dbPath string, standby bool) (*lock.Lock, error) {
	if standby {
		return lock.Wait(ctx, dbPath)
	}
	return lock.Acquire(dbPath)
}

func (n *Node) open(ctx context.Context, dbPath, streamDir string) (err error) {
	o := n.opts
	n.db, err = store.Open(ctx, store.Options{Path: dbPath, Synchronous: o.Synchronous, Migrations: o.Migrations,
		Logger: o.Logger, Now: o.Now, Failpoint: o.Failpoint})
	if err != nil {
		return err
	}
	if n.log, err = outbox.Open(ctx, n.db); err != nil {
		return err
	}
	n.db.Register(relay.Checks...)
	n.db.Register(consumer.Checks...)
	if n.pruner, err = newPruner(n.db, n.log, o); err != nil || o.NoBroker {
		return err
	}
	if err := relay.Register(ctx, n.db); err != nil {
		return err
	}
	n.broker, err = broker.New(broker.Options{Dir: streamDir, LogID: n.log.ID(), MaxAge: o.StreamMaxAge, MaxBytes: o.StreamMaxBytes, Logger: o.Logger, Failpoint: o.Failpoint})
	if err != nil {
		return err
	}
	r := o.Relay
	r.Stream, r.MaxAge, r.DrainTimeout, r.Logger, r.Failpoint = n.broker.StreamName(), o.StreamMaxAge, o.DrainTimeout, o.Logger, o.Failpoint
	n.relay, err = relay.New(n.db, n.log, n.broker.Publisher(), r)
	return err
}

// newPruner returns the loop that keeps the log as long as the options say.
func newPruner(db *store.DB, log *outbox.Log, o Options) (*retention.Loop, error) {
	l := retention.LoopOptions{InboxWindow: o.InboxWindow, HistoryAge: o.HistoryAge, Logger: o.Logger}
	l.Rule = retention.Rule{OlderThan: o.Retention, MaxBytes: o.RetentionBytes}
	l.Needs, l.Failpoint = outbox.Needs{NoRelay: o.NoBroker}, o.Failpoint
	if o.Archive != "" {
		var err error
		if l.Archive, err = archive.Open(o.Archive, log.ID(), archive.Format(o.ArchiveFormat)); err != nil {
			return nil, err
		}
	}
	return retention.NewLoop(db, log, l), nil
}

// Update runs fn in a write transaction; see store.DB.Update.
func (n *Node) Update(ctx context.Context, fn func(tx *store.Tx) error) error {
	return n.db.Update(ctx, fn)
}

// Append puts events into the log in the caller's transaction; see
// outbox.Log.Append.
func (n *Node) Append(ctx context.Context, tx outbox.Execer, events ...outbox.Event) ([]outbox.Appended, error) {
	return n.log.Append(ctx, tx, events...)
}

// Store returns the database.
func (n *Node) Store() *store.DB { return n.db }

// Log returns the event log.
func (n *Node) Log() *outbox.Log { return n.log }

// Broker returns the embedded broker, nil with NoBroker.
func (n *Node) Broker() *broker.Broker { return n.broker }

// Handle adds a consumer. Call it before Run.
//
// Errors: consumer.ErrInvalidOption, ErrRunning.
func (n *Node) Handle(o consumer.Options) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.running {
		return ErrRunning
	}
	if slices.ContainsFunc(n.consumers, func(c *consumer.Consumer) bool { return c.Name() == o.Name }) {
		return fmt.Errorf("%w: two consumers are named %q", ErrInvalidOption, o.Name)
	}
	if o.Logger == nil {
		o.Logger = n.opts.Logger
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = n.opts.DrainTimeout
	}
	if o.Failpoint == nil {
		o.Failpoint = n.opts.Failpoint
	}
	var source consumer.Source = silent{}
	if n.broker != nil {
		s := n.broker.Source(o.Name, func(ctx context.Context) (uint64, error) { return n.startSeq(ctx, o.Name) })
		n.sources = append(n.sources, s)
		source = s
	}
	c, err := consumer.New(n.db, n.log, source, o)
	if err != nil {
		return err
	}
	n.consumers = append(n.consumers, c)
	return nil
}

// startSeq is where on the stream a durable should begin that is made anew:
// at or before the message after the consumer's cursor.
func (n *Node) startSeq(ctx context.Context, name string) (seq uint64, err error) {
	err = n.db.Reader().QueryRowContext(ctx, `SELECT coalesce(
		(SELECT min(first_stream_seq) FROM outlog_publications WHERE last_position >
			coalesce((SELECT position FROM outlog_consumers WHERE name = ?), 0)),
		(SELECT stream_seq + 1 FROM outlog_relay WHERE name = 'main'))`, name).Scan(&seq)
	return seq, err
}

// silent is the source of a node without broker: it never delivers and reports
// itself as down, so that consumers follow the log.
type silent struct{}

func (silent) Fetch(ctx context.Context, _ int) ([]consumer.Delivery, error) {
	return nil, errNoBroker
}

var errNoBroker = errors.New("the node has no broker")

// WaitApplied waits until a consumer has applied the event at position; see
// consumer.Consumer.WaitApplied. Errors: ErrNoConsumer, consumer.ErrParked,
// ctx's.
func (n *Node) WaitApplied(ctx context.Context, name string, position int64) error {
	n.mu.Lock()
	i := slices.IndexFunc(n.consumers, func(c *consumer.Consumer) bool { return c.Name() == name })
	n.mu.Unlock()
	if i < 0 {
		return fmt.Errorf("%w: %q", ErrNoConsumer, name)
	}
	return n.consumers[i].WaitApplied(ctx, position)
}

// Announce makes the address of the owner's HTTP server known to commands that
// run beside it.
func (n *Node) Announce(httpAddress string) error { return n.lock.SetAddress(httpAddress) }

// Close stops Run if it runs, closes the database and gives the ownership up.
// Further calls do nothing. It returns consumer.ErrStuck when Run left a handler
// behind.
func (n *Node) Close() error {
	n.mu.Lock()
	cancel := n.cancel
	n.mu.Unlock()
	if cancel != nil {
		cancel()
		<-n.stopped
	}
	for _, s := range n.sources {
		s.Close()
	}
	if n.stuck.Load() {
		return fmt.Errorf("close: %w; it holds the database, which stays open and owned until the process ends", consumer.ErrStuck)
	}
	var err error
	n.closed.Do(func() { err = errors.Join(n.db.Close(), n.lock.Release()) })
	return err
}
