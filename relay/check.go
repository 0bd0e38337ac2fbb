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

// faults are the ways in which publications and parked events can contradict
// the log. Each query takes the prune horizon and the relay's cursor and
// returns a position.
var faults = []struct{ what, query string }{
	{"the publication that begins there has more or fewer events than sequences", `
SELECT first_position FROM outlog_publications
 WHERE first_position > ?1 AND last_stream_seq - first_stream_seq + 1 <>
       (SELECT count(*) FROM outbox WHERE position BETWEEN first_position AND last_position)`},
	{"the publication that begins there overlaps another in positions", `
SELECT first_position FROM (SELECT first_position, lag(last_position) OVER (ORDER BY first_position) AS before FROM outlog_publications)
 WHERE first_position <= before`},
	{"the publication that begins there overlaps another in sequences", `
SELECT first_position FROM (SELECT first_position, first_stream_seq, lag(last_stream_seq) OVER (ORDER BY first_stream_seq) AS before FROM outlog_publications)
 WHERE first_stream_seq <= before`},
	{"it is published although the relay is not yet there", `
SELECT last_position FROM outlog_publications WHERE last_position > ?2`},
	{"it is both published and parked at the relay", `
SELECT k.position FROM outlog_parked k WHERE k.consumer = 'relay' AND k.position <=
       (SELECT last_position FROM outlog_publications WHERE first_position <= k.position ORDER BY first_position DESC LIMIT 1)`},
	{"it is neither published, parked, discarded nor skipped although the relay is past it", `
WITH seen (first, last) AS (SELECT first_position, last_position FROM outlog_publications UNION ALL SELECT ?1, ?1),
     gap (after, before) AS (SELECT max(last) OVER (ORDER BY first ROWS UNBOUNDED PRECEDING), lead(first, 1, ?2 + 1) OVER (ORDER BY first) FROM seen)
SELECT o.position FROM gap JOIN outbox o ON o.position > gap.after AND o.position < min(gap.before, ?2 + 1)
 WHERE NOT EXISTS (SELECT 1 FROM outlog_parked k WHERE k.consumer = 'relay' AND k.event_id = o.event_id)
   AND NOT EXISTS (SELECT 1 FROM outlog_attempts d WHERE d.consumer = 'relay' AND d.event_id = o.event_id AND d.outcome = 'discarded')
   AND NOT EXISTS (SELECT 1 FROM outlog_skips s WHERE s.consumer = 'relay' AND o.position > s.after_position AND o.position <= s.through_position)`},
}

// checkPublications proves that each event up to the relay's cursor is in
// exactly one publication, or parked at the relay, discarded there, or was too
// old when the stream was rebuilt; that none after the cursor is; and that each
// publication has as many events as sequences, its own.
func checkPublications(ctx context.Context, q store.Querier) (string, error) {
	var pruned, cursor int64
	err := q.QueryRowContext(ctx, `SELECT m.pruned_through, r.position FROM outlog_meta m, outlog_relay r WHERE r.name = 'main'`).Scan(&pruned, &cursor)
	if err != nil {
		return "", err
	}
	for _, f := range faults {
		var position int64
		err := q.QueryRowContext(ctx, f.query+" LIMIT 1", pruned, cursor).Scan(&position)
		if err == nil {
			return "", fmt.Errorf("event at position %d: %s", position, f.what)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return "", err
		}
	}
	var published, parked, pending int64
	err = q.QueryRowContext(ctx, `SELECT
		(SELECT coalesce(sum(last_stream_seq - first_stream_seq + 1), 0) FROM outlog_publications),
		(SELECT count(*) FROM outlog_parked WHERE consumer = 'relay'),
		(SELECT count(*) FROM outbox o WHERE position > ? AND NOT EXISTS (SELECT 1 FROM outlog_parked k WHERE k.consumer = 'relay' AND k.event_id = o.event_id))`,
		cursor).Scan(&published, &parked, &pending)
	return fmt.Sprintf("%d published, %d parked, %d pending", published, parked, pending), err
}
