package relay

import (
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Options configures a Relay. The zero value of each field is its default.
type Options struct {
	// Stream is the stream's name, kept with the cursor for people to read.
	Stream string
	// WindowRows bounds the messages published before their acknowledgements
	// are awaited, 1 to 8192. 0: 512.
	WindowRows int
	// WindowBytes bounds their payloads, 1 KiB to 64 MiB. 0: 4 MiB.
	WindowBytes int
	// Poll is the longest time without a look at the log, 10 ms to 1 min.
	// 0: 1 s. Wake-ups make it unnecessary; the guarantee does not rest on them.
	Poll time.Duration
	// BackoffMax bounds the delay between tries while the broker is
	// unavailable, 1 ms to 10 min. 0: 5 s.
	BackoffMax time.Duration
	// DrainTimeout bounds the publishing of the rest of the log after the
	// context of Run has ended, up to 10 min. 0: 5 s.
	DrainTimeout time.Duration
	// MaxAttempts is how often the broker may refuse an event before it is dead,
	// 1 to 1000. 0: 10. Outages count nothing.
	MaxAttempts int
	// RetryMin and RetryMax bound the delay before a refused event is tried
	// again: anything up to a bound that doubles from one to the other with each
	// attempt. 1 ms to 24 h. 0: 1 s and 5 min.
	RetryMin, RetryMax time.Duration
	// OnDead says what a dead event does to the later ones of its aggregate:
	// Block (default) makes them wait for a redrive or discard, Skip lets them
	// go on, out of order.
	OnDead OnDead
	// MaxAge is how long the stream keeps messages; a rebuilt stream starts
	// with the first event younger than that. 0: for ever.
	MaxAge time.Duration
	// External says that the stream lives on a server that is not ours alone. A
	// missing or empty stream is still made anew, and a lost tail published
	// again, but a stream that holds messages is never deleted: where that would
	// be needed, the relay is held up by a *ForeignStreamError until a person has
	// decided. Default: off, the stream is the relay's to delete.
	External bool
	// Logger receives the relay's messages. nil: none.
	Logger *slog.Logger
	// Failpoint, when set, is called at the named points of the loop; an error
	// fails the step. For tests only.
	Failpoint func(point string) error
}

// OnDead is what a dead event does to the later ones of its aggregate.
type OnDead int

const (
	Block OnDead = iota // they wait
	Skip                // they go on
)

// ErrInvalidOption is returned for an option out of its range.
var ErrInvalidOption = errors.New("invalid option")

func (o Options) withDefaults() (Options, error) {
	ints := []struct {
		name          string
		value         *int
		def, low, top int
	}{
		{"WindowRows", &o.WindowRows, 512, 1, 8192},
		{"WindowBytes", &o.WindowBytes, 4 << 20, 1 << 10, 64 << 20},
		{"MaxAttempts", &o.MaxAttempts, 10, 1, 1000},
	}
	for _, f := range ints {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < f.low || *f.value > f.top {
			return o, fmt.Errorf("%w: %s = %d, must be %d to %d", ErrInvalidOption, f.name, *f.value, f.low, f.top)
		}
	}
	durations := []struct {
		name          string
		value         *time.Duration
		def, low, top time.Duration
	}{
		{"Poll", &o.Poll, time.Second, 10 * time.Millisecond, time.Minute},
		{"BackoffMax", &o.BackoffMax, 5 * time.Second, time.Millisecond, 10 * time.Minute},
		{"DrainTimeout", &o.DrainTimeout, 5 * time.Second, time.Millisecond, 10 * time.Minute},
		{"RetryMin", &o.RetryMin, time.Second, time.Millisecond, 24 * time.Hour},
		{"RetryMax", &o.RetryMax, max(5*time.Minute, o.RetryMin), time.Millisecond, 24 * time.Hour},
	}
	for _, f := range durations {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < f.low || *f.value > f.top {
			return o, fmt.Errorf("%w: %s = %v, must be %v to %v", ErrInvalidOption, f.name, *f.value, f.low, f.top)
		}
	}
	if o.RetryMax < o.RetryMin {
		return o, fmt.Errorf("%w: RetryMax = %v, must be at least RetryMin, %v", ErrInvalidOption, o.RetryMax, o.RetryMin)
	}
	if o.OnDead != Block && o.OnDead != Skip {
		return o, fmt.Errorf("%w: OnDead = %d, must be Block or Skip", ErrInvalidOption, o.OnDead)
	}
	if o.MaxAge < 0 {
		return o, fmt.Errorf("%w: MaxAge = %v, must not be negative", ErrInvalidOption, o.MaxAge)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}
