package node_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/node"
	"outlog/store"
)

// TestRefusedEventReachesLocalConsumers: another program has written an event
// that is too large for the broker. The relay parks it, and its aggregate;
// local consumers read the log and do not notice.
func TestRefusedEventReachesLocalConsumers(t *testing.T) {
	dir := t.TempDir()
	n, stop := start(t, node.Options{Dir: dir}, recorder("a", "Placed"))
	appendOne(t, n, "x", "Placed", 1)
	require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload)
			VALUES ('order', 'x', 'Placed', ?)`, `{"n":2}`+strings.Repeat(" ", 3<<20))
		return err
	}))
	behind := appendOne(t, n, "x", "Placed", 3)
	last := appendOne(t, n, "y", "Placed", 4)
	waitApplied(t, n, "a", last.Position)
	waitApplied(t, n, "a", behind.Position)
	require.Equal(t, []string{"x/1", "x/2", "x/3", "y/1"}, effects(t, n, "a"))
	require.Eventually(t, func() bool { return n.Status().Relay.Position == last.Position }, 10*time.Second, time.Millisecond)
	require.Equal(t, 2, n.Status().Relay.Parked)
	require.Positive(t, n.Status().Relay.Refused)
	requireStreamAgrees(t, n)
	var states string
	require.NoError(t, n.Store().Reader().QueryRow(`SELECT group_concat(state, ' ') FROM (SELECT state FROM outbox_status ORDER BY position)`).Scan(&states))
	require.Equal(t, "published parked parked published", states)
	stop()

	// The stream is made anew around what is parked.
	n, _ = start(t, node.Options{Dir: dir}, recorder("a", "Placed"))
	require.NoError(t, n.Broker().WaitUp(t.Context()))
	require.NoError(t, n.Broker().Publisher().Recreate(t.Context(), 1))
	last = appendOne(t, n, "y", "Placed", 5)
	waitApplied(t, n, "a", last.Position)
	require.Eventually(t, func() bool { return n.Status().Relay.Position == last.Position && n.Status().Relay.StreamSeq > 10_000 }, 10*time.Second, time.Millisecond)
	requireStreamAgrees(t, n)
	require.Equal(t, []string{"x/1", "x/2", "x/3", "y/1", "y/2"}, effects(t, n, "a"))
}
