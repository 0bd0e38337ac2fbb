package broker

import (
	"fmt"
	"log/slog"
	"regexp"
	"time"
)

// Options configure a Broker. The zero value of every field but Dir and LogID
// is its default.
type Options struct {
	// Dir is the store directory, made with mode 0700. It belongs to the broker
	// alone, and to one process: the caller holds the lock that says so, because
	// the server takes none. Required.
	Dir string
	// LogID is the id of the log that is published: 1 to 64 letters, digits, '-'
	// and '_'. The stream is named after it, so that another log's messages can
	// never be taken for ours. Required.
	LogID string
	// MaxAge is how long the stream keeps a message. From 1 s. Default 7 days.
	// -1: for ever.
	MaxAge time.Duration
	// MaxBytes is the size above which the stream drops its oldest messages.
	// From 1 MiB. Default 1 GiB. -1: no limit.
	MaxBytes int64
	// MaxMessage is the largest message, headers included, in bytes. 64 KiB to
	// 64 MiB. Default 2 MiB. Headers alone may take up to 64 KiB of it.
	MaxMessage int
	// AckWait is how long a consumer may keep a delivery before it is delivered
	// again. From 100 ms. Default 30 s.
	AckWait time.Duration
	// PublishTimeout is how long an acknowledgement, or an answer of the
	// server's API, is waited for. 10 ms to 5 min. Default 5 s.
	PublishTimeout time.Duration
	// StartTimeout is how long a start of the server may take. Reading the store
	// back takes about a second per GB on an SSD. From 100 ms. Default 1 min.
	StartTimeout time.Duration
	// StopTimeout is how long the server may take to stop. From 100 ms.
	// Default 10 s.
	StopTimeout time.Duration
	// HealthInterval is the time between two looks at the server's health.
	// 10 ms to 1 min. Default 1 s.
	HealthInterval time.Duration
	// BackoffMin and BackoffMax bound the pause before the server is started
	// again after a failure: exponential with full jitter. From 1 ms. Defaults
	// 100 ms and 10 s.
	BackoffMin, BackoffMax time.Duration
	// Logger receives the server's log. Default: discard.
	Logger *slog.Logger
	// Failpoint, when set, is called at the named points of a start; an error
	// fails the start. For tests only.
	Failpoint func(point string) error
}

func (o Options) hook(point string) error {
	if o.Failpoint == nil {
		return nil
	}
	return o.Failpoint(point)
}

var logIDForm = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.MaxAge, 7*24*time.Hour)
	def(&o.AckWait, 30*time.Second)
	def(&o.PublishTimeout, 5*time.Second)
	def(&o.StartTimeout, time.Minute)
	def(&o.StopTimeout, 10*time.Second)
	def(&o.HealthInterval, time.Second)
	def(&o.BackoffMin, 100*time.Millisecond)
	def(&o.BackoffMax, max(10*time.Second, o.BackoffMin))
	if o.MaxBytes == 0 {
		o.MaxBytes = 1 << 30
	}
	if o.MaxMessage == 0 {
		o.MaxMessage = 2 << 20
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

func (o Options) validate() error {
	bad := func(field string, value any, want string) error {
		return fmt.Errorf("%w: %s is %v, want %s", ErrInvalidOption, field, value, want)
	}
	if o.Dir == "" {
		return bad("Dir", `""`, "a directory")
	}
	if !logIDForm.MatchString(o.LogID) {
		return bad("LogID", fmt.Sprintf("%q", o.LogID), "1 to 64 letters, digits, '-' and '_'")
	}
	if o.MaxAge != -1 && o.MaxAge < time.Second {
		return bad("MaxAge", o.MaxAge, "at least 1s, or -1")
	}
	if o.MaxBytes != -1 && o.MaxBytes < 1<<20 {
		return bad("MaxBytes", o.MaxBytes, "at least 1048576, or -1")
	}
	if o.MaxMessage < 64<<10 || o.MaxMessage > 64<<20 {
		return bad("MaxMessage", o.MaxMessage, "65536 to 67108864")
	}
	if o.BackoffMax < o.BackoffMin {
		return bad("BackoffMax", o.BackoffMax, "at least BackoffMin, "+o.BackoffMin.String())
	}
	const forever = 1<<63 - 1
	for _, d := range []struct {
		field           string
		value, from, to time.Duration
	}{
		{"AckWait", o.AckWait, 100 * time.Millisecond, forever},
		{"PublishTimeout", o.PublishTimeout, 10 * time.Millisecond, 5 * time.Minute},
		{"StartTimeout", o.StartTimeout, 100 * time.Millisecond, forever},
		{"StopTimeout", o.StopTimeout, 100 * time.Millisecond, forever},
		{"HealthInterval", o.HealthInterval, 10 * time.Millisecond, time.Minute},
		{"BackoffMin", o.BackoffMin, time.Millisecond, forever},
	} {
		switch {
		case d.value < d.from:
			return bad(d.field, d.value, "at least "+d.from.String())
		case d.value > d.to:
			return bad(d.field, d.value, "at most "+d.to.String())
		}
	}
	return nil
}
