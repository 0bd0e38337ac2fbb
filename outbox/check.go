package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"outlog/store"
)

// checks are the log's own consistency checks, for verify.
var checks = []store.Check{{Name: "contiguous versions", Run: checkVersions}}

// checkVersions proves that above the prune horizon each event follows the one
// before it of its aggregate, and that each aggregate ends where
// outlog_aggregates says. A removed row breaks one or the other.
func checkVersions(ctx context.Context, q store.Querier) (string, error) {
	var position, version int64
	err := q.QueryRowContext(ctx, `
SELECT o.position, o.aggregate_version
  FROM outbox o LEFT JOIN outbox p ON p.position = o.previous_position, outlog_meta m
 WHERE CASE WHEN o.previous_position = 0 THEN o.aggregate_version <> 1
            WHEN o.previous_position <= m.pruned_through THEN 0
            ELSE (p.aggregate_type, p.aggregate_id, p.aggregate_version) IS NOT
                 (o.aggregate_type, o.aggregate_id, o.aggregate_version - 1) END
 LIMIT 1`).Scan(&position, &version)
	if err == nil {
		return "", fmt.Errorf("event at position %d has version %d, but the event before it is missing", position, version)
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return "", err
	}
	var a Aggregate
	err = q.QueryRowContext(ctx, `
SELECT a.aggregate_type, a.aggregate_id, a.last_position
  FROM outlog_aggregates a LEFT JOIN outbox o ON o.position = a.last_position, outlog_meta m
 WHERE a.last_position > m.pruned_through
   AND (o.aggregate_type, o.aggregate_id, o.aggregate_version) IS NOT (a.aggregate_type, a.aggregate_id, a.version)
 LIMIT 1`).Scan(&a.Type, &a.ID, &position)
	if err == nil {
		return "", fmt.Errorf("the last event of %s %s, at position %d, is missing", a.Type, a.ID, position)
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return "", err
	}
	var events, aggregates int64
	err = q.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM outbox), (SELECT count(*) FROM outlog_aggregates)`).Scan(&events, &aggregates)
	return fmt.Sprintf("%d events of %d aggregates", events, aggregates), err
}
