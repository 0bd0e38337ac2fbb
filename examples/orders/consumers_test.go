package orders

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/outbox"
	"outlog/store"
)

func TestConsumers(t *testing.T) {
	r := open(t)
	for _, o := range Consumers() {
		_, err := consumer.New(r.DB, r.Log, nil, o)
		require.NoError(t, err)
		for _, route := range o.Routes {
			require.Contains(t, handlers[o.Name], route.Type(), "the tests apply what the routes do")
		}
		require.Len(t, o.Routes, len(handlers[o.Name]))
	}
}

func TestInventory(t *testing.T) {
	r := open(t)
	r.exec(`INSERT INTO inventory (sku, on_hand) VALUES ('pen', 4)`)
	first, second := r.place(book), r.place(book)

	r.consume(Inventory, 100)
	require.Equal(t, int64(10), r.ask(`SELECT reserved FROM inventory WHERE sku = 'pen'`), "more than on hand: a backorder")
	require.Equal(t, int64(4), r.ask(`SELECT on_hand FROM inventory WHERE sku = 'pen'`))
	require.Equal(t, int64(0), r.ask(`SELECT on_hand FROM inventory WHERE sku = 'ink'`), "a SKU seen for the first time")
	require.Equal(t, int64(5), r.ask(`SELECT qty FROM reservations WHERE order_id = ? AND sku = 'pen' AND event_id = ?`, first.OrderID, first.EventID))

	r.cancel(first.OrderID)
	r.consume(Inventory, 100)
	require.Equal(t, int64(5), r.ask(`SELECT reserved FROM inventory WHERE sku = 'pen'`))
	require.Equal(t, int64(2), r.ask(`SELECT count(*) FROM reservations WHERE order_id = ?`, second.OrderID))
	require.Equal(t, int64(2), r.ask(`SELECT count(*) FROM reservations`))
}

func TestNotifications(t *testing.T) {
	r := open(t)
	placed := r.place(book)
	cancelled := r.cancel(placed.OrderID)
	r.consume(Notifications, 100)
	for _, want := range []struct{ eventID, kind, body string }{
		{placed.EventID, "order_created", "Dear ada, your order " + placed.OrderID + " over 17.19 was received: 3 line(s)."},
		{cancelled.EventID, "order_cancelled", "Dear ada, your order " + placed.OrderID + " was cancelled."},
	} {
		require.Equal(t, int64(1), r.ask(`SELECT count(*) FROM notifications
			WHERE (event_id, order_id, kind, recipient, body) = (?, ?, ?, 'ada', ?)`, want.eventID, placed.OrderID, want.kind, want.body))
	}
}

// TestSecondTimeFails applies each event again, as a broken engine would: each
// handler must refuse or change nothing.
func TestSecondTimeFails(t *testing.T) {
	r := open(t)
	placed := r.place(book)
	r.consume(Inventory, 100)
	r.consume(Notifications, 100)
	events, err := r.Log.Read(t.Context(), 0, outbox.Page{})
	require.NoError(t, err)
	for _, name := range []string{Inventory, Notifications} {
		err := r.Update(t.Context(), func(tx *store.Tx) error { return handlers[name][TypeOrderCreated](t.Context(), tx, events[0]) })
		require.True(t, store.IsConstraint(err), "%s: %v", name, err)
	}
	require.Equal(t, int64(5), r.ask(`SELECT reserved FROM inventory WHERE sku = 'pen'`))
	require.Equal(t, placed.EventID, events[0].EventID)
}

// TestForeignPayload refuses an event whose payload is about another order.
func TestForeignPayload(t *testing.T) {
	r := open(t)
	for name, byType := range handlers {
		for eventType, handle := range byType {
			err := r.Update(t.Context(), func(tx *store.Tx) error {
				return handle(context.Background(), tx, outbox.Record{EventID: "e", AggregateType: "order", AggregateID: "1",
					Type: eventType, Payload: []byte(`{"order_id":"2","customer_id":"ada"}`)})
			})
			require.ErrorContains(t, err, `order_id "2"`, "%s %s", name, eventType)
		}
	}
}
