package store

import (
	"errors"
	"fmt"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

var (
	// ErrClosed is returned when the store is closed or closing.
	ErrClosed = errors.New("store is closed")
	// ErrTxDone is returned when a Tx, or rows read through it, is used after
	// the callback that it was given to has returned.
	ErrTxDone = errors.New("transaction is over: a Tx is valid only inside its Update callback")
	// ErrTxAborted is returned when SQLite has rolled the whole transaction
	// back after an earlier error (interrupt, OR ROLLBACK, disk full, I/O
	// error); the caller should return, the other callbacks of the group run
	// again.
	ErrTxAborted = errors.New("transaction was rolled back by an earlier error")
	// ErrNested is returned when Update is called from inside an Update
	// callback, of this store or of another one; use the Tx at hand.
	ErrNested = errors.New("Update called inside an Update callback")
	// ErrForeignKey is returned when a callback leaves a deferred foreign key
	// violated.
	ErrForeignKey = errors.New("deferred foreign key violated")
	// ErrNewer is returned when the database was written by a newer version;
	// the caller should run that version.
	ErrNewer = errors.New("database is newer than this program")
	// ErrForeign is returned when the file is a database of something else,
	// for example with a table named outbox that is not ours.
	ErrForeign = errors.New("not an outlog database")
	// ErrMissing is returned when the database file does not exist and the
	// caller did not ask for one to be created.
	ErrMissing = errors.New("no database here")
	// ErrReplaced is returned when the database file was removed or replaced
	// while it was open; the caller must end the process and look for the file.
	ErrReplaced = errors.New("the database file was removed or replaced")
	// ErrPragma is returned when SQLite did not accept a setting.
	ErrPragma = errors.New("setting refused by SQLite")
	// ErrInvalidOption is returned for an option out of its range.
	ErrInvalidOption = errors.New("invalid option")
	// ErrUnavailable is what IsUnavailable recognises, for callers that wrap
	// their own trouble as the database's.
	ErrUnavailable = errors.New("database unavailable")
)

// Code returns the extended SQLite result code of err, 0 if it has none.
func Code(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code()
	}
	return 0
}

// IsUnavailable reports whether err is the database's trouble and not the
// caller's: busy, full, I/O error, out of memory, read-only or interrupted.
// Such an error says nothing about the work that met it; try again later.
// SQLITE_LOCKED is the caller's: without a shared cache, its own open rows
// are in the way.
func IsUnavailable(err error) bool {
	switch Code(err) & 0xff {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR,
		sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN,
		sqlite3.SQLITE_PROTOCOL:
		return true
	}
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrClosed) || errors.Is(err, ErrReplaced)
}

// IsFull reports whether err says that the disk, or the database's page limit,
// is full.
func IsFull(err error) bool { return Code(err)&0xff == sqlite3.SQLITE_FULL || Code(err) == ioErrWrite }

const ioErrWrite = sqlite3.SQLITE_IOERR | 3<<8

// IsConstraint reports whether err is a violated constraint or a RAISE(ABORT)
// of a trigger.
func IsConstraint(err error) bool { return Code(err)&0xff == sqlite3.SQLITE_CONSTRAINT }

func invalid(field string, value any, rng string) error {
	return fmt.Errorf("%w: %s = %v, must be %s", ErrInvalidOption, field, value, rng)
}
