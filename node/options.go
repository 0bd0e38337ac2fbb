package node

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"outlog/internal/archive"
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
	// Retention is how long an event stays in the log at least, from 1 min.
	// 0: for ever. What a consumer has not read, what is parked and what is not
	// published stays longer.
	Retention time.Duration
	// RetentionBytes is the size of the log (payloads, headers, and 256 bytes for
	// each event) above which the oldest events go, whatever their age, from 1 MiB.
	// 0: no limit. The same stays.
	RetentionBytes int64
	// Archive is a directory to which events are written before they are
	// pruned. Empty: they are not.
	Archive string
	// ArchiveFormat is "ndjson" (NDJSON compressed with zstd) or "parquet".
	// Empty: ndjson.
	ArchiveFormat string
	// InboxWindow is for how many positions below its cursor a consumer keeps
	// inbox rows, from 1000. 0: 1000000. -1: all of them. They prove a second time
	// what the cursor proves.
	InboxWindow int64
	// HistoryAge is how long failed attempts are remembered, from 1 h. 0: 2160 h.
	// -1: for ever.
	HistoryAge time.Duration
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
	if err := o.retentionDefaults(); err != nil {
		return o, err
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

func (o *Options) retentionDefaults() error {
	if o.InboxWindow == 0 {
		o.InboxWindow = 1_000_000
	}
	if o.HistoryAge == 0 {
		o.HistoryAge = 90 * 24 * time.Hour
	}
	if o.ArchiveFormat == "" {
		o.ArchiveFormat = string(archive.NDJSON)
	}
	switch {
	case o.Retention != 0 && o.Retention < time.Minute:
		return fmt.Errorf("%w: Retention = %v, must be from 1m, or 0 for ever", ErrInvalidOption, o.Retention)
	case o.RetentionBytes != 0 && o.RetentionBytes < 1<<20:
		return fmt.Errorf("%w: RetentionBytes = %d, must be from 1 MiB, or 0 for no limit", ErrInvalidOption, o.RetentionBytes)
	case o.InboxWindow != -1 && o.InboxWindow < 1000:
		return fmt.Errorf("%w: InboxWindow = %d, must be from 1000, or -1 for all", ErrInvalidOption, o.InboxWindow)
	case o.HistoryAge != -1 && o.HistoryAge < time.Hour:
		return fmt.Errorf("%w: HistoryAge = %v, must be from 1h, or -1 for ever", ErrInvalidOption, o.HistoryAge)
	case o.ArchiveFormat != string(archive.NDJSON) && o.ArchiveFormat != string(archive.Parquet):
		return fmt.Errorf("%w: ArchiveFormat = %q, must be ndjson or parquet", ErrInvalidOption, o.ArchiveFormat)
	}
	return nil
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
