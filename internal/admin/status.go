package admin

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"outlog/outbox"
	"outlog/store"
)

// Status is how far everybody has come in the log.
type Status struct {
	LogID         string `json:"log_id"`
	Head          int64  `json:"head"`           // position of the last event, 0: there was never one
	PrunedThrough int64  `json:"pruned_through"` // events up to here may be gone
	// PrunableThrough is how far the log could be pruned now, and HeldBy who needs
	// the event after that, null if nobody does.
	PrunableThrough int64          `json:"prunable_through"`
	HeldBy          *outbox.Holder `json:"held_by"`
	Relay           Relay          `json:"relay"`
	Consumers       []Consumer     `json:"consumers"` // by name
}

// Relay is how far the stream is behind the log.
type Relay struct {
	Position  int64  `json:"position"`
	StreamSeq uint64 `json:"stream_seq"`
	Token     int64  `json:"token"` // how often the database has changed owners
	Backlog
}

// Consumer is how far a consumer is behind the log.
type Consumer struct {
	Name       string `json:"name"`
	Position   int64  `json:"position"`
	Generation int64  `json:"generation"`
	Paused     bool   `json:"paused"`
	Backlog
}

// Backlog is what lies after a cursor, and what was set aside before it.
type Backlog struct {
	LagEvents  int64   `json:"lag_events"`  // after the cursor, of the types it takes
	LagSeconds float64 `json:"lag_seconds"` // age of the oldest of them, 0: there is none
	Parked     int64   `json:"parked"`      // waiting for another attempt, or behind one that is
	Dead       int64   `json:"dead"`        // waiting for a person
}

// ReadStatus reads the status in one snapshot. Cost: it counts the events after
// each cursor, so it is slow where it has most to tell.
func ReadStatus(ctx context.Context, db *store.DB) (Status, error) {
	tx, err := db.Reader().BeginTx(ctx, nil)
	if err != nil {
		return Status{}, fmt.Errorf("read status: %w", err)
	}
	defer tx.Rollback()
	s, err := statusFrom(ctx, tx, db.Now())
	if err != nil {
		return Status{}, fmt.Errorf("read status: %w", err)
	}
	return s, nil
}

func statusFrom(ctx context.Context, q store.Querier, now time.Time) (Status, error) {
	var s Status
	err := q.QueryRowContext(ctx, `SELECT log_id, pruned_through,
			max(pruned_through, coalesce((SELECT max(position) FROM outbox), 0)) FROM outlog_meta`).
		Scan(&s.LogID, &s.PrunedThrough, &s.Head)
	if err != nil {
		return s, err
	}
	held, err := outbox.Holders(ctx, q, s.PrunedThrough, s.Head, now, outbox.Needs{})
	if err != nil {
		return s, err
	}
	s.PrunableThrough = s.Head
	if len(held) > 0 {
		s.HeldBy, s.PrunableThrough = &held[0], max(held[0].Position, s.PrunedThrough)
	}
	if s.Relay, err = relayStatus(ctx, q, now); err != nil {
		return s, err
	}
	s.Consumers, err = consumerStatus(ctx, q, now)
	return s, err
}

func relayStatus(ctx context.Context, q store.Querier, now time.Time) (Relay, error) {
	var r Relay
	err := q.QueryRowContext(ctx, `SELECT position, stream_seq, token FROM outlog_relay WHERE name = 'main'`).
		Scan(&r.Position, &r.StreamSeq, &r.Token)
	if err != nil {
		return r, err
	}
	if r.LagSeconds, err = OldestPending(ctx, q, r.Position, now); err != nil {
		return r, err
	}
	if err = q.QueryRowContext(ctx, `SELECT count(*) FROM outbox WHERE position > ?`, r.Position).Scan(&r.LagEvents); err != nil {
		return r, err
	}
	err = r.Backlog.readParked(ctx, q, "relay")
	return r, err
}

// OldestPending is the age in seconds of the first event after a cursor, 0 if
// there is none. Cost: one row.
func OldestPending(ctx context.Context, q store.Querier, cursor int64, now time.Time) (float64, error) {
	return ageOf(q.QueryRowContext(ctx, `SELECT created_at FROM outbox WHERE position > ? ORDER BY position LIMIT 1`, cursor), now)
}

func consumerStatus(ctx context.Context, q store.Querier, now time.Time) ([]Consumer, error) {
	rows, err := q.QueryContext(ctx, `SELECT name, position, generation, paused, types FROM outlog_consumers ORDER BY name`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	list := []Consumer{}
	var types []string
	for rows.Next() {
		var c Consumer
		var t string
		if err := rows.Scan(&c.Name, &c.Position, &c.Generation, &c.Paused, &t); err != nil {
			return nil, err
		}
		list, types = append(list, c), append(types, t)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	for i := range list {
		if err := list[i].readBacklog(ctx, q, types[i], now); err != nil {
			return nil, fmt.Errorf("consumer %s: %w", list[i].Name, err)
		}
	}
	return list, nil
}

func (c *Consumer) readBacklog(ctx context.Context, q store.Querier, types string, now time.Time) (err error) {
	const pending = ` FROM outbox WHERE position > ? AND type IN (SELECT value FROM json_each(?))`
	if err := q.QueryRowContext(ctx, `SELECT count(*)`+pending, c.Position, types).Scan(&c.LagEvents); err != nil {
		return err
	}
	c.LagSeconds, err = ageOf(q.QueryRowContext(ctx, `SELECT created_at`+pending+` ORDER BY position LIMIT 1`, c.Position, types), now)
	if err != nil {
		return err
	}
	return c.readParked(ctx, q, c.Name)
}

func (b *Backlog) readParked(ctx context.Context, q store.Querier, consumer string) error {
	return q.QueryRowContext(ctx, `SELECT count(*) FILTER (WHERE state <> 'dead'), count(*) FILTER (WHERE state = 'dead')
		FROM outlog_parked WHERE consumer = ?`, consumer).Scan(&b.Parked, &b.Dead)
}

// ageOf reads a created_at. The writer's clock may have been ahead of ours.
func ageOf(row *sql.Row, now time.Time) (float64, error) {
	var at int64
	err := row.Scan(&at)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil
	}
	return max(0, now.Sub(time.UnixMicro(at)).Seconds()), err
}
