package consumer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"outlog/store"
)

// Checks are the consumers' consistency checks, for verify.
var Checks = []store.Check{{Name: "consumers agree", Run: checkConsumers}}

// contradictions are the ways in which cursor, inbox and parked rows of a
// consumer can disagree. Each query returns consumer and position.
var contradictions = []struct{ what, query string }{
	{"is neither applied nor parked although the consumer is past it", `
SELECT c.name, o.position FROM outlog_consumers c JOIN outbox o ON o.position > max(c.start_position, c.inbox_through) AND o.position <= c.position
 WHERE EXISTS (SELECT 1 FROM json_each(c.types) WHERE value = o.type)
   AND NOT EXISTS (SELECT 1 FROM outlog_inbox i WHERE i.consumer = c.name AND i.event_id = o.event_id)
   AND NOT EXISTS (SELECT 1 FROM outlog_parked k WHERE k.consumer = c.name AND k.event_id = o.event_id)
   AND NOT EXISTS (SELECT 1 FROM outlog_attempts d WHERE d.consumer = c.name AND d.event_id = o.event_id AND d.outcome = 'discarded')
   AND NOT EXISTS (SELECT 1 FROM outlog_skips s WHERE s.consumer = c.name AND o.position > s.after_position AND o.position <= s.through_position)`},
	{"is both applied and parked", `
SELECT k.consumer, k.position FROM outlog_parked k JOIN outlog_inbox i ON i.consumer = k.consumer AND i.event_id = k.event_id`},
	{"is applied although it is not in the log", `
SELECT i.consumer, i.position FROM outlog_inbox i LEFT JOIN outbox o ON o.event_id = i.event_id, outlog_meta m
 WHERE i.position > m.pruned_through AND o.position IS NOT i.position`},
	{"is parked although it is not in the log", `
SELECT k.consumer, k.position FROM outlog_parked k LEFT JOIN outbox o ON o.event_id = k.event_id WHERE o.position IS NOT k.position`},
	{"is applied or parked although the consumer is not yet there", `
SELECT d.consumer, d.position FROM (SELECT consumer, event_id, position FROM outlog_inbox UNION ALL
       SELECT consumer, event_id, position FROM outlog_parked WHERE consumer <> 'relay') d LEFT JOIN outlog_consumers c ON c.name = d.consumer
 WHERE (c.name IS NULL OR d.position > c.position)
   AND NOT EXISTS (SELECT 1 FROM outlog_attempts h WHERE h.consumer = d.consumer AND h.event_id = d.event_id AND h.outcome = 'discarded')`},
	{"is where its inbox is pruned to, although the consumer is not yet there", `
SELECT name, inbox_through FROM outlog_consumers WHERE inbox_through > position`},
	{"is parked although the inbox is pruned there", `
SELECT k.consumer, k.position FROM outlog_parked k JOIN outlog_consumers c ON c.name = k.consumer WHERE k.position <= c.inbox_through`},
	{"waits behind nothing", `
SELECT k.consumer, k.position FROM outlog_parked k LEFT JOIN outlog_consumers c ON c.name = k.consumer WHERE k.state = 'blocked' AND NOT EXISTS (SELECT 1 FROM outlog_parked e
 WHERE e.consumer = k.consumer AND NOT (e.state = 'dead' AND c.on_dead IS 'skip') AND e.aggregate_type = k.aggregate_type AND e.aggregate_id = k.aggregate_id
   AND (e.position < k.position OR e.state = 'running'))`},
	{"was applied although an earlier event of its aggregate is parked", `
SELECT k.consumer, o.position FROM outlog_parked k JOIN outlog_aggregates a ON a.aggregate_type = k.aggregate_type AND a.aggregate_id = k.aggregate_id
  JOIN outbox o ON o.position = a.last_position AND o.position > k.position
  JOIN outlog_inbox i ON i.consumer = k.consumer AND i.event_id = o.event_id
  JOIN outlog_consumers c ON c.name = k.consumer AND c.on_dead = 'block'`},
}

func checkConsumers(ctx context.Context, q store.Querier) (string, error) {
	for _, c := range contradictions {
		var name string
		var position int64
		err := q.QueryRowContext(ctx, c.query+" LIMIT 1").Scan(&name, &position)
		if err == nil {
			return "", fmt.Errorf("consumer %s: event at position %d %s", name, position, c.what)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return "", err
		}
	}
	var consumers, applied, parked, skipped int64
	err := q.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM outlog_consumers), (SELECT count(*) FROM outlog_inbox),
		(SELECT count(*) FROM outlog_parked WHERE consumer <> 'relay'),
		(SELECT count(*) FROM outlog_skips s JOIN outbox o ON o.position > s.after_position AND o.position <= s.through_position)`).
		Scan(&consumers, &applied, &parked, &skipped)
	return fmt.Sprintf("%d consumers, %d applied, %d parked, %d skipped by resets", consumers, applied, parked, skipped), err
}
