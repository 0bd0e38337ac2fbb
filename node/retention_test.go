package node_test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/internal/retention"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// TestPrunedNode: a node whose published events are pruned goes on, and so does
// its next start; what is left of the log is still found on the stream, and
// what is missing there is still missed.
func TestPrunedNode(t *testing.T) {
	var ahead atomic.Int64
	o := node.Options{Dir: t.TempDir(), Now: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }}
	n, stop := start(t, o, recorder("c", "Placed"))
	place(t, n, 50)
	caughtUp(t, n, 50)
	prune := func(through int64) retention.Result {
		r, err := retention.Prune(t.Context(), n.Store(), n.Log(), retention.Options{Rule: retention.Rule{Through: through}})
		require.NoError(t, err)
		return r
	}
	r := prune(20)
	require.Zero(t, r.Events, "a power cut could still take it from the stream")
	require.Equal(t, "stream", r.Held[0].Kind)
	ahead.Store(int64(time.Hour))
	require.EqualValues(t, 20, prune(20).Events)
	place(t, n, 5)
	caughtUp(t, n, 55)
	result, err := n.VerifyStream(t.Context())
	require.NoError(t, err)
	require.True(t, result.OK, result.Detail)
	require.Contains(t, result.Detail, "35 events")
	stop()

	n, stop = start(t, o, recorder("c", "Placed"), recorder("late", "Placed"))
	place(t, n, 5)
	caughtUp(t, n, 60)
	require.Eventually(t, func() bool { return count(t, n, `SELECT count(*) FROM effects WHERE consumer = 'late'`) == 40 }, 20*time.Second, 5*time.Millisecond)
	ahead.Store(int64(2 * time.Hour))
	require.EqualValues(t, 40, prune(60).Events, "all there is")
	place(t, n, 1)
	caughtUp(t, n, 61)
	require.Equal(t, 61, count(t, n, `SELECT count(*) FROM effects WHERE consumer = 'c'`))
	result, err = n.VerifyStream(t.Context())
	require.NoError(t, err)
	require.True(t, result.OK, result.Detail)
	require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `UPDATE outlog_publications SET first_stream_seq = first_stream_seq + 7, last_stream_seq = last_stream_seq + 7`)
		return err
	}))
	result, err = n.VerifyStream(t.Context())
	require.NoError(t, err)
	require.False(t, result.OK)
	require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `UPDATE outlog_publications SET first_stream_seq = first_stream_seq - 7, last_stream_seq = last_stream_seq - 7`)
		return err
	}))
	stop()
}

// TestPruneAllPublishOne: everything was published and pruned; the next event
// is delivered, also after a restart, and also when the stream was rebuilt.
func TestPruneAllPublishOne(t *testing.T) {
	var ahead atomic.Int64
	o := node.Options{Dir: t.TempDir(), Now: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }}
	n, stop := start(t, o, recorder("c", "Placed"))
	place(t, n, 10)
	caughtUp(t, n, 10)
	ahead.Store(int64(time.Hour))
	_, err := retention.Prune(t.Context(), n.Store(), n.Log(), retention.Options{Rule: retention.Rule{OlderThan: time.Minute}})
	require.NoError(t, err)
	require.Zero(t, count(t, n, `SELECT count(*) FROM outbox`))
	stop()
	n, stop = start(t, o, recorder("c", "Placed"))
	place(t, n, 1)
	caughtUp(t, n, 11)
	stop()
	require.NoError(t, os.RemoveAll(filepath.Join(o.Dir, "jetstream")))
	n, stop = start(t, o, recorder("c", "Placed"))
	place(t, n, 1)
	caughtUp(t, n, 12)
	result, err := n.VerifyStream(t.Context())
	require.NoError(t, err)
	require.True(t, result.OK, result.Detail)
	require.Equal(t, 12, count(t, n, `SELECT count(*) FROM effects`))
	stop()
}

// TestNothingIsPrunedBeforeItIsPublished: a node with a broker says so before
// its relay has run for the first time; one without a broker has nothing to wait
// for.
func TestNothingIsPrunedBeforeItIsPublished(t *testing.T) {
	for _, noBroker := range []bool{false, true} {
		t.Run(fmt.Sprint(noBroker), func(t *testing.T) {
			n, err := node.Open(t.Context(), node.Options{Dir: t.TempDir(), NoBroker: noBroker})
			require.NoError(t, err)
			defer n.Close()
			require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) error {
				_, err := n.Append(t.Context(), tx, outbox.Event{AggregateType: "order", AggregateID: "1", Type: "Placed", Data: placed{1}})
				return err
			}))
			r, err := retention.Prune(t.Context(), n.Store(), n.Log(), retention.Options{Rule: retention.Rule{Through: 1}})
			require.NoError(t, err)
			require.Equal(t, noBroker, r.Events == 1)
		})
	}
}

func TestRetentionOptions(t *testing.T) {
	for name, o := range map[string]node.Options{
		"retention":       {Retention: time.Second},
		"retention bytes": {RetentionBytes: 5},
		"inbox window":    {InboxWindow: 5},
		"inbox, negative": {InboxWindow: -2},
		"history":         {HistoryAge: time.Second},
		"archive format":  {ArchiveFormat: "csv"},
	} {
		o.Dir = filepath.Join(t.TempDir(), "data")
		_, err := node.Open(t.Context(), o)
		require.ErrorIs(t, err, node.ErrInvalidOption, name)
		require.NoDirExists(t, o.Dir)
	}
}

func place(t *testing.T, n *node.Node, events int) {
	t.Helper()
	for i := range events {
		appendOne(t, n, fmt.Sprint(i%7), "Placed", i)
	}
}

// caughtUp waits until consumer c and the relay, as it is stored, are at a
// position.
func caughtUp(t *testing.T, n *node.Node, position int) {
	t.Helper()
	waitApplied(t, n, "c", int64(position))
	require.Eventually(t, func() bool { return count(t, n, `SELECT position FROM outlog_relay`) == position }, 20*time.Second, 2*time.Millisecond)
}

func count(t *testing.T, n *node.Node, query string) (number int) {
	t.Helper()
	require.NoError(t, n.Store().Reader().QueryRow(query).Scan(&number))
	return number
}
