package outbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/oklog/ulid/v2"

	"outlog/store"
)

const selectRecord = `SELECT position, event_id, aggregate_type, aggregate_id, aggregate_version, previous_position,
	type, schema_version, content_type, payload, headers, created_at FROM outbox`

func scanRecord(row interface{ Scan(...any) error }) (Record, error) {
	var r Record
	var at int64
	err := row.Scan(&r.Position, &r.EventID, &r.AggregateType, &r.AggregateID, &r.AggregateVersion, &r.Previous,
		&r.Type, &r.SchemaVersion, &r.ContentType, &r.Payload, &r.RawHeaders, &at)
	r.CreatedAt = time.UnixMicro(at).UTC()
	return r, err
}

// Page bounds a read: it ends at Rows rows, or when the payloads read reach
// Bytes, or after position Through. Zero fields do not bound.
type Page struct {
	Rows    int
	Bytes   int
	Through int64
}

// Read returns the events after position after, in log order. The records are
// shared with those who Follow: nobody may change them. It takes the rows from
// the driver, which costs a third of database/sql's Scan.
func (l *Log) Read(ctx context.Context, after int64, page Page) ([]Record, error) {
	if page.Rows <= 0 {
		page.Rows = -1
	}
	if page.Through <= 0 {
		page.Through = 1<<63 - 1
	}
	var out []Record
	size := 0
	err := l.db.Scan(ctx, selectPage, []any{after, page.Through, int64(page.Rows)}, func(v []driver.Value) bool {
		out = append(out, recordOf(v))
		r := &out[len(out)-1]
		size += len(r.Payload) + len(r.RawHeaders)
		return page.Bytes <= 0 || size < page.Bytes
	})
	if err != nil {
		return nil, fmt.Errorf("read log after %d: %w", after, err)
	}
	l.tail.add(after, out)
	return out, nil
}

// recordOf is scanRecord for the driver's values.
func recordOf(v []driver.Value) Record {
	text := func(i int) string { s, _ := v[i].(string); return s }
	number := func(i int) int64 { n, _ := v[i].(int64); return n }
	payload, _ := v[9].([]byte)
	return Record{Position: number(0), EventID: text(1), AggregateType: text(2), AggregateID: text(3),
		AggregateVersion: number(4), Previous: number(5), Type: text(6), SchemaVersion: int(number(7)),
		ContentType: text(8), Payload: payload, RawHeaders: text(10), CreatedAt: time.UnixMicro(number(11)).UTC()}
}

const selectPage = selectRecord + ` WHERE position > ? AND position <= ? ORDER BY position LIMIT ?`

// Head returns the position of the last event, 0 if there was never one.
func (l *Log) Head(ctx context.Context) (int64, error) {
	var head int64
	err := l.db.Reader().QueryRowContext(context.WithoutCancel(ctx),
		`SELECT max(coalesce((SELECT max(position) FROM outbox), 0), (SELECT pruned_through FROM outlog_meta))`).Scan(&head)
	return head, err
}

// Get returns the event with this id, or ErrNotFound.
func (l *Log) Get(ctx context.Context, eventID string) (Record, error) {
	r, err := scanRecord(l.db.Reader().QueryRowContext(ctx, selectRecord+` WHERE event_id = ?`, eventID))
	if errors.Is(err, sql.ErrNoRows) {
		return r, fmt.Errorf("%w: %s", ErrNotFound, eventID)
	}
	return r, err
}

// Aggregate returns the events of one aggregate that the log still holds, in
// version order; none is not an error. It follows Previous from the last one:
// one row read per event.
func (l *Log) Aggregate(ctx context.Context, a Aggregate) ([]Record, error) {
	return AggregateFrom(ctx, l.db.Reader(), a)
}

// AggregateFrom is Aggregate through q, which may be a transaction.
func AggregateFrom(ctx context.Context, q store.Querier, a Aggregate) ([]Record, error) {
	rows, err := q.QueryContext(ctx, `
WITH RECURSIVE chain (at) AS (
	SELECT last_position FROM outlog_aggregates WHERE aggregate_type = ? AND aggregate_id = ?
	UNION ALL
	SELECT o.previous_position FROM chain CROSS JOIN outbox o ON o.position = chain.at
)
SELECT position, event_id, aggregate_type, aggregate_id, aggregate_version, previous_position,
	type, schema_version, content_type, payload, headers, created_at
  FROM chain CROSS JOIN outbox ON position = at ORDER BY position`, a.Type, a.ID) // CROSS: never scan the log
	if err != nil {
		return nil, fmt.Errorf("read aggregate: %w", err)
	}
	defer rows.Close()
	var out []Record
	for rows.Next() {
		r, err := scanRecord(rows)
		if err != nil {
			return nil, fmt.Errorf("read aggregate: %w", err)
		}
		out = append(out, r)
	}
	return out, rows.Err()
}

// idTime is the time a ULID carries; it orders nothing.
func idTime(id string) time.Time {
	u, err := ulid.ParseStrict(id)
	if err != nil {
		return time.Time{}
	}
	return ulid.Time(u.Time()).UTC()
}
