package orders

import (
	"context"
	"fmt"

	"outlog/store"
)

// inventoryRules: reservations follow from the orders, and stock from the
// reservations. An order that began before the consumer did is none of its
// business.
var inventoryRules = []rule{
	{"order", `
` + unapplied(Inventory) + `,
live (id) AS (
SELECT o.id FROM outlog_consumers c, orders o
 WHERE c.name = 'inventory'
   AND (o.status = 'created' OR o.id IN (SELECT order_id FROM unapplied WHERE type = 'OrderCancelled'))
   AND o.id NOT IN (SELECT order_id FROM unapplied WHERE type = 'OrderCreated')
   AND (c.start_position = 0 OR (SELECT ` + created + ` FROM outlog_aggregates a
                                  WHERE a.aggregate_type = 'order' AND a.aggregate_id = o.id) > c.start_position)),
expected (order_id, sku, qty) AS (
SELECT l.order_id, l.sku, sum(l.qty) FROM live JOIN order_lines l ON l.order_id = live.id GROUP BY l.order_id, l.sku)
SELECT coalesce(r.order_id, x.order_id), CASE WHEN r.qty IS NULL THEN 'has no reservation of ' || x.sku
       WHEN x.qty IS NULL THEN 'has a reservation of ' || r.sku || ' but should have none'
       ELSE 'has ' || r.qty || ' of ' || r.sku || ' reserved instead of ' || x.qty END
  FROM expected x FULL JOIN reservations r ON r.order_id = x.order_id AND r.sku = x.sku
 WHERE r.qty IS NOT x.qty`},
	{"reservation of order", `
SELECT r.order_id, 'was made by an event that is not its OrderCreated' FROM outlog_meta m, reservations r
  LEFT JOIN outbox e ON e.event_id = r.event_id
  LEFT JOIN outlog_aggregates a ON a.aggregate_type = 'order' AND a.aggregate_id = r.order_id
 WHERE CASE WHEN e.event_id IS NOT NULL THEN (e.aggregate_type, e.aggregate_id, e.type) IS NOT ('order', r.order_id, 'OrderCreated')
       ELSE a.version IS NULL OR ` + created + ` > m.pruned_through END`},
	{"SKU", `
SELECT coalesce(i.sku, r.sku), 'has ' || coalesce(i.reserved, 0) || ' reserved, its reservations are ' || coalesce(r.qty, 0)
  FROM inventory i FULL JOIN (SELECT sku, sum(qty) AS qty FROM reservations GROUP BY sku) r ON r.sku = i.sku
 WHERE coalesce(i.reserved, 0) <> coalesce(r.qty, 0)`},
}

func checkInventory(ctx context.Context, q store.Querier) (string, error) {
	_, waiting, ran, err := lag(ctx, q, Inventory)
	if err != nil {
		return "", err
	}
	if !ran {
		return "the consumer has not run here", nil
	}
	if err := broken(ctx, q, inventoryRules); err != nil {
		return "", err
	}
	var reservations, skus int64
	err = q.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM reservations), (SELECT count(*) FROM inventory)`).Scan(&reservations, &skus)
	return fmt.Sprintf("%d reservations of %d SKUs, %d events not applied yet", reservations, skus, waiting), err
}
