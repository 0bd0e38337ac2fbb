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

// clearInventory undoes what reserve and release did for events after a
// position. Rows of inventory stay, with nothing reserved if need be: what is
// on hand is not the consumer's.
func clearInventory(ctx context.Context, tx *store.Tx, after int64) error {
	for _, step := range []struct{ what, query string }{
		{"lower reserved stock", `
UPDATE inventory SET reserved = reserved - r.qty FROM (` + selectReserved + `) r WHERE r.sku = inventory.sku`},
		{"undo reservations", `
DELETE FROM reservations WHERE order_id IN (SELECT e.aggregate_id FROM outbox e
 WHERE e.position > ?1 AND e.aggregate_type = 'order' AND e.type = 'OrderCreated')`},
		{"restore reserved stock", `
UPDATE inventory SET reserved = reserved + r.qty FROM (` + unapplied(Inventory) + selectReleased + `
SELECT l.sku, sum(l.qty) AS qty FROM released JOIN order_lines l ON l.order_id = released.id GROUP BY l.sku) r WHERE r.sku = inventory.sku`},
		{"restore reservations", unapplied(Inventory) + selectReleased + `
INSERT INTO reservations (order_id, sku, qty, event_id)
SELECT l.order_id, l.sku, sum(l.qty), released.event_id FROM released JOIN order_lines l ON l.order_id = released.id GROUP BY l.order_id, l.sku`},
	} {
		if _, err := tx.ExecContext(ctx, step.query, after); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

// selectReserved adds up what orders created after position ?1 have reserved.
const selectReserved = `
SELECT r.sku, sum(r.qty) AS qty FROM outbox e JOIN reservations r ON r.order_id = e.aggregate_id
 WHERE e.position > ?1 AND e.aggregate_type = 'order' AND e.type = 'OrderCreated' GROUP BY r.sku`

// selectReleased goes on from unapplied with the orders that were reserved up
// to position ?1 and released after it. A reservation that is there was not
// released, whatever the log says. The id of a pruned OrderCreated is not known
// any more.
const selectReleased = `,
released (id, event_id) AS MATERIALIZED (
SELECT e.aggregate_id, coalesce(c.event_id, '') FROM outlog_consumers i
  JOIN outbox e ON e.position > ?1 AND e.position <= i.position
  LEFT JOIN outbox c ON c.position = e.previous_position
 WHERE i.name = 'inventory' AND e.aggregate_type = 'order' AND e.type = 'OrderCancelled'
   AND e.previous_position <= ?1 AND e.previous_position > i.start_position
   AND e.aggregate_id NOT IN (SELECT order_id FROM unapplied)
   AND NOT EXISTS (SELECT 1 FROM reservations WHERE order_id = e.aggregate_id))`
