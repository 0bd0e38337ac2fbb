package histogram

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHistogram(t *testing.T) {
	h := Durations()
	for _, d := range []time.Duration{-time.Second, 0, time.Millisecond, time.Millisecond + 1, 2 * time.Hour} {
		h.Observe(int64(d))
	}
	s := h.Snapshot()
	require.Equal(t, uint64(5), s.Count)
	require.InDelta(t, 7200.002, s.Sum, 1e-6)
	require.Equal(t, uint64(2), s.Buckets[0.0005], "a negative duration counts as 0")
	require.Equal(t, uint64(3), s.Buckets[0.001], "a bound is inclusive")
	require.Equal(t, uint64(4), s.Buckets[0.0025])
	require.Equal(t, uint64(4), s.Buckets[3600], "what is above the last bound is only in Count")
}
