package consumer_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/outbox"
	"outlog/store"
)

func (r *rig) trim(window int64, limit int) (more bool) {
	r.t.Helper()
	more, err := consumer.TrimInbox(r.t.Context(), r.db, "c", window, limit)
	require.NoError(r.t, err)
	return more
}

const inbox = `SELECT coalesce(group_concat(position, ' '), '') FROM (SELECT position FROM outlog_inbox ORDER BY position)`

// TestTrimInbox: rows go in log order, never within the window, nor at or above
// the cursor or a parked event; and an idle database is not written to.
func TestTrimInbox(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b", "c", "d", "e", "bad", "f", "g", "h")
	o := options("c", failing("c", func(e consumer.Event[string]) error {
		if e.AggregateID == "bad" {
			return consumer.Permanent(errors.New("no"))
		}
		return nil
	}))
	c, stop := r.run(down{}, o)
	require.NoError(t, r.wait(c, 9))
	stop()
	r.eventually("1 2 3 4 5 7 8 9", inbox)

	require.False(t, r.trim(1, 5), "four positions are not worth a transaction of five")
	r.eventually("1 2 3 4 5 7 8 9", inbox)
	require.True(t, r.trim(1, 3))
	r.eventually("4 5 7 8 9", inbox)
	require.True(t, r.trim(1, 1))
	require.False(t, r.trim(1, 1))
	r.eventually("5 7 8 9", inbox)
	require.True(t, r.trim(0, 1))
	require.False(t, r.trim(0, 1), "the parked event, and what is behind it")
	r.eventually("7 8 9", inbox)
	r.exec(`DELETE FROM outlog_parked`)
	r.exec(`INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at) SELECT 'c', event_id, 6, 1, 'discarded', '', 0 FROM outbox WHERE position = 6`)
	for r.trim(0, 1) {
	}
	r.eventually("", inbox)
	more, err := consumer.TrimInbox(t.Context(), r.db, "unknown", 0, 1)
	require.NoError(t, err)
	require.False(t, more)
}

// TestPrunedEventsStayOnce: inbox rows and events are gone; what is delivered
// or redriven again has no second effect.
func TestPrunedEventsStayOnce(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b", "bad", "bad", "c")
	src := newScript()
	var old []consumer.Delivery
	for i := range int64(5) {
		old = append(old, src.delivery(r, uint64(i+1), i+1))
	}
	var mended atomic.Bool
	o := options("c", failing("c", func(e consumer.Event[string]) error {
		if e.AggregateID == "bad" && !mended.Load() {
			return consumer.Permanent(errors.New("no"))
		}
		return nil
	}))
	c, stop := r.run(src, o)
	src.ch <- old
	require.NoError(t, r.wait(c, 5))
	stop()
	for r.trim(0, 1) {
	}
	r.eventually("5", inbox)
	require.NoError(t, r.prune(1))
	require.NoError(t, r.prune(1))
	held := &outbox.HeldError{}
	require.ErrorAs(t, r.prune(1), &held, "it is parked")

	c, stop = r.run(src, o)
	src.ch <- old
	src.ch <- old
	mended.Store(true)
	r.exec(`UPDATE outlog_parked SET state = 'retrying', next_attempt_at = 0, delay_us = 0 WHERE state = 'dead'`)
	r.eventually("0", `SELECT count(*) FROM outlog_parked`)
	r.append("a")
	require.NoError(t, r.wait(c, 6))
	stop()
	require.Equal(t, "a1 b1 c1 bad1 bad2 a2", r.effects("c"))
	require.Zero(t, c.Status().Strays, "a delivery of a pruned event is none")
	for range 4 {
		require.NoError(t, r.prune(1))
	}
	r.eventually("0", `SELECT count(*) FROM outlog_inbox`)
}

// prune removes the oldest events, as retention does.
func (r *rig) prune(n int) error {
	ctx := context.Background()
	events, err := r.log.Extents(ctx, 0, n)
	require.NoError(r.t, err)
	return r.db.Update(ctx, func(tx *store.Tx) error {
		if err := consumer.Forget(ctx, tx, events[0].Position-1, events[len(events)-1].Position); err != nil {
			return err
		}
		return r.log.Prune(ctx, tx, events, outbox.Needs{})
	})
}

// TestResetBelowTrimmedInbox: the effects are undone, so every event is applied
// once more, and from then on every inbox row has to be there again.
func TestResetBelowTrimmedInbox(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "b", "c", "d")
	o := options("c", failing("c", fine))
	o.Clear = func(ctx context.Context, tx *store.Tx, after int64) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM effects WHERE event_id IN (SELECT event_id FROM outbox WHERE position > ?)`, after)
		return err
	}
	c, _ := r.run(down{}, o)
	require.NoError(t, r.wait(c, 4))
	for r.trim(0, 1) {
	}
	r.eventually("4", `SELECT inbox_through FROM outlog_consumers`)
	require.NoError(t, r.reset("1"))
	r.eventually("2 3 4", inbox)
	require.Equal(t, "a1 b1 c1 d1", r.effects("c"))
	r.eventually("1", `SELECT inbox_through FROM outlog_consumers`)
}

// TestTrimAttempts: old history goes, but not that of an event which is parked,
// nor what says that an event was left out on purpose; and a wrong clock keeps
// nothing.
func TestTrimAttempts(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a")
	now := time.Now()
	for i, a := range []struct {
		event, outcome string
		age            time.Duration
	}{
		{"1", "failed", 48 * time.Hour},
		{"2", "discarded", 48 * time.Hour},
		{"parked", "failed", 48 * time.Hour},
		{"3", "failed", -1000 * time.Hour},
		{"4", "redriven", 47 * time.Hour},
		{"5", "reset", 46 * time.Hour},
		{"6", "failed", time.Hour},
		{"7", "failed", 48 * time.Hour}, // a clock that steps back comes later in the table
	} {
		r.exec(`INSERT INTO outlog_attempts (id, consumer, event_id, position, attempt, outcome, error, at) VALUES (?, 'c', ?, 0, 1, ?, '', ?)`,
			i+1, a.event, a.outcome, now.Add(-a.age).UnixMicro())
	}
	r.exec(`INSERT INTO outlog_consumers (name, position, start_position, types, created_at, updated_at) VALUES ('c', 1, 1, '[]', 0, 0)`)
	r.exec(`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at) SELECT 'c', event_id, 1, 'order', 'a', 'dead', 0 FROM outbox`)
	r.exec(`UPDATE outlog_attempts SET event_id = (SELECT event_id FROM outbox) WHERE event_id = 'parked'`)
	trim := func(limit int) bool {
		more, err := consumer.TrimAttempts(t.Context(), r.db, 24*time.Hour, limit)
		require.NoError(t, err)
		return more
	}
	require.True(t, trim(2))
	require.False(t, trim(2))
	require.False(t, trim(2))
	r.eventually("2 3 4 7 8", `SELECT group_concat(id, ' ') FROM (SELECT id FROM outlog_attempts ORDER BY id)`)
}
