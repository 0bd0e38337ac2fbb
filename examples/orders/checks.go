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
// applied: those it has parked, those after its cursor without an inbox row,
// those that a person discarded, and those that a reset skipped. Usually few.
func unapplied(consumer string) string {
	return strings.ReplaceAll(unappliedSQL, "$consumer", consumer)
}

const unappliedSQL = `
WITH left_out (after_position, through_position) AS MATERIALIZED (
SELECT position - 1, position FROM outlog_attempts WHERE consumer = '$consumer' AND outcome = 'discarded'
UNION ALL
SELECT after_position, through_position FROM outlog_skips WHERE consumer = '$consumer'),
pruned_left_out (after_position, through_position) AS MATERIALIZED (
SELECT after_position, min(through_position, pruned_through) FROM left_out, outlog_meta WHERE after_position < pruned_through),
unapplied (event_id, order_id, type) AS MATERIALIZED (
SELECT e.event_id, e.aggregate_id, e.type FROM outlog_consumers c JOIN outbox e ON e.position > c.position
 WHERE c.name = '$consumer' AND e.aggregate_type = 'order' AND e.type IN ('OrderCreated', 'OrderCancelled')
   AND NOT EXISTS (SELECT 1 FROM outlog_inbox i WHERE i.consumer = c.name AND i.event_id = e.event_id)
UNION
SELECT e.event_id, e.aggregate_id, e.type FROM outlog_parked k JOIN outbox e ON e.event_id = k.event_id
 WHERE k.consumer = '$consumer' AND e.aggregate_type = 'order' AND e.type IN ('OrderCreated', 'OrderCancelled')
UNION
SELECT e.event_id, e.aggregate_id, e.type FROM left_out l JOIN outbox e ON e.position > l.after_position AND e.position <= l.through_position
 WHERE e.aggregate_type = 'order' AND e.type IN ('OrderCreated', 'OrderCancelled')
UNION -- pruned: an order remembers where its last event was, an event where the one before it was
SELECT a.aggregate_id || a.version, a.aggregate_id, CASE a.version WHEN 1 THEN 'OrderCreated' ELSE 'OrderCancelled' END
  FROM pruned_left_out l CROSS JOIN outlog_aggregates a
 WHERE a.aggregate_type = 'order' AND a.last_position > l.after_position AND a.last_position <= l.through_position
UNION
SELECT e.aggregate_id || 1, e.aggregate_id, 'OrderCreated' FROM pruned_left_out l CROSS JOIN outbox e
 WHERE e.aggregate_type = 'order' AND e.type = 'OrderCancelled' AND e.previous_position > l.after_position AND e.previous_position <= l.through_position)`

// created gives, for aggregate a of an order, the position of its OrderCreated;
// NULL if that is pruned for certain.
const created = `CASE a.version WHEN 1 THEN a.last_position
                 ELSE (SELECT previous_position FROM outbox WHERE position = a.last_position) END`

// progress is how far a consumer is.
type progress struct {
	ran     bool
	start   int64 // events up to here are none of its business
	waiting int64 // events that it has not applied
	counts  bool  // waiting has all of them: none may have been left out and then pruned
}

func readProgress(ctx context.Context, q store.Querier, consumer string) (p progress, err error) {
	err = q.QueryRowContext(ctx, unapplied(consumer)+`
		SELECT start_position, (SELECT count(*) FROM unapplied), NOT EXISTS (SELECT 1 FROM pruned_left_out)
		  FROM outlog_consumers WHERE name = ?`, consumer).Scan(&p.start, &p.waiting, &p.counts)
	if errors.Is(err, sql.ErrNoRows) {
		return progress{}, nil
	}
	p.ran = err == nil
	return p, err
}
