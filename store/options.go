package store

import (
	"log/slog"
	"time"
)

// Options configures a DB. The zero value of each field is its default.
type Options struct {
	// Path is the database file. Required. Its directory must exist.
	Path string
	// MustExist refuses to create the file (ErrMissing). Default: create it.
	MustExist bool
	// NoMigrate opens a database of exactly this program's version for writing,
	// without the owner's part: nothing is created or migrated (ErrMissing,
	// ErrNewer, ErrForeign). For commands beside a running owner. Migrations
	// then only names the sets whose versions are compared.
	NoMigrate bool
	// Synchronous is "FULL" (default: a committed Update survives power loss)
	// or "NORMAL" (it survives a killed process; power loss may take the last
	// commits, never tear them).
	Synchronous string
	// Readers is the size of the reader pool, 1 to 64. 0: 4.
	Readers int
	// CacheMiB is the page cache of the writer, 1 to 4096 MiB. 0: 64. Readers
	// have an eighth of it each.
	CacheMiB int
	// BusyTimeout is how long a write waits for other processes, 1 ms to
	// 10 min. 0: 5 s.
	BusyTimeout time.Duration
	// Migrations are the application's own tables; the core's come first.
	Migrations []Migrations
	// Logger receives the store's messages. nil: none.
	Logger *slog.Logger
	// Now is the clock for timestamps. nil: time.Now.
	Now func() time.Time
	// Failpoint, when set, is called at the named points of the write path; an
	// error fails the step. For tests only.
	Failpoint func(point string) error
}

func (o Options) withDefaults() (Options, error) {
	if o.Path == "" {
		return o, invalid("Path", `""`, "a file name")
	}
	if o.Synchronous == "" {
		o.Synchronous = "FULL"
	}
	if o.Synchronous != "FULL" && o.Synchronous != "NORMAL" {
		return o, invalid("Synchronous", o.Synchronous, "FULL or NORMAL")
	}
	if o.Readers == 0 {
		o.Readers = 4
	}
	if o.Readers < 1 || o.Readers > 64 {
		return o, invalid("Readers", o.Readers, "1 to 64")
	}
	if o.CacheMiB == 0 {
		o.CacheMiB = 64
	}
	if o.CacheMiB < 1 || o.CacheMiB > 4096 {
		return o, invalid("CacheMiB", o.CacheMiB, "1 to 4096")
	}
	if o.BusyTimeout == 0 {
		o.BusyTimeout = 5 * time.Second
	}
	if o.BusyTimeout < time.Millisecond || o.BusyTimeout > 10*time.Minute {
		return o, invalid("BusyTimeout", o.BusyTimeout, "1ms to 10m")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return o, nil
}
