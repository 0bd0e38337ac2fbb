package node

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"outlog/relay"
	"outlog/store"
)

// Options configures a Node. Dir or DB is required; the zero value of every
// other field is its default.
type Options struct {
	// Dir is the data directory: outlog.db and jetstream/ are in it. It is
	// created with mode 0700.
	Dir string
	// DB is a database file instead, for example one that your application has
	// already; the stream is then kept in DB + ".jetstream". Its directory must
	// exist.
	DB string
	// Standby waits for another owner of the database to end, instead of
	// failing.
	Standby bool
	// Synchronous is "FULL" (default: a committed Update survives power loss)
	// or "NORMAL" (power loss may take the last commits).
	Synchronous string
	// Migrations are your own tables' schema changes, run at Open.
	Migrations []store.Migrations
	// NoBroker runs without stream and relay: consumers follow the log by
	// themselves. For tests and for programs that nobody subscribes to.
	NoBroker bool
	// StreamMaxAge is how long the stream keeps messages, from 1 s. 0: 7 days.
	StreamMaxAge time.Duration
	// StreamMaxBytes is the size above which the stream drops its oldest
	// messages, from 1 MiB. 0: 1 GiB.
	StreamMaxBytes int64
	// Relay tunes the relay: windows, polling, attempts, what a dead event does.
	// Stream, MaxAge, DrainTimeout, Logger and Failpoint are the node's own.
	Relay relay.Options
	// DrainTimeout bounds each step of an orderly stop, 1 ms to 10 min. 0: 5 s.
	DrainTimeout time.Duration
	// Logger receives all messages. nil: none.
	Logger *slog.Logger
	// Now is the clock for timestamps. nil: time.Now.
	Now func() time.Time
	// Failpoint, when set, is called at the named points of all write paths.
	// For tests only.
	Failpoint func(point string) error
}

// ErrInvalidOption is returned for an option out of its range.
var ErrInvalidOption = errors.New("invalid option")

const defaultStreamMaxAge = 7 * 24 * time.Hour

func (o Options) withDefaults() (Options, error) {
	if (o.Dir == "") == (o.DB == "") {
		return o, fmt.Errorf("%w: exactly one of Dir and DB must be given", ErrInvalidOption)
	}
	if o.StreamMaxAge == 0 {
		o.StreamMaxAge = defaultStreamMaxAge
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = 5 * time.Second
	}
	if o.DrainTimeout < time.Millisecond || o.DrainTimeout > 10*time.Minute {
		return o, fmt.Errorf("%w: DrainTimeout = %v, must be 1ms to 10m", ErrInvalidOption, o.DrainTimeout)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// DatabasePath is the database file of a data directory.
func DatabasePath(dir string) string { return filepath.Join(dir, "outlog.db") }

// paths returns the database file and the stream's directory.
func (o Options) paths() (db, stream string) {
	if o.DB != "" {
		return o.DB, o.DB + ".jetstream"
	}
	return DatabasePath(o.Dir), filepath.Join(o.Dir, "jetstream")
}
