package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"time"

	"outlog/node"
)

const (
	// backWithin is how long the service may take to accept orders after a fault.
	backWithin = 30 * time.Second
	// rssLimit is how much memory it may have at any time.
	rssLimit = 512 << 20
)

// torment hurts a service under load.
type torment struct {
	seed       uint64
	dir        string
	copies     string // directory for what is to be put back
	server     *child
	load       *tortureLoad
	log        *slog.Logger
	memory     *memoryWatch
	disk       fullDisk
	impossible []string // kinds of faults left out, and why

	counts     map[string]int // faults done, by kind
	recoveries []time.Duration
	restores   []restore
	lastCopy   *restore // of the database, "database.db" in copies
}

func newTorment(seed uint64, dir, copies string, log *slog.Logger) *torment {
	server := newChild(dir)
	t := &torment{seed: seed, dir: dir, copies: copies, server: server, log: log, counts: map[string]int{},
		load: &tortureLoad{client: newClient(server), seed: seed}, memory: &memoryWatch{}}
	for _, k := range faultKinds {
		t.counts[k.name] = 0
		if k.impossible == nil {
			continue
		}
		if err := k.impossible(); err != nil {
			t.impossible = append(t.impossible, fmt.Sprintf("%s: %v", k.name, err))
		}
	}
	return t
}

func (t *torment) stream() string   { return filepath.Join(t.dir, "jetstream") }
func (t *torment) database() string { return node.DatabasePath(t.dir) }

// run injects faults under load for so long, and ends with a last kill, so that
// the service has looked at everything before it is judged.
func (t *torment) run(ctx context.Context, long time.Duration, bar progress) error {
	defer bar.finish()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer t.disk.release(t)
	go func() {
		select {
		case err := <-t.server.crashed:
			cancel(err)
		case <-ctx.Done():
		}
	}()
	go t.memory.watch(ctx, t.server, cancel)
	stop, loaded := make(chan struct{}), make(chan error, 1)
	go func() {
		err := t.load.run(ctx, stop)
		if err != nil {
			cancel(err)
		}
		loaded <- err
	}()
	err := t.hurt(ctx, long, bar)
	if err != nil {
		cancel(err)
	}
	close(stop)
	return errors.Join(context.Cause(ctx), ignore(<-loaded, context.Cause(ctx)))
}

// ignore is err, unless it says the same as known.
func ignore(err, known error) error {
	if known != nil && errors.Is(err, known) {
		return nil
	}
	return err
}

// hurt injects fault after fault.
func (t *torment) hurt(ctx context.Context, long time.Duration, bar progress) error {
	began, shown := time.Now(), 0
	s := newSchedule(t.seed)
	for {
		for ; shown < int(min(time.Since(began), long)/time.Second); shown++ {
			bar.add()
		}
		step := s.next()
		if time.Since(began)+step.pause > long {
			return t.inject(ctx, step.last())
		}
		if !pause(ctx, step.pause) {
			return context.Cause(ctx)
		}
		if err := t.inject(ctx, step); err != nil {
			return err
		}
	}
}

// inject does one fault and waits until orders are accepted again.
func (t *torment) inject(ctx context.Context, s step) error {
	if s.kind.impossible != nil && s.kind.impossible() != nil {
		return nil
	}
	t.log.Info("fault", "kind", s.kind.name, "step", s.number)
	if err := s.kind.do(t, ctx, s.random); err != nil {
		return fmt.Errorf("step %d, %s: %w", s.number, s.kind.name, err)
	}
	t.counts[s.kind.name]++
	took, err := t.awaitOrder(ctx)
	if err != nil {
		return fmt.Errorf("after step %d, %s: %w", s.number, s.kind.name, err)
	}
	t.recoveries = append(t.recoveries, took)
	t.log.Info("orders are accepted", "after", took, "accepted", t.load.accepted.Load())
	return nil
}

// awaitOrder waits until one more order is accepted.
func (t *torment) awaitOrder(ctx context.Context) (time.Duration, error) {
	began, before := time.Now(), t.load.accepted.Load()
	for t.load.accepted.Load() == before {
		if time.Since(began) > backWithin {
			return 0, errors.Join(fmt.Errorf("no order was accepted for %v", backWithin), t.server.trouble())
		}
		if !pause(ctx, time.Millisecond) {
			return 0, context.Cause(ctx)
		}
	}
	return time.Since(began), nil
}

// pause reports whether it lasted so long.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// schedule is a sequence of faults that depends on nothing but the seed.
type schedule struct {
	seed   uint64
	random *rand.Rand
	number int
	deck   []faultKind
}

// step is one fault of a schedule. Its random decides on details.
type step struct {
	number int
	kind   faultKind
	pause  time.Duration // before it
	random *rand.Rand
}

func newSchedule(seed uint64) *schedule {
	return &schedule{seed: seed, random: rand.New(rand.NewPCG(seed, 1<<62))}
}

// next deals the kinds like cards: each comes once before any comes again.
func (s *schedule) next() step {
	if len(s.deck) == 0 {
		s.deck = append(s.deck, faultKinds...)
		s.random.Shuffle(len(s.deck), func(i, j int) { s.deck[i], s.deck[j] = s.deck[j], s.deck[i] })
	}
	kind := s.deck[0]
	s.deck = s.deck[1:]
	s.number++
	return step{s.number, kind, time.Duration(s.random.Int64N(int64(800 * time.Millisecond))),
		rand.New(rand.NewPCG(s.seed, 1<<61+uint64(s.number)))}
}

// last turns a step into the kill that ends a schedule.
func (s step) last() step {
	s.kind = faultKinds[0]
	return s
}
