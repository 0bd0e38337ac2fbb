// Package histogram counts observations by size, cheaply enough for every
// commit and every event: two atomic additions. The core packages know no
// metrics library; whoever publishes metrics reads a Snapshot.
package histogram

import (
	"sync/atomic"
	"time"
)

// Histogram counts whole numbers. Its methods are safe for concurrent use.
type Histogram struct {
	unit   float64 // what an observation of 1 is worth in a Snapshot
	bounds []int64 // upper bounds, inclusive, rising
	counts []atomic.Int64
	sum    atomic.Int64
}

// Snapshot is a Histogram at one moment. Beside a running Observe, Sum may be
// one observation away from Count.
type Snapshot struct {
	Count   uint64
	Sum     float64
	Buckets map[float64]uint64 // by upper bound: how many observations up to there
}

// Durations counts durations, from 100 µs to an hour; its Snapshot is in
// seconds.
func Durations() *Histogram {
	const ms = int64(time.Millisecond)
	return newHistogram(1/float64(time.Second), ms/10, ms/4, ms/2, ms, 5*ms/2, 5*ms, 10*ms, 25*ms, 50*ms, 100*ms, 250*ms, 500*ms,
		1000*ms, 2500*ms, 5000*ms, 10_000*ms, 60_000*ms, 600_000*ms, 3_600_000*ms)
}

// Sizes counts the members of groups, from 1 to 1024.
func Sizes() *Histogram { return newHistogram(1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) }

func newHistogram(unit float64, bounds ...int64) *Histogram {
	return &Histogram{unit: unit, bounds: bounds, counts: make([]atomic.Int64, len(bounds)+1)}
}

// Observe counts v; a negative one, which a clock that was set makes of a
// duration, as 0.
func (h *Histogram) Observe(v int64) {
	v = max(v, 0)
	i := 0
	for i < len(h.bounds) && v > h.bounds[i] {
		i++
	}
	h.counts[i].Add(1)
	h.sum.Add(v)
}

// Snapshot returns what was counted so far.
func (h *Histogram) Snapshot() Snapshot {
	s := Snapshot{Buckets: make(map[float64]uint64, len(h.bounds)), Sum: float64(h.sum.Load()) * h.unit}
	for i := range h.counts {
		s.Count += uint64(h.counts[i].Load())
		if i < len(h.bounds) {
			s.Buckets[float64(h.bounds[i])*h.unit] = s.Count
		}
	}
	return s
}
