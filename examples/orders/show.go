package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"outlog/outbox"
	"outlog/store"
)

// View is an order with everything that happened to it.
type View struct {
	OrderID    string      `json:"order_id"`
	CustomerID string      `json:"customer_id"`
	Status     string      `json:"status"`
	Version    int64       `json:"version"`
	TotalCents int64       `json:"total_cents"`
	CreatedAt  time.Time   `json:"created_at"`
	Lines      []Line      `json:"lines"`
	Events     []EventView `json:"events"` // those that the log still holds, in version order
}

// EventView is an event of an order and what became of it.
type EventView struct {
	ID        string         `json:"id"`
	Type      string         `json:"type"`
	Version   int64          `json:"version"`
	Position  int64          `json:"position"`
	CreatedAt time.Time      `json:"created_at"`
	Consumers []ConsumerView `json:"consumers"` // by name
}

// ConsumerView is what one consumer has done with an event. State is
//
//   - applied: its effect is there, since AppliedAt if that is still known;
//   - parked: it failed, or waits behind one that did; see Parked;
//   - discarded: a person gave it up for this consumer;
//   - skipped: a person moved the consumer past it;
//   - pending: the consumer is not there yet;
//   - passed_over: the consumer has no route for the type, or began later.
type ConsumerView struct {
	Name      string      `json:"name"`
	State     string      `json:"state"`
	AppliedAt *time.Time  `json:"applied_at,omitempty"`
	Parked    *ParkedView `json:"parked,omitempty"`
}

// ParkedView is why and how an event is parked.
type ParkedView struct {
	State         string     `json:"state"` // running, retrying, blocked, delayed, dead
	Attempts      int64      `json:"attempts"`
	LastError     string     `json:"last_error"`
	NextAttemptAt *time.Time `json:"next_attempt_at,omitempty"`
}

// Show returns the order as it is now, read from one snapshot; or ErrNotFound.
func (s *Service) Show(ctx context.Context, orderID string) (View, error) {
	tx, err := s.n.Store().Reader().BeginTx(ctx, nil)
	if err != nil {
		return View{}, fmt.Errorf("show order: %w", err)
	}
	defer tx.Rollback()
	v, err := show(ctx, tx, orderID)
	if err != nil && !errors.Is(err, ErrNotFound) {
		err = fmt.Errorf("show order: %w", err)
	}
	return v, err
}

func show(ctx context.Context, q store.Querier, orderID string) (View, error) {
	v := View{OrderID: orderID, Events: []EventView{}}
	var at int64
	err := q.QueryRowContext(ctx, `SELECT customer_id, status, version, total_cents, created_at FROM orders WHERE id = ?`, orderID).
		Scan(&v.CustomerID, &v.Status, &v.Version, &v.TotalCents, &at)
	if errors.Is(err, sql.ErrNoRows) {
		return View{}, ErrNotFound
	}
	if err != nil {
		return View{}, err
	}
	v.CreatedAt = instant(at)
	v.Lines, err = collect(ctx, q, func(rows *sql.Rows, l *Line) error { return rows.Scan(&l.SKU, &l.Qty, &l.UnitPriceCents) },
		`SELECT sku, qty, unit_price_cents FROM order_lines WHERE order_id = ? ORDER BY line_no`, orderID)
	if err != nil {
		return View{}, err
	}
	events, err := outbox.AggregateFrom(ctx, q, aggregate(orderID))
	if err != nil {
		return View{}, err
	}
	for _, e := range events {
		consumers, err := collect(ctx, q, scanConsumer, selectConsumers, e.EventID, e.Position, e.Type)
		if err != nil {
			return View{}, err
		}
		v.Events = append(v.Events, EventView{e.EventID, e.Type, e.AggregateVersion, e.Position, e.CreatedAt, consumers})
	}
	return v, nil
}

// selectConsumers says where the event with id ?1, position ?2 and type ?3
// stands with each consumer. An inbox row may be gone when the cursor is past
// the event; a parked row stays until it is dealt with.
const selectConsumers = `
SELECT c.name,
       CASE WHEN k.event_id IS NOT NULL THEN 'parked'
            WHEN EXISTS (SELECT 1 FROM outlog_attempts h WHERE h.consumer = c.name AND h.event_id = ?1 AND h.outcome = 'discarded') THEN 'discarded'
            WHEN EXISTS (SELECT 1 FROM outlog_skips s WHERE s.consumer = c.name AND ?2 > s.after_position AND ?2 <= s.through_position) THEN 'skipped'
            WHEN i.event_id IS NOT NULL THEN 'applied'
            WHEN ?2 <= c.start_position OR NOT EXISTS (SELECT 1 FROM json_each(c.types) WHERE value = ?3) THEN 'passed_over'
            WHEN ?2 <= c.position THEN 'applied'
            ELSE 'pending' END,
       i.applied_at, k.state, k.attempts, k.last_error, k.next_attempt_at
  FROM outlog_consumers c
  LEFT JOIN outlog_inbox i ON i.consumer = c.name AND i.event_id = ?1
  LEFT JOIN outlog_parked k ON k.consumer = c.name AND k.event_id = ?1
 ORDER BY c.name`

func scanConsumer(rows *sql.Rows, c *ConsumerView) error {
	var appliedAt, attempts, nextAttemptAt sql.Null[int64]
	var state, lastError sql.Null[string]
	if err := rows.Scan(&c.Name, &c.State, &appliedAt, &state, &attempts, &lastError, &nextAttemptAt); err != nil {
		return err
	}
	switch c.State {
	case "applied":
		c.AppliedAt = maybe(appliedAt)
	case "parked":
		c.Parked = &ParkedView{state.V, attempts.V, lastError.V, maybe(nextAttemptAt)}
	}
	return nil
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

func instant(micros int64) time.Time { return time.UnixMicro(micros).UTC() }

func maybe(micros sql.Null[int64]) *time.Time {
	if !micros.Valid {
		return nil
	}
	t := instant(micros.V)
	return &t
}
