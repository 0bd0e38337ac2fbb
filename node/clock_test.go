package node_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// setClock is a clock that somebody sets.
type setClock struct{ ahead atomic.Int64 }

func (c *setClock) now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

func (c *setClock) set(to time.Time) { c.ahead.Store(int64(time.Until(to))) }

// TestWrongClock boots with a clock that is far off, as machines without a
// battery do, works, and has it set right: while it runs, and between two runs.
func TestWrongClock(t *testing.T) {
	for name, boot := range map[string]time.Time{
		"1970": time.Unix(30, 0),
		"2038": time.Date(2038, 1, 19, 3, 14, 8, 0, time.UTC),
	} {
		for _, restart := range []bool{false, true} {
			how := map[bool]string{false: "set while it runs", true: "set before the next start"}[restart]
			t.Run(name+", "+how, func(t *testing.T) {
				t.Parallel()
				setRight(t, boot, restart)
			})
		}
	}
}

func setRight(t *testing.T, boot time.Time, restart bool) {
	var clock setClock
	clock.set(boot)
	o := node.Options{Dir: t.TempDir(), Now: clock.now, Retention: 24 * time.Hour}
	var repaired atomic.Bool
	consumers := func() []consumer.Options {
		a, b := recorder("a", "Placed"), recorder("b", "Placed")
		a.Poll, b.Poll = 10*time.Millisecond, 10*time.Millisecond
		a.Routes = []consumer.Route{consumer.Apply("Placed", func(ctx context.Context, tx *store.Tx, e consumer.Event[placed]) error {
			if e.AggregateID == "late" && !repaired.Load() {
				return consumer.RetryAfter(time.Second, errors.New("not yet"))
			}
			return record("a")(ctx, tx, e)
		})}
		return []consumer.Options{a, b}
	}
	n, stop := start(t, o, consumers()...)
	var ids []string
	place := func(aggregates ...string) (last outbox.Appended) {
		for _, aggregate := range aggregates {
			last = appendOne(t, n, aggregate, "Placed", len(ids))
			ids = append(ids, last.ID)
		}
		return last
	}
	place("late", "x", "y", "late")
	waitApplied(t, n, "b", place("x").Position)
	parked := func() (rows int) {
		require.NoError(t, n.Store().Reader().QueryRow(`SELECT count(*) FROM outlog_parked WHERE consumer = 'a'`).Scan(&rows))
		return rows
	}
	require.Eventually(t, func() bool { return parked() == 2 }, 20*time.Second, time.Millisecond)
	requireStreamAgrees(t, n)
	refused := func(id string) error {
		return n.Update(t.Context(), func(tx *store.Tx) error {
			_, err := n.Append(t.Context(), tx, outbox.Event{ID: id, AggregateType: "order", AggregateID: "z", Type: "Placed", Data: placed{}})
			return err
		})
	}
	at := func(d time.Duration) string {
		return ulid.MustNew(ulid.Timestamp(clock.now().Add(d)), ulid.DefaultEntropy()).String()
	}
	require.ErrorContains(t, refused(at(time.Hour+time.Minute)), "in the future")

	if restart {
		stop()
		ids = nil // ids rise within a process
	}
	clock.set(time.Now())
	repaired.Store(true)
	if restart {
		n, _ = start(t, o, consumers()...)
	}
	last := place("x", "late", "y")
	waitApplied(t, n, "b", last.Position)
	// What failed is due, and not only when the wrong time comes.
	require.Eventually(t, func() bool { return parked() == 0 }, 20*time.Second, time.Millisecond)
	waitApplied(t, n, "a", last.Position)
	require.IsIncreasing(t, ids)
	require.Equal(t, []string{"x/1", "y/1", "x/2"}, effects(t, n, "a")[:3])
	require.ElementsMatch(t, []string{"late/1", "late/2", "late/3", "x/1", "x/2", "x/3", "y/1", "y/2"}, effects(t, n, "a"))
	require.ErrorContains(t, refused(at(time.Hour+time.Minute)), "in the future")
	require.NoError(t, refused(at(30*time.Minute)))
	requireStreamAgrees(t, n)
	head, err := n.Log().Read(t.Context(), 0, outbox.Page{})
	require.NoError(t, err)
	require.Len(t, head, 9, "nothing was pruned for its age")
	require.Empty(t, n.NotReady(t.Context()))
}

// TestNeverPublishedIsNotTooOld: events that waited for the broker while the
// clock was decades behind reach the stream, although it is made anew when they
// seem to be older than its MaxAge.
func TestNeverPublishedIsNotTooOld(t *testing.T) {
	var clock setClock
	clock.set(time.Unix(30, 0))
	dir := t.TempDir()
	file := filepath.Join(dir, "jetstream")
	require.NoError(t, os.WriteFile(file, nil, 0o600)) // keeps the broker down
	n, _ := start(t, node.Options{Dir: dir, Now: clock.now}, recorder("a", "Placed"))
	for i := range 5 {
		appendOne(t, n, "x", "Placed", i)
	}
	clock.set(time.Now())
	appendOne(t, n, "x", "Placed", 5)
	require.NoError(t, os.Remove(file))
	eventuallyReady(t, n)
	requireStreamAgrees(t, n)
	r, err := n.VerifyStream(t.Context())
	require.NoError(t, err)
	require.Equal(t, "6 events at their sequences, from 1 to 6", r.Detail)
}
