package outbox

import (
	"context"
	"fmt"
	"time"

	"outlog/store"
)

// Holder is somebody who needs the events after Position.
type Holder struct {
	Kind     string `json:"kind"` // consumer, parked, relay, stream
	Name     string `json:"name"` // of the consumer
	Position int64  `json:"position"`
}

// String says who needs what, and what to do about it.
func (h Holder) String() string {
	switch h.Kind {
	case "consumer":
		return fmt.Sprintf("consumer %s has not read past position %d; `outlog consumers remove %s` if it is not used any more", h.Name, h.Position, h.Name)
	case "parked":
		return fmt.Sprintf("the event at position %d is parked at %s; `outlog dead list --consumer %s` shows what waits for you", h.Position+1, h.Name, h.Name)
	case "stream":
		return fmt.Sprintf("the events after position %d were published less than %v ago", h.Position, settled)
	default:
		return fmt.Sprintf("the relay has not published past position %d", h.Position)
	}
}

// holders: who needs an event above ?1, up to ?2. A publication counts for as
// long as it is younger than ?3. One that bears a future time was made by a
// wrong clock: then the first later one on the stream with a time of the past
// says how old it is at least.
const holders = `
SELECT kind, name, position FROM (
SELECT 'consumer' AS kind, name, position FROM outlog_consumers
UNION ALL
SELECT 'parked', consumer, min(position) - 1 FROM outlog_parked WHERE position <= ?2 GROUP BY consumer
UNION ALL
SELECT 'relay', name, position FROM outlog_relay WHERE token > 0 AND ?4
UNION ALL
SELECT 'stream', 'main', max(min(p.first_position) - 1, ?1) FROM outlog_publications p
 WHERE p.first_position BETWEEN coalesce((SELECT max(first_position) FROM outlog_publications WHERE first_position <= ?1), 0) AND ?2
   AND p.last_position > ?1 AND p.published_at > ?3 AND ?4
   AND NOT EXISTS (SELECT 1 FROM outlog_publications l WHERE p.published_at > ?5
                      AND l.first_position > p.first_position AND l.first_stream_seq > p.last_stream_seq AND l.published_at <= ?3)
) WHERE position < ?2 ORDER BY position, kind, name`

// Holders returns who keeps the events after position after, up to through,
// from being pruned at this time, the first in the log first. Cost: it reads
// all parked rows, and the publications of these events.
func Holders(ctx context.Context, q store.Querier, after, through int64, now time.Time, n Needs) ([]Holder, error) {
	rows, err := q.QueryContext(ctx, holders, after, through, now.Add(-settled).UnixMicro(), !n.NoRelay, now.UnixMicro())
	if err != nil {
		return nil, fmt.Errorf("look who needs the log: %w", err)
	}
	defer rows.Close()
	var out []Holder
	for rows.Next() {
		var h Holder
		if err := rows.Scan(&h.Kind, &h.Name, &h.Position); err != nil {
			return nil, fmt.Errorf("look who needs the log: %w", err)
		}
		out = append(out, h)
	}
	return out, rows.Err()
}
