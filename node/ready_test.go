package node_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/node"
	"outlog/relay"
	"outlog/store"
)

func eventuallyNotReady(t *testing.T, n *node.Node, want string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(strings.Join(n.NotReady(t.Context()), "\n"), want) }, 20*time.Second, 5*time.Millisecond, "%v", n.NotReady(t.Context()))
}

func eventuallyReady(t *testing.T, n *node.Node) {
	t.Helper()
	require.Eventually(t, func() bool { return len(n.NotReady(t.Context())) == 0 }, 20*time.Second, 5*time.Millisecond, "%v", n.NotReady(t.Context()))
}

// TestReadinessNamesAStuckHandler blocks a handler inside its transaction.
func TestReadinessNamesAStuckHandler(t *testing.T) {
	release := make(chan struct{})
	o := recorder("a", "Placed")
	o.Routes = []consumer.Route{consumer.Apply("Placed", func(context.Context, *store.Tx, consumer.Event[placed]) error {
		<-release
		return nil
	})}
	n, _ := start(t, node.Options{}, o)
	eventuallyReady(t, n)
	a := appendOne(t, n, "1", "Placed", 1)
	eventuallyNotReady(t, n, "consumer a: its handler is at Placed "+a.ID)
	close(release)
	eventuallyReady(t, n)
}

// TestReadinessNamesAnOutage: a consumer that pauses by itself, and why.
func TestReadinessNamesAnOutage(t *testing.T) {
	var down atomic.Bool
	down.Store(true)
	o := recorder("a", "Placed")
	o.Routes = []consumer.Route{consumer.Apply("Placed", func(context.Context, *store.Tx, consumer.Event[placed]) error {
		if down.Load() {
			return consumer.Outage(errors.New("warehouse does not answer"))
		}
		return nil
	})}
	n, _ := start(t, node.Options{}, o)
	appendOne(t, n, "1", "Placed", 3)
	eventuallyNotReady(t, n, "outage: warehouse does not answer")
	down.Store(false)
	eventuallyReady(t, n)
}

// TestOrdersGoOnWithoutBroker makes the stream's directory unusable: the node
// says so, orders and local consumers go on, and the stream catches up.
func TestOrdersGoOnWithoutBroker(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "jetstream")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	n, _ := start(t, node.Options{Dir: dir}, recorder("a", "Placed"))
	eventuallyNotReady(t, n, "broker: ")
	waitApplied(t, n, "a", appendOne(t, n, "1", "Placed", 1).Position)
	require.NoError(t, os.Remove(file))
	eventuallyReady(t, n)
	requireStreamAgrees(t, n)
}

// TestStuckHandlerDoesNotHoldUpTheStop: a handler that never returns is named,
// and Run and Close end within the drain time with an error.
func TestStuckHandlerDoesNotHoldUpTheStop(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	entered := make(chan struct{})
	o := recorder("a", "Placed")
	o.Routes = []consumer.Route{consumer.Apply("Placed", func(context.Context, *store.Tx, consumer.Event[placed]) error {
		close(entered)
		<-release
		return nil
	})}
	n, err := node.Open(t.Context(), node.Options{Dir: t.TempDir(), DrainTimeout: 50 * time.Millisecond})
	require.NoError(t, err)
	require.NoError(t, n.Handle(o))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	a := appendOne(t, n, "1", "Placed", 1)
	<-entered
	cancel()
	err = <-done
	require.ErrorIs(t, err, consumer.ErrStuck)
	require.ErrorContains(t, err, a.ID)
	require.ErrorIs(t, n.Close(), consumer.ErrStuck)
}

// TestNewDatabaseBesideOldStream: what is left of another database's stream
// does not keep the new one from publishing.
func TestNewDatabaseBesideOldStream(t *testing.T) {
	dir := filled(t)
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(node.DatabasePath(dir) + suffix); err != nil {
			require.ErrorIs(t, err, os.ErrNotExist)
		}
	}
	n, _ := start(t, node.Options{Dir: dir}, recorder("a", "Placed"))
	waitApplied(t, n, "a", appendOne(t, n, "1", "Placed", 1).Position)
	requireStreamAgrees(t, n)
}

// TestLostStreamIsNoticedWithoutAppends deletes the stream under an idle node.
func TestLostStreamIsNoticedWithoutAppends(t *testing.T) {
	dir := t.TempDir()
	n, _ := start(t, node.Options{Dir: dir, Relay: relay.Options{Poll: 10 * time.Millisecond}}, recorder("a", "Placed"))
	waitApplied(t, n, "a", appendOne(t, n, "1", "Placed", 1).Position)
	requireStreamAgrees(t, n)
	require.NoError(t, n.Broker().Publisher().Recreate(t.Context(), 1))
	require.Eventually(t, func() bool { return n.Status().Relay.Reconciled > 0 }, 20*time.Second, 5*time.Millisecond)
	requireStreamAgrees(t, n)
}
