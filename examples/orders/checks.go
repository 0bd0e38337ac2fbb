package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"outlog/store"
)

// Checks returns the service's consistency checks, for verify. Each reads one
// snapshot, so it is right and strict beside a running node too: for every
// event it knows from cursor, inbox and parked rows whether a consumer has
// applied it. Cost: a few scans of each table, in line with its size.
func Checks() []store.Check {
	return []store.Check{
		{Name: "orders and their events", Run: checkOrders},
		{Name: "one notification per event", Run: checkNotifications},
		{Name: "reserved stock", Run: checkInventory},
	}
}

// rule is one way in which data can be wrong: a query that returns the name
// and the fault of each thing that is.
type rule struct{ subject, query string }

// broken returns the first violation of the rules as an error.
func broken(ctx context.Context, q store.Querier, rules []rule) error {
	for _, r := range rules {
		var name, fault string
		err := q.QueryRowContext(ctx, r.query+" LIMIT 1").Scan(&name, &fault)
		if err == nil {
			return fmt.Errorf("%s %s %s", r.subject, name, fault)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
	}
	return nil
}

// unapplied is a common table of the order events that a consumer has not
// applied: those it has parked, and those after its cursor without an inbox
// row. Usually few.
func unapplied(consumer string) string {
	return strings.ReplaceAll(unappliedSQL, "$consumer", consumer)
}

const unappliedSQL = `
WITH unapplied (event_id, order_id, type) AS MATERIALIZED (
SELECT e.event_id, e.aggregate_id, e.type FROM outlog_consumers c JOIN outbox e ON e.position > c.position
 WHERE c.name = '$consumer' AND e.aggregate_type = 'order' AND e.type IN ('OrderCreated', 'OrderCancelled')
   AND NOT EXISTS (SELECT 1 FROM outlog_inbox i WHERE i.consumer = c.name AND i.event_id = e.event_id)
UNION
SELECT e.event_id, e.aggregate_id, e.type FROM outlog_parked k JOIN outbox e ON e.event_id = k.event_id
 WHERE k.consumer = '$consumer' AND e.aggregate_type = 'order' AND e.type IN ('OrderCreated', 'OrderCancelled'))`

// created gives, for aggregate a of an order, the position of its OrderCreated;
// NULL if that is pruned for certain.
const created = `CASE a.version WHEN 1 THEN a.last_position
                 ELSE (SELECT previous_position FROM outbox WHERE position = a.last_position) END`

// lag says how far a consumer is.
func lag(ctx context.Context, q store.Querier, consumer string) (start, waiting int64, ran bool, err error) {
	err = q.QueryRowContext(ctx, unapplied(consumer)+`
		SELECT start_position, (SELECT count(*) FROM unapplied) FROM outlog_consumers WHERE name = ?`, consumer).Scan(&start, &waiting)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, 0, false, nil
	}
	return start, waiting, err == nil, err
}
