package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"modernc.org/sqlite"
)

// DB is an open database: one group-commit writer and a pool of readers.
type DB struct {
	opts   Options
	log    *slog.Logger
	file   os.FileInfo // that was opened
	writer *writer
	wpool  *sql.DB // the writer's pool of one
	reader *sql.DB
	signal *signal
	ids    *idSource
	checks []Check

	durableMu   sync.Mutex
	durableFrom int64 // see Durable
	durableTo   int64
}

// Open opens or creates the database, brings its schema up to date (after a
// copy of the file is made beside it, when it existed) and reads every setting
// back. It starts no goroutine; Run does.
//
// Errors: ErrInvalidOption, ErrMissing, ErrForeign, ErrNewer, ErrPragma, or
// SQLite's.
func Open(ctx context.Context, o Options) (*DB, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	switchProcess()

	if err := o.prepareFile(ctx); err != nil {
		return nil, err
	}
	file, err := os.Stat(o.Path)
	if err != nil {
		return nil, err
	}
	db := &DB{opts: o, log: o.Logger, file: file, signal: newSignal(), ids: newIDSource(o.Now)}
	db.wpool = openPool(o, roleWriter, 1)
	db.reader = openPool(o, roleReader, o.Readers)
	conn, err := db.wpool.Conn(ctx)
	if err == nil {
		db.writer = &writer{db: db, conn: conn, drained: make(chan struct{}), counts: newCounts()}
		err = db.reader.PingContext(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", o.Path, err), db.reader.Close(), db.wpool.Close())
	}
	db.checks = []Check{integrityCheck}
	return db, nil
}

// prepareFile leaves a database file with the schema that this program knows.
func (o Options) prepareFile(ctx context.Context) error {
	o.MustExist = o.MustExist || o.NoMigrate
	existed, err := checkFile(o)
	switch {
	case err != nil:
		return err
	case !o.NoMigrate:
		return migrate(ctx, o, existed)
	}
	// Looked at before the writer sets WAL mode on a file that may not be ours.
	db := openPool(o, roleReader, 1)
	return errors.Join(checkVersion(ctx, db, o, true), db.Close())
}

// OpenReader opens an existing database for reading only, beside a running
// owner or without one: no migration, no writer, no lock. Update fails on it.
func OpenReader(ctx context.Context, path string, migrations ...Migrations) (*DB, error) {
	o, err := Options{Path: path, MustExist: true, Migrations: migrations}.withDefaults()
	if err != nil {
		return nil, err
	}
	switchProcess()
	if _, err := checkFile(o); err != nil {
		return nil, err
	}
	db := &DB{opts: o, log: o.Logger, signal: newSignal(), reader: openPool(o, roleReader, 2)}
	db.writer = &writer{db: db, closed: true, drained: make(chan struct{}), counts: newCounts()}
	if err := checkVersion(ctx, db.reader, o, true); err != nil {
		return nil, errors.Join(err, db.reader.Close())
	}
	db.checks = []Check{integrityCheck}
	return db, nil
}

// checkFile reports whether the database file exists, and creates it with mode
// 0600 if it may.
func checkFile(o Options) (existed bool, err error) {
	st, err := os.Stat(o.Path)
	switch {
	case err == nil && st.IsDir():
		return true, fmt.Errorf("%w: %s is a directory", ErrForeign, o.Path)
	case err == nil:
		return st.Size() > 0, nil
	case !errors.Is(err, fs.ErrNotExist):
		return false, err
	case o.MustExist:
		return false, fmt.Errorf("%w: %s", ErrMissing, o.Path)
	}
	f, err := os.OpenFile(o.Path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return false, err
	}
	return false, f.Close()
}

// switchProcess sets what is one setting per process in the SQLite library.
// Where the system has neither, nothing is lost.
//
//   - Open-file-description locks: with POSIX locks, any close of the file
//     elsewhere in the process would drop SQLite's.
//   - fdatasync instead of fsync: as durable, without forcing the file's
//     timestamps, and with them the file system's journal, to the disk at every
//     commit.
func switchProcess() {
	_, _ = sqlite.OFDLocking(true)
	_, _ = sqlite.Fdatasync(true)
}

// openPool makes a pool whose connections are configured for their role.
func openPool(o Options, r role, size int) *sql.DB {
	p := sql.OpenDB(&connector{Connector: mustConnector(dsn(o.Path)), role: r, pragma: o.pragmas(r)})
	p.SetMaxOpenConns(size)
	p.SetMaxIdleConns(size)
	return p
}

func mustConnector(dsn string) driver.Connector {
	c, err := sqlite.NewConnector(dsn)
	if err != nil { // only for a DSN that does not parse, and dsn escapes the path
		panic(err)
	}
	return c
}

// dsn names the file as a URI, so that no character of the path is special.
func dsn(path string) string {
	p := filepath.ToSlash(path)
	if filepath.IsAbs(path) && !strings.HasPrefix(p, "/") {
		p = "/" + p // C:/…
	}
	return "file:" + (&url.URL{Path: p}).EscapedPath()
}

// pragmas lists the settings of a connection in the order they must be applied.
func (o Options) pragmas(r role) []pragma {
	sync := map[string]string{"FULL": "2", "NORMAL": "1"}[o.Synchronous]
	cache := o.CacheMiB * 1024
	if r == roleReader {
		cache /= 8
	}
	ms := strconv.FormatInt(o.BusyTimeout.Milliseconds(), 10)
	kib := strconv.Itoa(-cache)
	ps := []pragma{{"busy_timeout", ms, ms}}
	if r == roleReader {
		ps = append(ps, pragma{"query_only", "1", "1"})
	} else {
		ps = append(ps, pragma{"journal_mode", "WAL", "wal"})
	}
	ps = append(ps,
		pragma{"synchronous", sync, sync},
		pragma{"foreign_keys", "1", "1"},
		pragma{"cache_size", kib, kib},
		pragma{"journal_size_limit", "67108864", "67108864"},
		pragma{"recursive_triggers", "0", "0"},
	)
	if runtime.GOOS == "darwin" { // there, fsync alone does not reach the disk
		ps = append(ps, pragma{"fullfsync", "1", "1"}, pragma{"checkpoint_fullfsync", "1", "1"})
	}
	return ps
}

// Reader returns the pool of read-only connections. Long reads keep the WAL
// from being reset: read in pages.
func (db *DB) Reader() *sql.DB { return db.reader }

// Scan runs a query on a reader and calls row with the driver's values of each
// row, until row returns false. The values are row's to keep, the slice is not.
// It is for hot paths: database/sql's Rows.Scan costs three times as much. ctx
// bounds the wait for a connection; the query is not cancelled.
func (db *DB) Scan(ctx context.Context, query string, args []any, row func([]driver.Value) bool) error {
	c, err := db.reader.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Raw(func(dc any) error { return dc.(*conn).scan(query, args, row) })
}

// Path returns the database file's name.
func (db *DB) Path() string { return db.opts.Path }

// Logger returns the store's logger.
func (db *DB) Logger() *slog.Logger { return db.log }

// Now returns the store's time in UTC, in whole microseconds as it is stored.
func (db *DB) Now() time.Time { return db.now() }

func (db *DB) now() time.Time { return db.opts.Now().UTC().Truncate(time.Microsecond) }

// NewID returns a new ULID, greater than every one returned before.
func (db *DB) NewID() string { return db.ids.next() }

// hook calls the failpoint hook, if there is one.
func (db *DB) hook(point string) error { return db.opts.hook(point) }

func (o Options) hook(point string) error {
	if o.Failpoint == nil {
		return nil
	}
	return o.Failpoint(point)
}

// Close waits for running Update calls, refuses further ones, and closes the
// database.
func (db *DB) Close() error {
	var errs []error
	if db.wpool != nil {
		errs = append(errs, db.writer.close(), db.wpool.Close())
	}
	return errors.Join(append(errs, db.reader.Close())...)
}
