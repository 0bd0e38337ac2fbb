package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
)

// Synchronous is a property of a connection, not of the file: another program,
// or this one at NORMAL, may have committed rows that a power loss would take
// back. Whoever tells the world about a row asks Durable first.

// noteDurable records positions that a group of ours committed with an fsync.
// Only one contiguous range is kept: a gap means that somebody else committed
// in between.
func (db *DB) noteDurable(first, last int64) {
	if db.opts.Synchronous != "FULL" {
		return
	}
	db.durableMu.Lock()
	defer db.durableMu.Unlock()
	if first != db.durableTo+1 || db.durableTo == 0 {
		db.durableFrom = first
	}
	db.durableTo = last
}

// Durable makes sure that the rows committed at positions first to last
// survive power loss: it returns at once if this process committed them with
// an fsync, and otherwise syncs the write-ahead log.
func (db *DB) Durable(first, last int64) error {
	db.durableMu.Lock()
	known := first >= db.durableFrom && last <= db.durableTo
	db.durableMu.Unlock()
	if known {
		return nil
	}
	// A missing log means that it was checkpointed, which syncs.
	if err := syncFile(db.opts.Path + "-wal"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("sync write-ahead log: %w", err)
	}
	return nil
}

func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// SyncDir makes the names in a directory survive power loss: those of new files
// are not part of the files. Windows has no such call, and needs none.
func SyncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
