package node_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

type placed struct {
	N int `json:"n"`
}

// recorder is a consumer whose effect is one row per event in table effects.
func recorder(name string, types ...string) consumer.Options {
	o := consumer.Options{Name: name, Start: consumer.Beginning, BackoffMin: time.Millisecond, BackoffMax: 5 * time.Millisecond}
	for _, t := range types {
		o.Routes = append(o.Routes, consumer.Apply(t, record(name)))
	}
	return o
}

func record(name string) func(context.Context, *store.Tx, consumer.Event[placed]) error {
	return func(ctx context.Context, tx *store.Tx, e consumer.Event[placed]) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO effects (consumer, event_id, aggregate, version) VALUES (?, ?, ?, ?)`,
			name, e.ID, e.AggregateID, e.AggregateVersion)
		return err
	}
}

// effectsTable has one row per effect, in the order in which they happened.
const effectsTable = `CREATE TABLE IF NOT EXISTS effects (n INTEGER PRIMARY KEY AUTOINCREMENT,
	consumer TEXT, event_id TEXT, aggregate TEXT, version INTEGER) STRICT`

// start opens a node in dir with a table effects, adds the consumers, and runs
// it until the test ends or stop is called; then it verifies everything.
func start(t testing.TB, o node.Options, consumers ...consumer.Options) (n *node.Node, stop func()) {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	if testing.Verbose() {
		o.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	n, err := node.Open(t.Context(), o)
	require.NoError(t, err)
	require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), effectsTable)
		return err
	}))
	for _, c := range consumers {
		require.NoError(t, n.Handle(c))
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
		verify(t, n)
		require.NoError(t, n.Close())
	})
	t.Cleanup(stop)
	return n, stop
}

// verify runs every check of the store.
func verify(t testing.TB, n *node.Node) {
	t.Helper()
	results, err := n.Store().Verify(context.Background())
	require.NoError(t, err)
	for _, r := range results {
		require.True(t, r.OK, "%s: %s", r.Name, r.Detail)
	}
}

func appendOne(t testing.TB, n *node.Node, aggregate, typ string, v int) outbox.Appended {
	t.Helper()
	var out []outbox.Appended
	require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) (err error) {
		out, err = n.Append(t.Context(), tx, outbox.Event{AggregateType: "order", AggregateID: aggregate, Type: typ, Data: placed{v}})
		return err
	}))
	return out[0]
}

// effects returns "aggregate/version" of a consumer's effects in the order
// they happened.
func effects(t testing.TB, n *node.Node, name string) []string {
	t.Helper()
	rows, err := n.Store().Reader().QueryContext(context.Background(), `SELECT aggregate || '/' || version FROM effects WHERE consumer = ? ORDER BY n`, name)
	require.NoError(t, err)
	defer rows.Close()
	var out []string
	for rows.Next() {
		var s string
		require.NoError(t, rows.Scan(&s))
		out = append(out, s)
	}
	require.NoError(t, rows.Err())
	return out
}

func waitApplied(t testing.TB, n *node.Node, name string, position int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, n.WaitApplied(ctx, name, position))
}

func TestEventReachesBothConsumers(t *testing.T) {
	n, _ := start(t, node.Options{}, recorder("a", "Placed"), recorder("b", "Placed", "Cancelled"))
	appendOne(t, n, "1", "Placed", 1)
	last := appendOne(t, n, "1", "Cancelled", 2)
	require.Equal(t, int64(2), last.Version)
	waitApplied(t, n, "a", last.Position)
	waitApplied(t, n, "b", last.Position)
	require.Equal(t, []string{"1/1"}, effects(t, n, "a"))
	require.Equal(t, []string{"1/1", "1/2"}, effects(t, n, "b"))
	require.Eventually(t, func() bool { // the relay's cursor is written behind publishing
		r, err := n.VerifyStream(t.Context())
		return err == nil && r.OK && r.Detail == "2 events at their sequences, from 1 to 2"
	}, 5*time.Second, time.Millisecond)
}

func TestRollbackExposesNothing(t *testing.T) {
	n, _ := start(t, node.Options{}, recorder("a", "Placed"))
	errNo := errors.New("no")
	err := n.Update(t.Context(), func(tx *store.Tx) error {
		if _, err := n.Append(t.Context(), tx, outbox.Event{AggregateType: "order", AggregateID: "x", Type: "Placed", Data: placed{}}); err != nil {
			return err
		}
		return errNo
	})
	require.ErrorIs(t, err, errNo)
	last := appendOne(t, n, "y", "Placed", 1)
	waitApplied(t, n, "a", last.Position)
	require.Equal(t, []string{"y/1"}, effects(t, n, "a"))
	got, err := n.Log().Aggregate(t.Context(), outbox.Aggregate{Type: "order", ID: "x"})
	require.NoError(t, err)
	require.Empty(t, got)
}
