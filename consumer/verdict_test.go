package consumer

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/internal/attempt"
	"outlog/store"
)

// evil is an error whose methods panic, as those of a nil pointer do.
type evil struct{ wrapped error }

func (e *evil) Error() string { return e.wrapped.Error() }
func (e *evil) Unwrap() error { return e.wrapped }

func TestVerdicts(t *testing.T) {
	o := Options{MaxAttempts: 3, BackoffMin: time.Second, BackoffMax: time.Minute}
	plain := errors.New("boom")
	for name, tc := range map[string]struct {
		err   error
		n     int
		kind  kind
		state string
		least time.Duration
		most  time.Duration
	}{
		"first":                {plain, 1, kindFailed, "retrying", 0, time.Second},
		"second":               {plain, 2, kindFailed, "retrying", 0, 2 * time.Second},
		"last":                 {plain, 3, kindFailed, "dead", 0, 0},
		"permanent":            {fmt.Errorf("a: %w", Permanent(plain)), 1, kindPermanent, "dead", 0, 0},
		"retry after":          {fmt.Errorf("a: %w", RetryAfter(time.Hour, plain)), 1, kindRetryAfter, "retrying", time.Hour, time.Hour},
		"retry after, last":    {RetryAfter(time.Hour, plain), 3, kindRetryAfter, "dead", 0, 0},
		"retry after, never":   {RetryAfter(1<<62, plain), 1, kindRetryAfter, "retrying", maxDelay, maxDelay},
		"retry after, past":    {RetryAfter(-time.Hour, plain), 1, kindRetryAfter, "retrying", 0, 0},
		"permanent and after":  {Permanent(RetryAfter(time.Hour, plain)), 1, kindPermanent, "dead", 0, 0},
		"an error that panics": {(*evil)(nil), 1, kindFailed, "retrying", 0, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFailure("id", tc.err, "")
			require.Equal(t, tc.kind, f.kind)
			require.True(t, f.counts())
			require.NotEmpty(t, f.text)
			for range 50 {
				v := o.judge(f, tc.n)
				require.Equal(t, tc.state, v.state)
				require.GreaterOrEqual(t, v.delay, tc.least)
				require.LessOrEqual(t, v.delay, tc.most)
			}
		})
	}
	for name, err := range map[string]error{"outage": Outage(plain), "of the database": fmt.Errorf("x: %w", Permanent(store.ErrUnavailable))} {
		require.False(t, newFailure("id", err, "").counts(), name)
	}
}

// TestJitterIsFull: the delay is anything between nothing and a bound that
// doubles up to the top, and does not wrap around on the way.
func TestJitterIsFull(t *testing.T) {
	for _, tc := range []struct {
		low, top time.Duration
		n        int
		bound    time.Duration
	}{
		{time.Second, time.Minute, 1, time.Second},
		{time.Second, time.Minute, 4, 8 * time.Second},
		{time.Second, time.Minute, 7, time.Minute},
		{time.Second, time.Minute, 1000, time.Minute},
		{time.Hour, 24 * time.Hour, 25, 24 * time.Hour},
		{time.Nanosecond, 1<<63 - 2, 62, 1 << 61},
	} {
		var least, most time.Duration = tc.bound, 0
		for range 2000 {
			d := attempt.Jitter(tc.low, tc.top, tc.n)
			require.GreaterOrEqual(t, d, time.Duration(0))
			require.LessOrEqual(t, d, tc.bound)
			least, most = min(least, d), max(most, d)
		}
		require.Less(t, least, tc.bound/10, "%+v", tc)
		require.Greater(t, most, tc.bound/10*9, "%+v", tc)
	}
}

func TestFingerprintGroupsErrors(t *testing.T) {
	same := attempt.Fingerprint(`order 01JABCDEF0 of "anna" failed after 3 tries at 0xc000123`)
	require.Equal(t, same, attempt.Fingerprint(`order 01JXYZ9990 of "bert" failed after 12 tries at 0xc000999`+"\nstack"))
	require.NotEqual(t, same, attempt.Fingerprint(`order 01JABCDEF0 of "anna" was lost after 3 tries at 0xc000123`))
	require.Len(t, same, 12)
}

func TestShortenKeepsValidText(t *testing.T) {
	s := attempt.Shorten(strings.Repeat("é", attempt.MaxErrorBytes))
	require.LessOrEqual(t, len(s), attempt.MaxErrorBytes+3)
	require.Equal(t, "a\uFFFDb", attempt.Shorten("a\xffb"))
}
