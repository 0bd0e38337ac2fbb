package node_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/node"
	"outlog/store"
)

// replaceWith puts a copy made earlier in the place of a directory.
func replaceWith(t *testing.T, dir, copied string) {
	t.Helper()
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.CopyFS(dir, os.DirFS(copied)))
}

// keep copies a stopped node's directory.
func keep(t *testing.T, dir string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "kept")
	require.NoError(t, os.CopyFS(to, os.DirFS(dir)))
	return to
}

// appendWithout appends events while neither relay nor broker runs.
func appendWithout(t *testing.T, dir string, events int) {
	t.Helper()
	n, err := node.Open(t.Context(), node.Options{Dir: dir, NoBroker: true})
	require.NoError(t, err)
	for i := range events {
		appendOne(t, n, "other", "Placed", i)
	}
	require.NoError(t, n.Close())
}

// publishMore appends events and waits until they are on the stream.
func publishMore(t *testing.T, dir string, events int) {
	t.Helper()
	n, stop := start(t, node.Options{Dir: dir}, recorder("a", "Placed"))
	for i := range events {
		appendOne(t, n, "1", "Placed", i)
	}
	requireStreamAgrees(t, n)
	stop()
}

// onStream does something to the stream while no relay runs.
func onStream(t *testing.T, dir string, do func(ctx context.Context, n *node.Node)) {
	t.Helper()
	n, err := node.Open(t.Context(), node.Options{Dir: dir, StreamMaxAge: time.Second})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Broker().Run(ctx) }()
	require.NoError(t, n.Broker().WaitUp(ctx))
	do(ctx, n)
	cancel()
	require.NoError(t, <-ended)
	require.NoError(t, n.Close())
}

func eventuallyEmpty(t *testing.T, n *node.Node) {
	t.Helper()
	require.Eventually(t, func() bool {
		tail, err := n.Broker().Tail(t.Context())
		return err == nil && tail.Exists && tail.FirstSeq > tail.LastSeq
	}, 20*time.Second, 10*time.Millisecond)
}

// TestStreamAndLogApart brings stream and log apart in every way that is no
// damage: crashes, restored copies, people.
func TestStreamAndLogApart(t *testing.T) {
	for _, tc := range []struct {
		name   string
		repair bool
		do     func(t *testing.T, dir string)
	}{
		{"equal", false, func(*testing.T, string) {}},
		{"ahead: the cursor was not stored", true, func(t *testing.T, dir string) {
			n, err := node.Open(t.Context(), node.Options{Dir: dir, NoBroker: true})
			require.NoError(t, err)
			require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), `UPDATE outlog_relay SET position = 2, event_id = (SELECT event_id FROM outbox WHERE position = 2), stream_seq = 2;
					DELETE FROM outlog_publications; INSERT INTO outlog_publications VALUES (1, 2, 1, 2, 0)`)
				return err
			}))
			require.NoError(t, n.Close())
		}},
		{"ghosts: the power cut took events that were published, their positions were given out again", true, func(t *testing.T, dir string) {
			older := keep(t, dir)
			publishMore(t, dir, 3)
			replaceDatabase(t, dir, older)
			appendWithout(t, dir, 3)
		}},
		{"ghosts: some positions were given out again", true, func(t *testing.T, dir string) {
			older := keep(t, dir)
			publishMore(t, dir, 3)
			replaceDatabase(t, dir, older)
			appendWithout(t, dir, 1)
		}},
		{"an older database beside a newer stream", true, func(t *testing.T, dir string) {
			older := keep(t, dir)
			publishMore(t, dir, 3)
			replaceDatabase(t, dir, older)
		}},
		{"an older stream beside a newer database", true, func(t *testing.T, dir string) {
			older := keep(t, dir)
			publishMore(t, dir, 3)
			replaceWith(t, filepath.Join(dir, "jetstream"), filepath.Join(older, "jetstream"))
		}},
		{"both older", false, func(t *testing.T, dir string) {
			older := keep(t, dir)
			publishMore(t, dir, 3)
			replaceWith(t, dir, older)
		}},
		{"both older, the stream more so", true, func(t *testing.T, dir string) {
			oldest := keep(t, dir)
			publishMore(t, dir, 3)
			older := keep(t, dir)
			publishMore(t, dir, 3)
			replaceWith(t, dir, older)
			replaceWith(t, filepath.Join(dir, "jetstream"), filepath.Join(oldest, "jetstream"))
		}},
		{"made anew by somebody", true, func(t *testing.T, dir string) {
			onStream(t, dir, func(ctx context.Context, n *node.Node) { require.NoError(t, n.Broker().Publisher().Recreate(ctx, 1)) })
		}},
		{"deleted by somebody", true, func(t *testing.T, dir string) {
			onStream(t, dir, func(ctx context.Context, n *node.Node) {
				_ = n.Broker().PublishRaw(ctx, "$JS.API.STREAM.DELETE."+n.Broker().StreamName(), nil, nil) // its answer is none of a publish
				tail, err := n.Broker().Tail(ctx)
				require.NoError(t, err)
				require.False(t, tail.Exists)
			})
		}},
		{"a message of nobody at the end", true, func(t *testing.T, dir string) {
			onStream(t, dir, func(ctx context.Context, n *node.Node) {
				require.NoError(t, n.Broker().PublishRaw(ctx, "outlog.order.Placed", nil, []byte("stray")))
			})
		}},
		// Neither is a loss: the sequence goes on.
		{"purged by somebody", false, func(t *testing.T, dir string) {
			onStream(t, dir, func(ctx context.Context, n *node.Node) {
				_ = n.Broker().PublishRaw(ctx, "$JS.API.STREAM.PURGE."+n.Broker().StreamName(), nil, nil)
				eventuallyEmpty(t, n)
			})
		}},
		{"all expired", false, func(t *testing.T, dir string) {
			onStream(t, dir, func(ctx context.Context, n *node.Node) {
				_, err := n.Broker().Publisher().Tail(ctx) // gives the stream its shorter limit
				require.NoError(t, err)
				eventuallyEmpty(t, n)
			})
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := filled(t)
			tc.do(t, dir)
			requireRepaired(t, dir, tc.repair)
			requireRepaired(t, dir, false) // it lasts
		})
	}
}

// replaceDatabase puts an older copy of the database in the place of this one,
// and leaves the stream as it is.
func replaceDatabase(t *testing.T, dir, older string) {
	t.Helper()
	copied, err := os.ReadFile(node.DatabasePath(older))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(node.DatabasePath(dir), copied, 0o600))
	require.NoFileExists(t, node.DatabasePath(dir)+"-wal", "an orderly stop leaves none")
}
