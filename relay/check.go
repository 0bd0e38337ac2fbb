package relay

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"outlog/store"
)

// Checks are the relay's consistency checks, for verify.
var Checks = []store.Check{{Name: "published or pending", Run: checkPublications}}

// checkPublications proves that each event up to the relay's cursor is in
// exactly one publication (or parked at the relay), none after it is, and that
// each publication has as many rows as stream sequences.
func checkPublications(ctx context.Context, q store.Querier) (string, error) {
	var cursor, pruned, pending int64
	err := q.QueryRowContext(ctx, `SELECT r.position, m.pruned_through, (SELECT count(*) FROM outbox WHERE position > r.position)
		FROM outlog_relay r, outlog_meta m WHERE r.name = 'main'`).Scan(&cursor, &pruned, &pending)
	if err != nil {
		return "", err
	}
	var first int64
	err = q.QueryRowContext(ctx, `SELECT first_position FROM outlog_publications
		WHERE first_position > ?1 AND last_stream_seq - first_stream_seq + 1 <>
		      (SELECT count(*) FROM outbox WHERE position BETWEEN first_position AND last_position)
		UNION ALL
		SELECT p.first_position FROM outlog_publications p JOIN outlog_publications n
		    ON n.first_position = (SELECT min(first_position) FROM outlog_publications WHERE first_position > p.first_position)
		 WHERE n.first_position <= p.last_position
		UNION ALL
		SELECT first_position FROM outlog_publications WHERE last_position > ?2
		LIMIT 1`, pruned, cursor).Scan(&first)
	if err == nil {
		return "", fmt.Errorf("the publication at position %d does not fit the log", first)
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return "", err
	}
	var published, covered, parked int64
	err = q.QueryRowContext(ctx, `SELECT
		(SELECT count(*) FROM outbox WHERE position <= ?1),
		(SELECT coalesce(sum((SELECT count(*) FROM outbox WHERE position BETWEEN p.first_position AND p.last_position)), 0) FROM outlog_publications p),
		(SELECT count(*) FROM outlog_parked WHERE consumer = 'relay' AND position <= ?1)`, cursor).Scan(&published, &covered, &parked)
	if err != nil {
		return "", err
	}
	if published != covered+parked {
		return "", fmt.Errorf("of %d events up to the relay's position %d, %d are in publications and %d parked", published, cursor, covered, parked)
	}
	return fmt.Sprintf("%d published, %d parked, %d pending", covered, parked, pending), nil
}
