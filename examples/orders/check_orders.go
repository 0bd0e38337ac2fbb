package orders

import (
	"context"
	"fmt"

	"outlog/store"
)

// orderRules use that an order has version 1 and OrderCreated, then version 2
// and OrderCancelled. Pruned events are not missed: outlog_aggregates keeps
// where each order's last one was, and each event where the one before was.
var orderRules = []rule{
	{"order", `
SELECT * FROM (
SELECT o.id, CASE
       WHEN a.version IS NULL THEN 'has no event'
       WHEN a.version <> o.version THEN 'is at version ' || o.version || ', its events are at ' || a.version
       WHEN o.status <> CASE o.version WHEN 1 THEN 'created' WHEN 2 THEN 'cancelled' ELSE '' END
            THEN 'has status ' || o.status || ' at version ' || o.version
       WHEN a.last_position > m.pruned_through AND (e.aggregate_type, e.aggregate_id, e.aggregate_version, e.type) IS NOT
            ('order', o.id, o.version, CASE o.version WHEN 1 THEN 'OrderCreated' ELSE 'OrderCancelled' END)
            THEN 'lacks its last event, at position ' || a.last_position
       WHEN o.total_cents IS NOT (SELECT sum(qty * unit_price_cents) FROM order_lines WHERE order_id = o.id)
            THEN 'has a total that is not that of its lines'
       END AS fault
  FROM outlog_meta m, orders o
  LEFT JOIN outlog_aggregates a ON a.aggregate_type = 'order' AND a.aggregate_id = o.id
  LEFT JOIN outbox e ON e.position = a.last_position) WHERE fault IS NOT NULL`},
	{"event", `
SELECT * FROM (
SELECT e.event_id, CASE
       WHEN o.id IS NULL THEN 'is of order ' || e.aggregate_id || ', which does not exist'
       WHEN e.aggregate_version <> CASE e.type WHEN 'OrderCreated' THEN 1 ELSE 2 END THEN 'has version ' || e.aggregate_version
       WHEN e.previous_position > m.pruned_through AND (p.aggregate_id, p.type) IS NOT (e.aggregate_id, 'OrderCreated')
            THEN 'follows an event that is missing, at position ' || e.previous_position
       END AS fault
  FROM outlog_meta m, outbox e
  LEFT JOIN orders o ON o.id = e.aggregate_id
  LEFT JOIN outbox p ON p.position = e.previous_position
 WHERE e.aggregate_type = 'order' AND e.type IN ('OrderCreated', 'OrderCancelled')) WHERE fault IS NOT NULL`},
	{"order", `
SELECT a.aggregate_id, 'does not exist, but it had events' FROM outlog_meta m, outlog_aggregates a
 WHERE a.aggregate_type = 'order' AND a.last_position <= m.pruned_through AND NOT EXISTS (SELECT 1 FROM orders WHERE id = a.aggregate_id)`},
	{"order", `
SELECT l.order_id, 'does not exist, but it has lines' FROM order_lines l
 WHERE l.line_no = 1 AND NOT EXISTS (SELECT 1 FROM orders WHERE id = l.order_id)`},
}

func checkOrders(ctx context.Context, q store.Querier) (string, error) {
	if err := broken(ctx, q, orderRules); err != nil {
		return "", err
	}
	var orders, events int64
	err := q.QueryRowContext(ctx, `SELECT count(*), coalesce(sum(version), 0) FROM orders`).Scan(&orders, &events)
	return fmt.Sprintf("%d orders with %d events", orders, events), err
}
