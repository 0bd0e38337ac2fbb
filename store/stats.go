package store

import (
	"maps"
	"sync"
	"sync/atomic"

	"outlog/internal/histogram"
)

// Stats is what the writer has done since Open, for metrics.
type Stats struct {
	Waiting int   // callers of Update that wait for their turn now
	Failed  int64 // transactions that could not be begun or committed
	// Commits are the successful COMMITs, in seconds, with their fsync, and
	// Groups how many callers each was for.
	Commits, Groups histogram.Snapshot
	// Holds are the callbacks, in seconds: for so long all other writers wait.
	Holds histogram.Snapshot
	// Slow counts the callbacks over 50 ms by name; see Holder.
	Slow map[string]int64
}

// counts gathers Stats.
type counts struct {
	failed                 atomic.Int64
	commits, groups, holds *histogram.Histogram

	mu   sync.Mutex
	slow map[string]int64
}

func newCounts() *counts {
	return &counts{commits: histogram.Durations(), groups: histogram.Sizes(), holds: histogram.Durations(), slow: map[string]int64{}}
}

// slowHold counts a callback that held the writer for too long. The names are
// those of functions in the program, so they are few.
func (c *counts) slowHold(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.slow[name]++
}

// Stats returns what the writer has done since Open.
func (db *DB) Stats() Stats {
	c := db.writer.counts
	s := Stats{Waiting: db.writer.waiting(), Failed: c.failed.Load(), Commits: c.commits.Snapshot(), Groups: c.groups.Snapshot(), Holds: c.holds.Snapshot()}
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Slow = maps.Clone(c.slow)
	return s
}

// waiting is how many callers wait for the baton.
func (w *writer) waiting() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.queue)
}
