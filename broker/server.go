package broker

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// suspicion is a reason to look at the server's health at once.
type suspicion struct {
	reason string
	// strike says that the server left publishes unanswered. A healthy server
	// that does it twice in a row is started again too: a damaged message can
	// keep it busy for ever while it looks well.
	strike bool
}

// suspect asks for a health check. It never blocks; one request may stand for
// several.
func (b *Broker) suspect(s suspicion) {
	if s.strike {
		b.strikes.Add(1)
	}
	select {
	case b.suspects <- s:
	default:
	}
}

// cleared says that the server acknowledged a publish.
func (b *Broker) cleared() {
	if b.strikes.Load() != 0 {
		b.strikes.Store(0)
	}
}

// serve runs one server from start to stop and returns why it ended; nil when
// ctx did.
func (b *Broker) serve(ctx context.Context) error {
	s, logger, err := b.start(ctx)
	if err != nil {
		return err
	}
	b.refused = 0
	b.strikes.Store(0)
	b.expected.Store(false)
	b.mu.Lock()
	b.current = s // for the dialer
	b.mu.Unlock()
	if err = b.connect(); err == nil {
		b.setUp(s)
		err = b.watch(ctx, s, logger)
	}
	b.setDown(err)
	if stopErr := b.stop(s); stopErr != nil {
		return stopErr
	}
	return err
}

func (b *Broker) serverOptions() *server.Options {
	return &server.Options{
		ServerName: "outlog",
		DontListen: true,
		NoSigs:     true, // signals belong to the program
		JetStream:  true,
		StoreDir:   string(b.dir),
		// An acknowledgement means the page cache. The default would let a power
		// cut take two minutes; the relay republishes what is younger than this.
		SyncInterval:       time.Second,
		JetStreamMaxMemory: 64 << 20,
		// The stream's own MaxBytes is the limit. One for the server would have to
		// leave room for what older options and other logs reserved.
		JetStreamMaxStore:          1 << 50,
		JetStreamRequestQueueLimit: 10_000,
		MaxPayload:                 int32(b.opts.MaxMessage),
		MaxPending:                 max(64<<20, 4*int64(b.opts.MaxMessage)),
		DisableJetStreamBanner:     true,
	}
}

// maxRefused is how often in a row a start may fail with an error before its
// store is put into quarantine.
const maxRefused = 4

// start prepares the store and starts a server on it, within StartTimeout.
func (b *Broker) start(ctx context.Context) (*server.Server, *serverLogger, error) {
	moved, err := b.dir.prepare()
	if moved {
		b.mu.Lock()
		b.state.Quarantines++
		b.mu.Unlock()
		b.log.Error("an earlier start of the broker hung or died: its store was moved away, the stream will be rebuilt from the log",
			"moved_to", b.dir.quarantined())
	}
	if err == nil && moved {
		err = b.opts.hook("broker.after-quarantine")
	}
	if err == nil {
		err = b.opts.hook("broker.after-mark")
	}
	if err != nil {
		return nil, nil, err
	}
	logger := &serverLogger{log: b.log, onError: func() { b.suspect(suspicion{reason: "the server logged an error"}) }}
	s, err := server.NewServer(b.serverOptions())
	if err != nil {
		return nil, nil, fmt.Errorf("new server: %w", err)
	}
	s.SetLoggerV2(logger, false, false, false)
	if err := b.startWithin(ctx, s.Start); err != nil {
		return nil, nil, err
	}
	if err := ready(s, logger); err != nil {
		if stopErr := b.stop(s); stopErr != nil {
			return nil, nil, stopErr
		}
		// An error is no hang, so the marker goes; unless the store is refused so
		// often that it must be the store's fault.
		if b.refused++; b.refused%maxRefused != 0 {
			err = joinUnmark(err, b.dir.unmark())
		}
		return nil, nil, err
	}
	err = b.opts.hook("broker.after-start")
	if err == nil {
		err = b.dir.unmark()
	}
	if err != nil {
		if stopErr := b.stop(s); stopErr != nil {
			return nil, nil, stopErr
		}
		return nil, nil, err
	}
	return s, logger, nil
}

func joinUnmark(err, unmark error) error {
	if unmark == nil {
		return err
	}
	return fmt.Errorf("%w (and %w)", err, unmark)
}

// startWithin returns ErrStuck, and leaves the marker where it is, if start does
// not return in time: nothing can stop it then.
func (b *Broker) startWithin(ctx context.Context, start func()) error {
	started := make(chan struct{})
	go func() {
		start()
		close(started)
	}()
	timer := time.NewTimer(b.opts.StartTimeout)
	defer timer.Stop()
	select {
	case <-started:
		return nil
	case <-timer.C:
	case <-ctx.Done():
		// A stop during a long start waits for it, within the same limit, or the
		// marker would condemn a good store.
		select {
		case <-started:
			return nil
		case <-timer.C:
		}
	}
	return fmt.Errorf("%w: no start within %v; end the process, its next start moves %s away",
		ErrStuck, b.opts.StartTimeout, b.dir)
}

// ready returns why a server whose Start has returned is of no use.
func ready(s *server.Server, logger *serverLogger) error {
	if text := logger.fatalText(); text != "" {
		return fmt.Errorf("start server: %s", text)
	}
	if !s.JetStreamEnabled() {
		return fmt.Errorf("start server: JetStream is not enabled")
	}
	if !s.ReadyForConnections(time.Second) {
		return fmt.Errorf("start server: it accepts no connections")
	}
	return nil
}

func (b *Broker) stop(s *server.Server) error {
	stopped := make(chan struct{})
	go func() {
		s.Shutdown()
		s.WaitForShutdown()
		close(stopped)
	}()
	timer := time.NewTimer(b.opts.StopTimeout)
	defer timer.Stop()
	select {
	case <-stopped:
		return nil
	case <-timer.C:
		// A second server on the same store would ruin both.
		return fmt.Errorf("%w: no stop within %v; end the process", ErrStuck, b.opts.StopTimeout)
	}
}

// watch returns why the server must be started again, or nil when ctx ends.
func (b *Broker) watch(ctx context.Context, s *server.Server, logger *serverLogger) error {
	h := newHealth(b, s, logger)
	tick := time.NewTicker(b.opts.HealthInterval)
	defer tick.Stop()
	for {
		var why suspicion
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case why = <-b.suspects:
		}
		if err := h.check(ctx); err != nil {
			return err
		}
		if n := b.strikes.Load(); n >= maxStrikes {
			return fmt.Errorf("the server does not answer: %d appends timed out in a row (%s)", n, why.reason)
		}
	}
}

const maxStrikes = 2

// health decides whether a running server is well.
type health struct {
	b      *Broker
	server *server.Server
	logger *serverLogger
	dir    os.FileInfo
	// known are complaints that were there right after the start, about streams
	// that could not be recovered. A restart does not cure them, the relay's
	// rebuild does.
	known map[string]bool
}

func newHealth(b *Broker, s *server.Server, logger *serverLogger) *health {
	h := &health{b: b, server: s, logger: logger, known: map[string]bool{}}
	h.dir, _ = os.Stat(string(b.dir))
	for _, c := range h.complaints() {
		h.known[c] = true
		b.log.Warn("the server cannot read a stream; it will be rebuilt from the log", "reason", c)
	}
	return h
}

// check returns the first complaint that is still there at a second look, or
// that the server does not answer.
func (h *health) check(ctx context.Context) error {
	err := h.within(ctx)
	if err == nil || !sleep(ctx, h.b.opts.HealthInterval/4) {
		return nil
	}
	return h.within(ctx)
}

// within looks once, and does not wait longer for a server that hangs than for
// one that stops.
func (h *health) within(ctx context.Context) error {
	select {
	case h.b.rebuild <- struct{}{}:
	case <-ctx.Done():
		return nil
	}
	result := make(chan error, 1)
	go func() {
		defer func() { <-h.b.rebuild }()
		result <- h.once()
	}()
	timer := time.NewTimer(h.b.opts.StopTimeout)
	defer timer.Stop()
	select {
	case err := <-result:
		return err
	case <-timer.C:
		return fmt.Errorf("the health check hangs")
	}
}

func (h *health) once() error {
	if text := h.logger.fatalText(); text != "" {
		return fmt.Errorf("fatal server error: %s", text)
	}
	if !h.server.Running() {
		return fmt.Errorf("the server has stopped")
	}
	for _, c := range h.complaints() {
		if !h.known[c] {
			return fmt.Errorf("unhealthy: %s", c)
		}
	}
	return h.files()
}

func (h *health) complaints() []string {
	var found []string
	for _, e := range h.server.Healthz(&server.HealthzOptions{Details: true}).Errors {
		if strings.HasPrefix(e.Stream, ".") {
			continue // a deleted stream whose files are still being removed
		}
		found = append(found, e.Error)
	}
	return found
}

// files notices a store that was deleted under the server. The server itself
// does not: it goes on acknowledging into files without a name.
func (h *health) files() error {
	now, err := os.Stat(string(h.b.dir))
	if err != nil {
		return fmt.Errorf("the store directory is gone: %w", err)
	}
	if !os.SameFile(h.dir, now) {
		return fmt.Errorf("the store directory %s has been replaced", h.b.dir)
	}
	if !h.b.expected.Load() {
		return nil
	}
	if _, err := os.Stat(h.b.dir.messages(h.b.stream)); err != nil && h.b.expected.Load() {
		return fmt.Errorf("the stream's directory is gone: %w", err)
	}
	return nil
}
