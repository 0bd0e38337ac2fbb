package orders

import (
	"context"
	"encoding/json"
	"fmt"

	"outlog/consumer"
	"outlog/store"
)

// The consumer inventory. Its statements insert without "OR IGNORE": if an
// event were ever applied twice, the second time must fail and be seen.

// reserve takes the order's stock, whether or not there is enough. Quantities
// of one SKU are summed.
func reserve(ctx context.Context, tx *store.Tx, e consumer.Event[OrderCreated]) error {
	if err := checkOrder(e, e.Data.OrderID); err != nil {
		return err
	}
	if err := insertReservations(ctx, tx, e.AggregateID, e.ID, e.Data.Lines); err != nil {
		return fmt.Errorf("reserve: %w", err)
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO inventory (sku, on_hand, reserved)
		SELECT sku, 0, qty FROM reservations WHERE order_id = ?
		ON CONFLICT (sku) DO UPDATE SET reserved = reserved + excluded.reserved`, e.AggregateID)
	if err != nil {
		return fmt.Errorf("raise reserved stock: %w", err)
	}
	return nil
}

// insertReservations writes them with one statement, like insertLines.
func insertReservations(ctx context.Context, tx *store.Tx, orderID, eventID string, lines []Line) error {
	if len(lines) == 1 {
		_, err := tx.ExecContext(ctx, `INSERT INTO reservations (order_id, sku, qty, event_id) VALUES (?, ?, ?, ?)`,
			orderID, lines[0].SKU, lines[0].Qty, eventID)
		return err
	}
	b, err := json.Marshal(lines)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO reservations (order_id, sku, qty, event_id)
		SELECT ?1, value ->> 'sku', sum(value ->> 'qty'), ?2 FROM json_each(?3) GROUP BY 2`, orderID, eventID, string(b))
	return err
}

// release gives back what reserve took.
func release(ctx context.Context, tx *store.Tx, e consumer.Event[OrderCancelled]) error {
	if err := checkOrder(e, e.Data.OrderID); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `UPDATE inventory SET reserved = reserved - r.qty
		FROM reservations r WHERE r.order_id = ? AND r.sku = inventory.sku`, e.AggregateID)
	if err != nil {
		return fmt.Errorf("lower reserved stock: %w", err)
	}
	if _, err := tx.ExecContext(ctx, `DELETE FROM reservations WHERE order_id = ?`, e.AggregateID); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	return nil
}
