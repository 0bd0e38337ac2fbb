package lock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gofrs/flock"
)

const (
	// probeGrace is how long Acquire repeats itself before it believes that the
	// lock is held: Holder of another process has it for some microseconds.
	probeGrace = 50 * time.Millisecond
	retryEvery = 2 * time.Millisecond
	// standbyPoll is how soon a standby notices that the owner is gone.
	standbyPoll = 50 * time.Millisecond
)

// Lock is the ownership of one database. It is held until Release or the end
// of the process.
type Lock struct {
	path string // of the database, links resolved
	file *flock.Flock

	mu       sync.Mutex
	owner    Owner
	released bool
}

// Acquire takes the ownership of the database at dbPath, whose directory must
// exist; the database need not. It returns a *HeldError when another process,
// or another Lock of this one, has it.
func Acquire(dbPath string) (*Lock, error) {
	ctx, cancel := context.WithTimeout(context.Background(), probeGrace)
	defer cancel()
	l, err := acquire(ctx, dbPath, retryEvery)
	if errors.Is(err, context.DeadlineExceeded) {
		owner, _ := readOwner(resolve(dbPath)) // it may not have said who it is yet
		return nil, &HeldError{Path: dbPath, Owner: owner}
	}
	return l, err
}

// Wait is Acquire for a standby: it blocks until the owner is gone, which it
// notices within 100 ms, or until ctx ends.
func Wait(ctx context.Context, dbPath string) (*Lock, error) {
	return acquire(ctx, dbPath, standbyPoll)
}

func acquire(ctx context.Context, dbPath string, every time.Duration) (*Lock, error) {
	l := &Lock{path: resolve(dbPath), owner: Owner{PID: os.Getpid(), StartedAt: time.Now().UTC().Truncate(time.Microsecond)}}
	l.file = flock.New(l.path+".lock", flock.SetPermissions(0o600))
	locked, err := l.file.TryLock() // at least once, however little time ctx leaves on a busy machine
	if err == nil && !locked {
		_, err = l.file.TryLockContext(ctx, every)
	}
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dbPath, errors.Join(err, l.file.Close()))
	}
	// The lock is the ownership. A full disk must not keep an owner from starting
	// only because it cannot say who it is.
	_ = writeOwner(l.path, l.owner)
	return l, nil
}

// SetAddress makes the owner's HTTP address, host:port, known to Holder.
func (l *Lock) SetAddress(address string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return fmt.Errorf("set address of %s: the lock was released", l.path)
	}
	l.owner.Address = address
	return writeOwner(l.path, l.owner)
}

// Owner returns what Holder tells others.
func (l *Lock) Owner() Owner {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.owner
}

// Release gives the ownership up. Further calls do nothing.
func (l *Lock) Release() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return nil
	}
	l.released = true
	err := os.Remove(ownerFile(l.path)) // before the unlock: after it, the file may be the successor's
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, l.file.Close())
}

// Holder tells who owns the database at dbPath, and whether anybody does. For
// an instant after an owner has started, Owner is zero, or its killed
// predecessor. Holder creates no file.
func Holder(dbPath string) (owner Owner, held bool, err error) {
	path := resolve(dbPath)
	if _, err := os.Stat(path + ".lock"); errors.Is(err, fs.ErrNotExist) {
		return Owner{}, false, nil
	}
	// A shared lock is refused while an owner has the exclusive one, and does
	// not keep other processes from looking at the same time.
	probe := flock.New(path+".lock", flock.SetFlag(os.O_RDONLY))
	free, err := probe.TryRLock()
	if err := errors.Join(err, probe.Close()); err != nil {
		return Owner{}, false, fmt.Errorf("look for the owner of %s: %w", dbPath, err)
	}
	if free {
		return Owner{}, false, nil
	}
	owner, err = readOwner(path)
	return owner, true, err
}

// resolve follows symbolic links, as SQLite does: one database, one lock.
func resolve(path string) string {
	if p, err := filepath.EvalSymlinks(path); err == nil {
		return p
	}
	if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil { // no database yet
		return filepath.Join(dir, filepath.Base(path))
	}
	return path
}
