package orders

import (
	"context"
	"fmt"

	"outlog/store"
)

// inventoryRules: reservations follow from the orders, and stock from the
// reservations. An order that began before the consumer did is none of its
// business. Both sides are added up per key in one pass: half the time of a
// full join.
var inventoryRules = []rule{
	{"order", `
` + unapplied(Inventory) + `,
live (id) AS (
SELECT o.id FROM outlog_consumers c, orders o
 WHERE c.name = 'inventory'
   AND (o.status = 'created' OR o.id IN (SELECT order_id FROM unapplied WHERE type = 'OrderCancelled'))
   AND o.id NOT IN (SELECT order_id FROM unapplied WHERE type = 'OrderCreated')
   AND (c.start_position = 0 OR (SELECT ` + created + ` FROM outlog_aggregates a
                                  WHERE a.aggregate_type = 'order' AND a.aggregate_id = o.id) > c.start_position))
SELECT order_id, 'has ' || sum(reserved) || ' of ' || sku || ' reserved instead of ' || sum(ordered)
  FROM (SELECT l.order_id, l.sku, l.qty AS ordered, 0 AS reserved FROM live JOIN order_lines l ON l.order_id = live.id
        UNION ALL SELECT order_id, sku, 0, qty FROM reservations)
 GROUP BY order_id, sku HAVING sum(reserved) <> sum(ordered)`},
	{"reservation of order", `
SELECT r.order_id, 'was made by an event that is not its OrderCreated' FROM outlog_meta m, reservations r
  LEFT JOIN outbox e ON e.event_id = r.event_id
  LEFT JOIN outlog_aggregates a ON a.aggregate_type = 'order' AND a.aggregate_id = r.order_id
 WHERE CASE WHEN e.event_id IS NOT NULL THEN (e.aggregate_type, e.aggregate_id, e.type) IS NOT ('order', r.order_id, 'OrderCreated')
       ELSE a.version IS NULL OR ` + created + ` > m.pruned_through END`},
	{"SKU", `
SELECT sku, 'has ' || sum(reserved) || ' reserved, its reservations are ' || sum(qty)
  FROM (SELECT sku, reserved, 0 AS qty FROM inventory UNION ALL SELECT sku, 0, qty FROM reservations)
 GROUP BY sku HAVING sum(reserved) <> sum(qty)`},
}

func checkInventory(ctx context.Context, q store.Querier) (string, error) {
	p, err := readProgress(ctx, q, Inventory)
	if err != nil {
		return "", err
	}
	if !p.ran {
		return "the consumer has not run here", nil
	}
	if err := broken(ctx, q, inventoryRules); err != nil {
		return "", err
	}
	var reservations, skus int64
	err = q.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM reservations), (SELECT count(*) FROM inventory)`).Scan(&reservations, &skus)
	return fmt.Sprintf("%d reservations of %d SKUs, %d events not applied", reservations, skus, p.waiting), err
}
