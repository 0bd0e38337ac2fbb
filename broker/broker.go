package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Broker supervises one embedded NATS server and holds the connections to it.
type Broker struct {
	opts   Options
	log    *slog.Logger
	dir    storeDir
	stream string // the stream's name

	running atomic.Bool
	// suspects carries reasons to look at the server's health at once.
	suspects chan suspicion
	// strikes counts publishes in a row that the server never answered.
	strikes atomic.Int32
	// expected says that the stream was seen on this server, so its directory
	// must be there.
	expected atomic.Bool
	// rebuild is held while the stream is deleted and made again, and while
	// health is judged: its directory and the server disagree in between.
	rebuild chan struct{}
	// refused counts starts in a row that failed with an error. Run's own.
	refused int

	mu       sync.Mutex
	state    State
	changed  chan struct{}  // closed and replaced whenever state.Up changes
	current  *server.Server // nil while down
	relay    *link          // nil until the first start
	consumer *link
	sources  map[*Source]struct{}
}

// State is what a readiness page shows.
type State struct {
	// Up says that the server runs and its last health check passed.
	Up bool
	// Reason says in words why it is down; "" while it is up.
	Reason string
	// Err is the error behind Reason, for errors.Is.
	Err error
	// Restarts counts starts of the server after the first, successful or not.
	Restarts int
	// Quarantines counts stores that were moved away since Run began.
	Quarantines int
}

var errNotStarted = fmt.Errorf("%w: not started", ErrDown)

// New returns a broker that is not started. It does no I/O. Errors:
// ErrInvalidOption.
func New(o Options) (*Broker, error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	return &Broker{
		opts:     o,
		log:      o.Logger,
		dir:      storeDir(o.Dir),
		stream:   streamPrefix + o.LogID,
		suspects: make(chan suspicion, 1),
		rebuild:  make(chan struct{}, 1),
		state:    State{Reason: errNotStarted.Error(), Err: errNotStarted},
		changed:  make(chan struct{}),
		sources:  map[*Source]struct{}{},
	}, nil
}

// Run keeps the server up until ctx ends: it starts it, watches its health,
// and starts it again after a failure, with exponential backoff and full
// jitter. It blocks, and returns nil after ctx was cancelled and the server has
// stopped (bounded by Options.StopTimeout). Other errors: ErrStuck, ErrRunning.
func (b *Broker) Run(ctx context.Context) error {
	if !b.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer b.running.Store(false)
	defer b.closeLinks()
	for failures := 0; ; failures++ {
		began := time.Now()
		err := b.serve(ctx)
		b.setDown(err)
		if errors.Is(err, ErrStuck) {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > 3*b.opts.BackoffMax {
			failures = 0
		}
		pause := b.backoff(failures)
		b.log.Error("the embedded server is down", "reason", err, "restart_in", pause)
		if !sleep(ctx, pause) {
			return nil
		}
		b.mu.Lock()
		b.state.Restarts++
		b.mu.Unlock()
	}
}

func (b *Broker) backoff(failures int) time.Duration {
	limit := b.opts.BackoffMax
	if d := b.opts.BackoffMin << min(failures, 20); d > 0 && d < limit {
		limit = d
	}
	return rand.N(limit) + 1
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return ctx.Err() == nil
	}
}

// State returns the broker's state.
func (b *Broker) State() State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state
}

// Ready returns whether the server is up.
func (b *Broker) Ready() bool { return b.State().Up }

// WaitUp blocks until the server is up, or returns ctx's error.
func (b *Broker) WaitUp(ctx context.Context) error {
	for {
		b.mu.Lock()
		up, changed := b.state.Up, b.changed
		b.mu.Unlock()
		if up {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// StreamName is the name of the stream, OUTLOG_ and the log's id.
func (b *Broker) StreamName() string { return b.stream }

func (b *Broker) setUp(s *server.Server) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.current = s
	b.state.Up, b.state.Reason, b.state.Err = true, "", nil
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *Broker) setDown(err error) {
	if err == nil {
		err = fmt.Errorf("%w: stopped", ErrDown)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.current = nil
	if b.state.Up {
		close(b.changed)
		b.changed = make(chan struct{})
	}
	b.state.Up, b.state.Reason, b.state.Err = false, err.Error(), err
}

// up returns a channel that is closed when the server goes down, or ErrDown
// with the reason.
func (b *Broker) up() (down <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state.Up {
		return b.changed, nil
	}
	if errors.Is(b.state.Err, ErrDown) {
		return nil, b.state.Err
	}
	return nil, fmt.Errorf("%w: %w", ErrDown, b.state.Err)
}
