package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"
)

// signal tells followers that something may have been appended. A wake-up is a
// hint: followers look again by themselves as well.
type signal struct {
	mu   sync.Mutex
	subs map[chan struct{}]struct{}
}

func newSignal() *signal { return &signal{subs: map[chan struct{}]struct{}{}} }

// fire wakes every subscriber; one that has not yet looked is not woken twice.
func (s *signal) fire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// Subscribe returns a channel that receives after commits that appended, and a
// function to stop it. Several commits may give one receive.
func (db *DB) Subscribe() (<-chan struct{}, func()) {
	c := make(chan struct{}, 1)
	db.signal.mu.Lock()
	defer db.signal.mu.Unlock()
	db.signal.subs[c] = struct{}{}
	return c, func() {
		db.signal.mu.Lock()
		defer db.signal.mu.Unlock()
		delete(db.signal.subs, c)
	}
}

// The interval at which Run looks for commits of other connections: short
// after one was seen, long when nothing happens (4 µs a look).
const (
	watchMin = 2 * time.Millisecond
	watchMax = 100 * time.Millisecond
)

// fileLook is how often Run makes sure that the file is still there.
const fileLook = time.Second

// Run watches for commits that did not go through Update — of other processes
// and of other connections in this one — and wakes the subscribers. It returns
// nil when ctx ends, and ErrReplaced when the file was removed or replaced:
// what is written after that would be lost with the last connection, so Update
// refuses it from then on.
func (db *DB) Run(ctx context.Context) error {
	conn, err := db.reader.Conn(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("watch for foreign commits: %w", err)
	}
	defer conn.Close()
	var last, lastOwn int64
	nextLook := time.Now()
	wait := watchMax
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		if now := time.Now(); now.After(nextLook) {
			nextLook = now.Add(fileLook)
			if err := db.checkFile(); err != nil {
				return err
			}
		}
		own := db.writer.commits.Load()
		var v int64
		if err := conn.QueryRowContext(context.WithoutCancel(ctx), "PRAGMA data_version").Scan(&v); err == nil && v != last {
			if own == lastOwn {
				db.writer.lastOutsider.Store(time.Now().UnixNano())
				wait = watchMin
			}
			last, lastOwn = v, own
			db.signal.fire()
		} else {
			wait = min(2*wait, watchMax)
		}
		timer.Reset(wait)
	}
}

// checkFile compares the file that was opened with the one of its name.
func (db *DB) checkFile() error {
	now, err := os.Stat(db.opts.Path)
	if err == nil && os.SameFile(db.file, now) || err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	db.writer.refuse(ErrReplaced)
	return fmt.Errorf("%w: %s", ErrReplaced, db.opts.Path)
}
