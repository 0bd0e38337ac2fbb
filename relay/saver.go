package relay

import (
	"context"
	"errors"
	"sync"
	"time"
)

// saver writes the cursor behind the relay's back, so that publishing does not
// wait for the disk. What it has not yet written is not lost in a crash: the
// stream is then ahead of the cursor by rows of the log, and reconcile moves
// the cursor forward.
type saver struct {
	relay *Relay
	work  chan struct{} // capacity 1: there is something to write

	mu      sync.Mutex
	cursor  Cursor
	pubs    []publication
	dirty   bool          // cursor and pubs are to be written
	idle    chan struct{} // closed when nothing is left to write; replaced by add
	fenced  error
	pending bool
}

// maxUnsaved bounds the windows published and not yet written, and with them
// what reconcile has to read after a crash.
const maxUnsaved = 16

// saveEvery is how long the saver gathers before it writes: under a steady
// trickle of events it would otherwise commit for each of them, and take the
// writer from those who append.
const saveEvery = 5 * time.Millisecond

func newSaver(r *Relay) *saver {
	s := &saver{relay: r, work: make(chan struct{}, 1), idle: make(chan struct{})}
	close(s.idle)
	return s
}

// add hands over the cursor and what was published before it. It waits when too
// much is unwritten.
func (s *saver) add(ctx context.Context, c Cursor, pubs []publication) {
	s.mu.Lock()
	s.cursor, s.dirty = c, true
	for _, p := range pubs {
		s.pubs = appendPublication(s.pubs, p)
	}
	if !s.pending {
		s.pending, s.idle = true, make(chan struct{})
	}
	span := uint64(0)
	if len(s.pubs) > 0 {
		span = s.cursor.StreamSeq - s.pubs[0].firstSeq
	}
	s.mu.Unlock()
	select {
	case s.work <- struct{}{}:
	default:
	}
	if span > uint64(maxUnsaved*s.relay.opts.WindowRows) {
		_ = s.flush(ctx)
	}
}

// flush waits until everything handed over is written.
func (s *saver) flush(ctx context.Context) error {
	s.mu.Lock()
	idle := s.idle
	s.mu.Unlock()
	select {
	case <-idle:
		return s.err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// err returns ErrFenced once a write has found another owner's token.
func (s *saver) err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fenced
}

// run writes until ctx ends.
func (s *saver) run(ctx context.Context) {
	for failures := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-s.work:
			s.relay.wait(ctx, saveEvery)
		}
		if err := s.write(ctx); err != nil && !errors.Is(err, ErrFenced) {
			if failures++; failures == 1 {
				s.relay.opts.Logger.Warn("cursor not stored, trying again", "error", err)
			}
			s.relay.wait(ctx, backoff(failures, time.Second, func(n int64) int64 { return n / 2 }))
			select {
			case s.work <- struct{}{}:
			default:
			}
			continue
		}
		failures = 0
	}
}

func (s *saver) write(ctx context.Context) error {
	s.mu.Lock()
	c, pubs, dirty := s.cursor, s.pubs, s.dirty
	s.pubs, s.dirty = nil, false
	s.mu.Unlock()
	if !dirty {
		return nil
	}
	err := s.relay.hook("relay.before-cursor")
	if err == nil {
		err = s.relay.store(ctx, c, addPublications(pubs))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case errors.Is(err, ErrFenced):
		s.fenced = err
		fallthrough
	case err == nil:
		if s.pending && (!s.dirty || s.fenced != nil) { // a fenced one may be told twice
			s.pending = false
			close(s.idle)
		}
	default:
		s.pubs, s.dirty = append(pubs, s.pubs...), true
	}
	return err
}
