package cli

import (
	"context"
	"database/sql"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/examples/orders"
	"outlog/node"
	"outlog/relay"
	"outlog/store"
)

// finished makes a directory as a service leaves it, with 20 orders, and returns
// what its client was told. The first order is cancelled.
func finished(t *testing.T) (dataDir, []order) {
	t.Helper()
	dir := t.TempDir()
	n, err := node.Open(t.Context(), node.Options{Dir: dir, Migrations: []store.Migrations{orders.Migrations()}})
	require.NoError(t, err)
	for _, c := range orders.Consumers() {
		require.NoError(t, n.Handle(c))
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	s := orders.New(n, nil)
	var list []order
	for i := range 20 {
		o := newOrder(1, i)
		o.cancel = i == 0
		r, err := s.Place(ctx, o.key, o.body)
		require.NoError(t, err)
		o.id, o.eventID = r.OrderID, r.EventID
		if o.cancel {
			_, err := s.Cancel(ctx, "", o.id)
			require.NoError(t, err)
		}
		list = append(list, o)
	}
	require.NoError(t, awaitQuiet(ctx, dataDir{dir}, catchUp))
	stop()
	require.NoError(t, <-ended)
	require.NoError(t, n.Close())
	return dataDir{dir}, list
}

// TestAuditFindsDamage does to finished directories what a fault of outlog would
// do, and looks whether the outside check counts it.
func TestAuditFindsDamage(t *testing.T) {
	whole, list := finished(t)
	first, second := list[0], list[1] // the first is cancelled
	created := "(SELECT event_id FROM outbox WHERE aggregate_id = '" + second.id + "')"
	cancelled := "(SELECT event_id FROM outbox WHERE aggregate_id = '" + first.id + "' AND aggregate_version = 2)"
	for name, c := range map[string]struct {
		sql    string
		stream func(t *testing.T, n *node.Node)
		list   []order
		gone   []string
		want   promises
		checks bool // verify is content: it knows nothing of the clients
	}{
		"nothing":                       {checks: true},
		"a notification is missing":     {sql: `DELETE FROM notifications WHERE event_id = ` + created, want: promises{Lost: 1}},
		"a reservation is missing":      {sql: `DELETE FROM reservations WHERE order_id = '` + second.id + `'`, want: promises{Lost: 1}},
		"an effect was never applied":   {sql: `DELETE FROM outlog_inbox WHERE consumer = 'inventory' AND event_id = ` + created, want: promises{Lost: 1}},
		"a cancellation had no effect":  {sql: `INSERT INTO reservations (order_id, sku, qty, event_id) SELECT aggregate_id, 'SKU-00', 1, event_id FROM outbox WHERE position = 1`, want: promises{Lost: 1}},
		"an accepted order is missing":  {list: append(slices.Clone(list), order{id: "never", eventID: "never"}), want: promises{Lost: 1}, checks: true},
		"a reservation was made twice":  {sql: `UPDATE reservations SET qty = 2 * qty WHERE (order_id, sku) = (SELECT order_id, sku FROM reservations LIMIT 1)`, want: promises{Duplicated: 1}},
		"an order was placed twice":     {list: list[:19], want: promises{Duplicated: 1}, checks: true},
		"effects in the wrong order":    {sql: `UPDATE outlog_inbox SET applied_at = 1 WHERE consumer = 'inventory' AND event_id = ` + cancelled, want: promises{OutOfOrder: 1}, checks: true},
		"an effect of no event":         {sql: `INSERT INTO outlog_inbox (consumer, event_id, position, applied_at) VALUES ('inventory', 'ghost', 1, 1)`, want: promises{Ghosts: 1}},
		"what was undone has come back": {gone: []string{first.eventID}, want: promises{Ghosts: 1}, checks: true},
		"a message of no event": {stream: func(t *testing.T, n *node.Node) {
			require.NoError(t, n.Broker().PublishRaw(t.Context(), "outlog.order.OrderCreated", nil, []byte("{}")))
		}, want: promises{Ghosts: 1}},
		"a message twice": {stream: republish(func(m []relay.Message) []relay.Message {
			return append(m, m[20])
		}), want: promises{Duplicated: 1}},
		"a message is missing": {stream: republish(func(m []relay.Message) []relay.Message {
			return slices.Delete(m, 5, 6)
		}), want: promises{Lost: 1}},
		"messages in the wrong order": {stream: republish(func(m []relay.Message) []relay.Message {
			m[0], m[1] = m[1], m[0] // both of the first order
			return m
		}), want: promises{OutOfOrder: 1}},
		"no stream": {stream: func(t *testing.T, n *node.Node) {
			require.NoError(t, n.Broker().Publisher().Recreate(t.Context(), 1))
		}, want: promises{Lost: 21}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := dataDir{t.TempDir()}
			require.NoError(t, copyDir(whole.Dir, dir.Dir))
			if c.sql != "" {
				tamper(t, dir, c.sql)
			}
			if c.stream != nil {
				require.NoError(t, withStream(t.Context(), dir, func(n *node.Node) error { c.stream(t, n); return nil }))
			}
			if c.list == nil {
				c.list = list
			}
			v, err := audit(t.Context(), dir, c.list, c.gone)
			require.NoError(t, err)
			require.Equal(t, c.want, v.promises)
			require.Equal(t, c.checks, newVerifyDocument(v.checks).OK, "%+v", v.checks)
			require.Equal(t, name == "nothing", v.kept())
		})
	}
}

// tamper changes a database behind everybody's back.
func tamper(t *testing.T, dir dataDir, statement string) {
	t.Helper()
	db, err := sql.Open("sqlite", dir.database())
	require.NoError(t, err)
	r, err := db.Exec(statement)
	require.NoError(t, err)
	n, err := r.RowsAffected()
	require.NoError(t, err)
	require.Positive(t, n, "it changed nothing")
	require.NoError(t, db.Close())
}

// republish makes the stream anew from its changed messages.
func republish(change func([]relay.Message) []relay.Message) func(*testing.T, *node.Node) {
	return func(t *testing.T, n *node.Node) {
		var all []relay.Message
		require.NoError(t, n.Broker().Scan(t.Context(), func(_ uint64, m relay.Message) error {
			m.Record.Payload = []byte("{}")
			all = append(all, m)
			return nil
		}))
		require.Len(t, all, 21)
		p := n.Broker().Publisher()
		require.NoError(t, p.Recreate(t.Context(), 1))
		all = change(all)
		stored, err := p.Append(t.Context(), 0, all)
		require.NoError(t, err)
		require.Equal(t, len(all), stored)
	}
}
