package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"outlog/consumer"
	"outlog/relay"
)

// Run moves events until ctx ends, then stops in order and returns nil. It
// returns early with an error that no waiting can mend: another owner has
// taken over, the database file was replaced, a consumer's options do not fit
// its past, the broker hangs, or a handler does not return within the drain
// time (consumer.ErrStuck: the process must end). Broker and database outages
// are not errors.
func (n *Node) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	n.mu.Lock()
	if n.running {
		n.mu.Unlock()
		return ErrRunning
	}
	n.running, n.cancel = true, func() { cancel(nil) }
	n.mu.Unlock()
	defer close(n.stopped)

	// Each stage has its own context, so that they can end one after the other.
	var failed failures
	fail := func(what string, err error) {
		if err != nil {
			failed.add(fmt.Errorf("%s: %w", what, err))
			cancel(err)
		}
	}
	watch := newStage(ctx)
	watch.run(func(ctx context.Context) { fail("watch", n.db.Run(ctx)) })
	brokers := newStage(ctx)
	relays := newStage(ctx)
	if n.broker != nil {
		brokers.run(func(ctx context.Context) { fail("broker", n.broker.Run(ctx)) })
		relays.run(func(ctx context.Context) {
			_ = n.broker.WaitUp(ctx) // nothing to say about the stream before that
			fail("relay", n.relay.Run(ctx))
		})
	}
	consumers := newStage(ctx)
	for _, c := range n.consumers {
		consumers.run(func(ctx context.Context) { fail("consumer "+c.Name(), c.Run(ctx)) })
	}

	pruning := newStage(ctx)
	pruning.run(n.pruner.Run)

	<-ctx.Done()
	for _, s := range []struct {
		name string
		*stage
	}{{"pruning", pruning}, {"consumers", consumers}, {"relay", relays}, {"broker", brokers}, {"watch", watch}} {
		if took := s.stop(); took > n.opts.DrainTimeout {
			n.opts.Logger.Warn("slow stop", "part", s.name, "took", took.Round(time.Millisecond))
		}
	}
	err := failed.join()
	n.stuck.Store(errors.Is(err, consumer.ErrStuck))
	return err
}

// failures gathers what the stages return, also while they stop.
type failures struct {
	mu   sync.Mutex
	errs []error
}

func (f *failures) add(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs = append(f.errs, err)
}

func (f *failures) join() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.errs...)
}

// stage is a group of goroutines that end together, whatever happens to the
// context that the others live by.
type stage struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func newStage(ctx context.Context) *stage {
	s := &stage{}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return s
}

func (s *stage) run(fn func(context.Context)) { s.wg.Go(func() { fn(s.ctx) }) }

// stop ends the stage and waits for it.
func (s *stage) stop() time.Duration {
	start := time.Now()
	s.cancel()
	s.wg.Wait()
	return time.Since(start)
}

// Status is the state of a node's moving parts.
type Status struct {
	BrokerUp     bool
	BrokerReason string // why it is not up
	Relay        relay.Status
	Consumers    []consumer.Status
}

// Status returns the state of the moving parts. Safe from any goroutine.
func (n *Node) Status() Status {
	var s Status
	if n.broker != nil {
		b := n.broker.State()
		s.BrokerUp, s.BrokerReason = b.Up, b.Reason
		s.Relay = n.relay.Status()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.consumers {
		s.Consumers = append(s.Consumers, c.Status())
	}
	return s
}
