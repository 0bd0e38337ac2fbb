package admin

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"outlog/internal/attempt"
	"outlog/outbox"
	"outlog/store"
)

// DeadLetter is an event that a consumer has given up, or the relay.
type DeadLetter struct {
	Consumer         string    `json:"consumer"` // "relay": it cannot be published
	EventID          string    `json:"event_id"`
	Type             string    `json:"type"`
	AggregateType    string    `json:"aggregate_type"`
	AggregateID      string    `json:"aggregate_id"`
	AggregateVersion int64     `json:"aggregate_version"`
	Position         int64     `json:"position"`
	Attempts         int       `json:"attempts"`
	Error            string    `json:"error"` // the last one's first line
	Fingerprint      string    `json:"fingerprint"`
	FailedAt         time.Time `json:"failed_at"`
	Waiting          int64     `json:"waiting"` // events of its aggregate that are blocked behind it
}

const selectWaiting = `(SELECT count(*) FROM outlog_parked b WHERE b.consumer = k.consumer AND b.aggregate_type = k.aggregate_type
	AND b.aggregate_id = k.aggregate_id AND b.position > k.position AND b.state = 'blocked')`

// ListDead returns the dead letters of a consumer ("" for those of all), by
// consumer and position, at most limit of them (0: all).
func ListDead(ctx context.Context, db *store.DB, consumer string, limit int) ([]DeadLetter, error) {
	if limit <= 0 {
		limit = -1
	}
	list, err := collect(ctx, db.Reader(), func(rows *sql.Rows, d *DeadLetter) error {
		var at int64
		err := rows.Scan(&d.Consumer, &d.EventID, &d.Type, &d.AggregateType, &d.AggregateID, &d.AggregateVersion, &d.Position,
			&d.Attempts, &d.Error, &d.Fingerprint, &at, &d.Waiting)
		d.Error, d.FailedAt = attempt.FirstLine(d.Error), instant(at)
		return err
	}, `SELECT k.consumer, k.event_id, coalesce(o.type, ''), k.aggregate_type, k.aggregate_id, coalesce(o.aggregate_version, 0), k.position,
			k.attempts, k.last_error, k.fingerprint, k.failed_at, `+selectWaiting+`
		FROM outlog_parked k LEFT JOIN outbox o ON o.position = k.position
		WHERE k.state = 'dead' AND (?1 = '' OR k.consumer = ?1) ORDER BY k.consumer, k.position LIMIT ?2`, consumer, limit)
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	return list, nil
}

// DeadGroup is the dead letters of one consumer with the same error, but for
// the numbers and names in it.
type DeadGroup struct {
	Consumer      string    `json:"consumer"`
	Fingerprint   string    `json:"fingerprint"`
	Count         int64     `json:"count"`
	First         time.Time `json:"first"` // when the earliest of them died
	Last          time.Time `json:"last"`
	SampleEventID string    `json:"sample_event_id"` // the last of them
	SampleError   string    `json:"sample_error"`    // its first line
}

// GroupDead returns the groups of dead letters of a consumer ("" for those of
// all), by consumer, the largest first.
func GroupDead(ctx context.Context, db *store.DB, consumer string) ([]DeadGroup, error) {
	list, err := collect(ctx, db.Reader(), func(rows *sql.Rows, g *DeadGroup) error {
		var first, last int64
		err := rows.Scan(&g.Consumer, &g.Fingerprint, &g.Count, &first, &last, &g.SampleEventID, &g.SampleError)
		g.First, g.Last, g.SampleError = instant(first), instant(last), attempt.FirstLine(g.SampleError)
		return err
	}, `SELECT k.consumer, k.fingerprint, g.n, g.first, g.last, k.event_id, k.last_error
		FROM (SELECT consumer, fingerprint, count(*) AS n, min(failed_at) AS first, max(failed_at) AS last, max(failed_at || event_id) AS newest
		        FROM outlog_parked WHERE state = 'dead' AND (?1 = '' OR consumer = ?1) GROUP BY consumer, fingerprint) g
		JOIN outlog_parked k ON k.consumer = g.consumer AND k.event_id = substr(g.newest, -26)
		ORDER BY k.consumer, g.n DESC, k.fingerprint`, consumer)
	if err != nil {
		return nil, fmt.Errorf("group dead letters: %w", err)
	}
	return list, nil
}

// Parked is one event and everything that happened to it where it failed.
type Parked struct {
	EventID          string            `json:"event_id"`
	Position         int64             `json:"position"`
	AggregateType    string            `json:"aggregate_type"`
	AggregateID      string            `json:"aggregate_id"`
	AggregateVersion int64             `json:"aggregate_version"`
	Type             string            `json:"type"`
	SchemaVersion    int               `json:"schema_version"`
	ContentType      string            `json:"content_type"`
	CreatedAt        time.Time         `json:"created_at"`
	Headers          map[string]string `json:"headers"`
	Payload          json.RawMessage   `json:"payload,omitempty"`        // one that is JSON
	PayloadBase64    []byte            `json:"payload_base64,omitempty"` // any other
	Places           []Place           `json:"places"`                   // by consumer
}

// Place is a consumer, or the relay, at which an event failed.
type Place struct {
	Consumer    string    `json:"consumer"`
	State       string    `json:"state"`    // dead, retrying, blocked, running; "" when it is parked no more
	Attempts    int       `json:"attempts"` // since it was parked or last redriven
	Fingerprint string    `json:"fingerprint,omitempty"`
	History     []Attempt `json:"history"` // the oldest first
	Waiting     int64     `json:"waiting"` // how many events are blocked behind it
	Behind      []Behind  `json:"behind"`  // the first MaxBehind of them, in order
}

// MaxBehind is how many waiting events ShowParked names.
const MaxBehind = 100

// Attempt is one entry of an event's history at a place.
type Attempt struct {
	At      time.Time `json:"at"`
	Attempt int       `json:"attempt"` // which, from 1; for outcomes other than failed how many there had been
	Outcome string    `json:"outcome"` // failed, redriven, discarded, reset
	Error   string    `json:"error,omitempty"`
	Stack   string    `json:"stack,omitempty"`
}

// Behind is an event that waits behind another one.
type Behind struct {
	EventID          string `json:"event_id"`
	Type             string `json:"type"`
	AggregateVersion int64  `json:"aggregate_version"`
	Position         int64  `json:"position"`
}

// ShowParked returns an event that is or was parked, with its history at each
// consumer, or at one. Errors: outbox.ErrNotFound, ErrNotFound.
func ShowParked(ctx context.Context, db *store.DB, eventID, consumer string) (Parked, error) {
	log, err := outbox.OpenReader(ctx, db)
	if err != nil {
		return Parked{}, err
	}
	r, err := log.Get(ctx, eventID)
	if err != nil {
		return Parked{}, err
	}
	tx, err := db.Reader().BeginTx(ctx, nil)
	if err != nil {
		return Parked{}, fmt.Errorf("show %s: %w", eventID, err)
	}
	defer tx.Rollback()
	p := newParked(&r)
	if p.Places, err = places(ctx, tx, &r, consumer); err != nil {
		return Parked{}, fmt.Errorf("show %s: %w", eventID, err)
	}
	if len(p.Places) == 0 {
		return Parked{}, fmt.Errorf("%w: %s is not parked and never failed; `outlog dead list` shows those that are dead", ErrNotFound, eventID)
	}
	return p, nil
}

func newParked(r *outbox.Record) Parked {
	p := Parked{EventID: r.EventID, Position: r.Position, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		AggregateVersion: r.AggregateVersion, Type: r.Type, SchemaVersion: r.SchemaVersion, ContentType: r.ContentType, CreatedAt: r.CreatedAt}
	p.Headers, _ = r.Headers() // damaged ones must not hide the event
	if json.Valid(r.Payload) {
		p.Payload = r.Payload
	} else {
		p.PayloadBase64 = r.Payload
	}
	return p
}

func places(ctx context.Context, q store.Querier, r *outbox.Record, consumer string) ([]Place, error) {
	list, err := collect(ctx, q, func(rows *sql.Rows, p *Place) error {
		return rows.Scan(&p.Consumer, &p.State, &p.Attempts, &p.Fingerprint)
	}, `SELECT p.consumer, coalesce(k.state, ''), coalesce(k.attempts, 0), coalesce(k.fingerprint, '')
		FROM (SELECT name AS consumer FROM outlog_consumers UNION SELECT 'relay'
		      UNION SELECT consumer FROM outlog_attempts WHERE event_id = ?1) p
		LEFT JOIN outlog_parked k ON k.consumer = p.consumer AND k.event_id = ?1
		WHERE (?2 = '' OR p.consumer = ?2) AND (k.event_id IS NOT NULL
		   OR EXISTS (SELECT 1 FROM outlog_attempts h WHERE h.consumer = p.consumer AND h.event_id = ?1)) ORDER BY p.consumer`, r.EventID, consumer)
	if err != nil {
		return nil, err
	}
	for i := range list {
		p := &list[i]
		if p.History, err = history(ctx, q, p.Consumer, r.EventID); err != nil {
			return nil, err
		}
		if p.State == "" {
			p.Behind = []Behind{}
			continue
		}
		if p.Waiting, p.Behind, err = behind(ctx, q, p.Consumer, r); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func history(ctx context.Context, q store.Querier, consumer, eventID string) ([]Attempt, error) {
	return collect(ctx, q, func(rows *sql.Rows, a *Attempt) error {
		var at int64
		err := rows.Scan(&at, &a.Attempt, &a.Outcome, &a.Error, &a.Stack)
		a.At = instant(at)
		return err
	}, `SELECT at, attempt, outcome, error, stack FROM outlog_attempts WHERE consumer = ? AND event_id = ? ORDER BY id`, consumer, eventID)
}

// behind returns how many events are blocked behind one, and the first of them.
func behind(ctx context.Context, q store.Querier, consumer string, r *outbox.Record) (n int64, list []Behind, err error) {
	const blocked = ` FROM outlog_parked k LEFT JOIN outbox o ON o.position = k.position WHERE k.consumer = ?1
		AND k.aggregate_type = ?2 AND k.aggregate_id = ?3 AND k.position > ?4 AND k.state = 'blocked'`
	err = q.QueryRowContext(ctx, `SELECT count(*)`+blocked, consumer, r.AggregateType, r.AggregateID, r.Position).Scan(&n)
	if err != nil {
		return 0, nil, err
	}
	list, err = collect(ctx, q, func(rows *sql.Rows, b *Behind) error {
		return rows.Scan(&b.EventID, &b.Type, &b.AggregateVersion, &b.Position)
	}, `SELECT k.event_id, coalesce(o.type, ''), coalesce(o.aggregate_version, 0), k.position`+blocked+` ORDER BY k.position LIMIT ?5`,
		consumer, r.AggregateType, r.AggregateID, r.Position, MaxBehind)
	return n, list, err
}

// collect returns all rows of a query; none gives an empty slice.
func collect[T any](ctx context.Context, q store.Querier, scan func(*sql.Rows, *T) error, query string, args ...any) ([]T, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	all := []T{}
	for rows.Next() {
		var v T
		if err := scan(rows, &v); err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, rows.Err()
}

// found treats no row as not found.
func found(row *sql.Row, dest ...any) (bool, error) {
	err := row.Scan(dest...)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

// one returns an error unless a guarded statement hit exactly one row.
func one(r sql.Result, err error) error {
	if err != nil {
		return err
	}
	if n, err := r.RowsAffected(); err != nil || n != 1 {
		return errors.Join(fmt.Errorf("a guarded write hit %d rows instead of one", n), err)
	}
	return nil
}

func instant(micros int64) time.Time { return time.UnixMicro(micros).UTC() }
