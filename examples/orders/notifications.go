package orders

import (
	"context"
	"fmt"

	"outlog/consumer"
	"outlog/store"
)

// The consumer notifications. Writing the row is the whole effect; sending it
// somewhere would be a consumer with an external effect.

func notifyCreated(ctx context.Context, tx *store.Tx, e consumer.Event[OrderCreated]) error {
	if err := checkOrder(e, e.Data.OrderID); err != nil {
		return err
	}
	body := fmt.Sprintf("Dear %s, your order %s over %s was received: %d line(s).",
		e.Data.CustomerID, e.AggregateID, money(e.Data.TotalCents), len(e.Data.Lines))
	return notify(ctx, tx, e.ID, e.AggregateID, "order_created", e.Data.CustomerID, body)
}

func notifyCancelled(ctx context.Context, tx *store.Tx, e consumer.Event[OrderCancelled]) error {
	if err := checkOrder(e, e.Data.OrderID); err != nil {
		return err
	}
	body := fmt.Sprintf("Dear %s, your order %s was cancelled.", e.Data.CustomerID, e.AggregateID)
	return notify(ctx, tx, e.ID, e.AggregateID, "order_cancelled", e.Data.CustomerID, body)
}

// notify writes one notification. A second one for the same event is an error
// on purpose: it would mean that the event was applied twice.
func notify(ctx context.Context, tx *store.Tx, eventID, orderID, kind, recipient, body string) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO notifications (event_id, order_id, kind, recipient, body, sent_at)
		VALUES (?, ?, ?, ?, ?, ?)`, eventID, orderID, kind, recipient, body, tx.Now().UnixMicro())
	if err != nil {
		return fmt.Errorf("notify: %w", err)
	}
	return nil
}

// clearNotifications undoes what was written for events after a position.
func clearNotifications(ctx context.Context, tx *store.Tx, after int64) error {
	_, err := tx.ExecContext(ctx, `DELETE FROM notifications WHERE event_id IN (SELECT event_id FROM outbox WHERE position > ?)`, after)
	return err
}

func money(cents int64) string { return fmt.Sprintf("%d.%02d", cents/100, cents%100) }
