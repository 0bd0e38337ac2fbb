package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"outlog/store"
)

// Start is where a consumer begins when it runs for the first time.
type Start struct {
	kind     startKind
	position int64
}

type startKind int

const (
	startUnset startKind = iota
	startBeginning
	startNow
	startAt
)

var (
	// Beginning starts with the oldest event the log holds.
	Beginning = Start{kind: startBeginning}
	// Now starts with the first event appended after the consumer first ran.
	Now = Start{kind: startNow}
)

// At starts with the first event after this position.
func At(position int64) Start { return Start{kind: startAt, position: position} }

// Options describes one consumer. Name, Start and Routes are required.
type Options struct {
	// Name identifies the consumer for ever: its cursor and inbox are kept
	// under it. 1 to 64 characters of a-z, 0-9, "-" and "_".
	Name string
	// Start is where it begins when it runs for the first time.
	Start Start
	// Routes says what to do with events, one route per type. Events of other
	// types are passed over.
	Routes []Route
	// BatchRows bounds the events per transaction, 1 to 4096. 0: 512.
	BatchRows int
	// BatchTime bounds how long a batch holds up other writers, 1 ms to 1 s.
	// 0: 10 ms. At least one event is always done.
	BatchTime time.Duration
	// MaxAttempts is how often a failing event is tried before it is dead, 1
	// to 1000. 0: 10.
	MaxAttempts int
	// BackoffMin and BackoffMax bound the delay before the next attempt; it
	// doubles from one to the other. 0: 100 ms and 5 min.
	BackoffMin, BackoffMax time.Duration
	// OnDead says what a dead event does to the later ones of its aggregate:
	// Block (default) makes them wait for a redrive or discard, Skip lets them
	// go on, out of order.
	OnDead OnDead
	// Concurrency is how many external effects (Do) run at once, 1 to 1024.
	// 0: 8.
	Concurrency int
	// HandlerTimeout ends the context of a Do handler, 1 ms to 24 h. 0: 30 s. An
	// Apply handler is only named in the log: ending it would end its batch.
	HandlerTimeout time.Duration
	// DrainTimeout is how long a stop waits for external effects, 1 ms to
	// 10 min. 0: 5 s.
	DrainTimeout time.Duration
	// Clear undoes exactly the effects of events at positions above after, in
	// the transaction that resets the consumer. nil: it cannot be reset to an
	// earlier position.
	Clear func(ctx context.Context, tx *store.Tx, after int64) error
	// ClearAll says that Clear can only undo everything: resets go to the
	// beginning or nowhere.
	ClearAll bool
	// Poll is the longest time without a look at the log, 10 ms to 1 min.
	// 0: 1 s. Wake-ups make it unnecessary; the guarantee does not rest on them.
	Poll time.Duration
	// Logger receives the consumer's messages. nil: none.
	Logger *slog.Logger
	// Failpoint, when set, is called at the named points of the consumer's
	// loop; an error fails the step. For tests only.
	Failpoint func(point string) error
}

// OnDead is what a dead event does to the later ones of its aggregate.
type OnDead int

const (
	Block OnDead = iota // they wait
	Skip                // they go on
)

func (d OnDead) String() string { return [...]string{"block", "skip"}[d] }

var (
	// ErrInvalidOption is returned for an option out of its range.
	ErrInvalidOption = errors.New("invalid option")
	// ErrNewTypes is returned at start when the consumer has routes for event
	// types that its last run did not have, so that events of those types may
	// lie behind its cursor; the caller should start another consumer or reset
	// this one.
	ErrNewTypes = errors.New("consumer has routes for new event types")
	// ErrPruned is returned when a start position lies below the oldest event
	// the log holds.
	ErrPruned = errors.New("position is below the prune horizon")
)

func invalid(field string, value any, rng string) error {
	return fmt.Errorf("%w: %s = %v, must be %s", ErrInvalidOption, field, value, rng)
}

func (o Options) withDefaults() (Options, error) {
	if o.Name == "" || len(o.Name) > 64 || o.Name == "relay" || !plainName(o.Name) {
		return o, invalid("Name", fmt.Sprintf("%q", o.Name), `1 to 64 of a-z, 0-9, "-" and "_", not "relay"`)
	}
	if o.Start.kind == startUnset || o.Start.position < 0 {
		return o, invalid("Start", o.Start.position, "Beginning, Now or At(position)")
	}
	if len(o.Routes) == 0 {
		return o, invalid("Routes", "none", "at least one")
	}
	seen := map[string]bool{}
	for _, r := range o.Routes {
		if r.eventType == "" || r.apply == nil && r.do == nil || seen[r.eventType] {
			return o, invalid("Routes", fmt.Sprintf("%q", r.eventType), "made by Apply or Do, one per type")
		}
		seen[r.eventType] = true
	}
	for _, f := range []struct {
		name          string
		value         *int
		def, low, top int
	}{
		{"BatchRows", &o.BatchRows, 512, 1, 4096},
		{"MaxAttempts", &o.MaxAttempts, 10, 1, 1000},
		{"Concurrency", &o.Concurrency, 8, 1, 1024},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < f.low || *f.value > f.top {
			return o, invalid(f.name, *f.value, fmt.Sprintf("%d to %d", f.low, f.top))
		}
	}
	for _, f := range []struct {
		name          string
		value         *time.Duration
		def, low, top time.Duration
	}{
		{"BatchTime", &o.BatchTime, 10 * time.Millisecond, time.Millisecond, time.Second},
		{"BackoffMin", &o.BackoffMin, 100 * time.Millisecond, time.Millisecond, time.Hour},
		{"BackoffMax", &o.BackoffMax, 5 * time.Minute, o.BackoffMin, 24 * time.Hour},
		{"HandlerTimeout", &o.HandlerTimeout, 30 * time.Second, time.Millisecond, 24 * time.Hour},
		{"DrainTimeout", &o.DrainTimeout, 5 * time.Second, time.Millisecond, 10 * time.Minute},
		{"Poll", &o.Poll, time.Second, 10 * time.Millisecond, time.Minute},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < f.low || *f.value > f.top {
			return o, invalid(f.name, *f.value, fmt.Sprintf("%v to %v", f.low, f.top))
		}
	}
	if o.OnDead != Block && o.OnDead != Skip {
		return o, invalid("OnDead", int(o.OnDead), "Block or Skip")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

func plainName(s string) bool {
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_' {
			return false
		}
	}
	return true
}
