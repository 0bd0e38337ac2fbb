package consumer_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/store"
)

// TestBatchThatEndsEarly: each handler uses up the batch's time, so every batch
// handles one of the events that got their inbox rows together. The others have
// none when it commits.
func TestBatchThatEndsEarly(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a", "b", "a", "c", "b", "a")
	o := options("x", failing("x", func(consumer.Event[string]) error { <-time.After(2 * time.Millisecond); return nil }))
	o.BatchTime = time.Millisecond
	var commits, inbox, position int64
	o.Failpoint = func(point string) error {
		if point == "consumer.after-commit" && inbox == position {
			commits++
			return r.db.Reader().QueryRow(`SELECT (SELECT count(*) FROM outlog_inbox), position FROM outlog_consumers`).Scan(&inbox, &position)
		}
		return nil
	}
	c, stop := r.run(down{}, o)
	require.NoError(t, r.wait(c, last))
	stop()
	require.Equal(t, position, inbox, "inbox rows beside the cursor")
	require.Equal(t, last, commits)
	require.Equal(t, "a1 b1 a2 c1 b2 a3", r.effects("x"))
}

// TestAppliedBeforeAmongOthers: one event has its inbox row from before; those
// around it get theirs, and their effects, and it has none.
func TestAppliedBeforeAmongOthers(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a", "b", "c", "d")
	r.exec(`INSERT INTO outlog_inbox SELECT 'x', event_id, position, 1 FROM outbox WHERE aggregate_id = 'c'`)
	c, stop := r.run(down{}, options("x", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		return effect(ctx, tx, "x", e)
	}))
	require.NoError(t, r.wait(c, last))
	stop()
	require.Equal(t, "a1 b1 d1", r.effects("x"))
	r.eventually("4", `SELECT count(*) FROM outlog_inbox`)
}
