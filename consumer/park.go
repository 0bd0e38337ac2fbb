package consumer

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"outlog/outbox"
	"outlog/store"
)

// Parked events: the first of an aggregate waits for its next attempt
// (retrying) or for a person (dead); later ones of the aggregate wait behind
// it (blocked). States:
//
//	fresh ──fails──► retrying ──fails, attempts left──► retrying
//	  │                 │  └────fails, none left──────► dead
//	  │                 └──succeeds──► applied, the next of its aggregate retries at once
//	  └─an earlier one of its aggregate is parked─► blocked

const maxErrorBytes = 8 << 10

// park inserts an event into outlog_parked.
func (b *run) park(r *outbox.Record, state string, attempts int, delay time.Duration, reason string) error {
	b.anyParked = true
	_, err := b.tx.ExecContext(b.ctx, `INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state,
			attempts, next_attempt_at, delay_us, last_error, parked_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (consumer, event_id) DO UPDATE SET state = excluded.state, attempts = excluded.attempts,
			next_attempt_at = excluded.next_attempt_at, delay_us = excluded.delay_us, last_error = excluded.last_error`,
		b.c.opts.Name, r.EventID, r.Position, r.AggregateType, r.AggregateID, state, attempts,
		b.now.Add(delay).UnixMicro(), delay.Microseconds(), shorten(reason), b.now.UnixMicro())
	return err
}

// recordFailure parks an event after a failed attempt.
func (b *run) recordFailure(it *item, cause error) error {
	o := &b.c.opts
	attempts := it.attempts + 1
	state, delay := "retrying", jitter(o.BackoffMin, o.BackoffMax, attempts)
	if attempts >= o.MaxAttempts {
		state, delay = "dead", 0
		o.Logger.Error("event is dead", "consumer", o.Name, "event", it.EventID, "type", it.Type, "position", it.Position,
			"attempts", attempts, "error", firstLine(cause.Error()))
	} else {
		o.Logger.Warn("event failed and is parked", "consumer", o.Name, "event", it.EventID, "type", it.Type, "position", it.Position,
			"attempt", attempts, "next_in", delay.Round(time.Millisecond), "error", firstLine(cause.Error()))
	}
	if !it.parked {
		b.progress.parked++
	}
	return b.park(&it.Record, state, attempts, delay, cause.Error())
}

// release removes an applied event from outlog_parked and makes the next one
// of its aggregate due at once. It returns that one.
func (b *run) release(it *item) ([]item, error) {
	if _, err := b.tx.ExecContext(b.ctx, `DELETE FROM outlog_parked WHERE consumer = ? AND event_id = ?`, b.c.opts.Name, it.EventID); err != nil {
		return nil, err
	}
	var eventID string
	found, err := scanNoRow(b.tx.QueryRowContext(b.ctx, `UPDATE outlog_parked SET state = 'retrying', next_attempt_at = ?1, delay_us = 0
		WHERE consumer = ?2 AND state = 'blocked' AND event_id = (SELECT event_id FROM outlog_parked
			WHERE consumer = ?2 AND aggregate_type = ?3 AND aggregate_id = ?4 ORDER BY position LIMIT 1)
		RETURNING event_id`, b.now.UnixMicro(), b.c.opts.Name, it.AggregateType, it.AggregateID), &eventID)
	if err != nil || !found {
		return nil, err
	}
	return parkedItems(b.ctx, b.tx, `k.consumer = ? AND k.event_id = ?`, b.c.opts.Name, eventID)
}

// dueEvents returns the parked events whose next attempt is due, in log order.
// One that is further away than its own delay was scheduled by a clock that
// has since stepped back, and is due.
func dueEvents(ctx context.Context, tx *store.Tx, consumer string, now time.Time, limit int) ([]item, error) {
	return parkedItems(ctx, tx, `k.consumer = ?1 AND k.state = 'retrying' AND
		(k.next_attempt_at <= ?2 OR k.next_attempt_at > ?2 + k.delay_us) ORDER BY k.position LIMIT ?3`, consumer, now.UnixMicro(), limit)
}

func parkedItems(ctx context.Context, tx *store.Tx, where string, args ...any) ([]item, error) {
	rows, err := tx.QueryContext(ctx, `SELECT o.position, o.event_id, o.aggregate_type, o.aggregate_id, o.aggregate_version,
			o.previous_position, o.type, o.schema_version, o.content_type, o.payload, o.headers, o.created_at, k.attempts
		FROM outlog_parked k JOIN outbox o ON o.position = k.position WHERE `+where, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []item
	for rows.Next() {
		it := item{parked: true}
		var at int64
		if err := rows.Scan(&it.Position, &it.EventID, &it.AggregateType, &it.AggregateID, &it.AggregateVersion, &it.Previous,
			&it.Type, &it.SchemaVersion, &it.ContentType, &it.Payload, &it.RawHeaders, &at, &it.attempts); err != nil {
			return nil, err
		}
		it.CreatedAt = time.UnixMicro(at).UTC()
		out = append(out, it)
	}
	return out, rows.Err()
}

func hasParked(ctx context.Context, tx *store.Tx, consumer string) (ok bool, err error) {
	err = tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outlog_parked WHERE consumer = ?)`, consumer).Scan(&ok)
	return ok, err
}

func hasParkedAggregate(ctx context.Context, tx *store.Tx, consumer string, a outbox.Aggregate) (ok bool, err error) {
	err = tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outlog_parked WHERE consumer = ? AND aggregate_type = ? AND aggregate_id = ?)`,
		consumer, a.Type, a.ID).Scan(&ok)
	return ok, err
}

// nextDue is when the earliest retrying event is due, zero if there is none.
func nextDue(ctx context.Context, tx *store.Tx, consumer string) (time.Time, error) {
	var at int64
	found, err := scanNoRow(tx.QueryRowContext(ctx, `SELECT next_attempt_at FROM outlog_parked
		WHERE consumer = ? AND state = 'retrying' ORDER BY next_attempt_at LIMIT 1`, consumer), &at)
	if err != nil || !found {
		return time.Time{}, err
	}
	return time.UnixMicro(at), nil
}

// jitter is the delay after the n-th failed attempt: anything up to a bound
// that doubles from low to top, so that events that failed together do not
// come back together.
func jitter(low, top time.Duration, n int) time.Duration {
	bound := top
	if n < 32 {
		bound = min(top, low<<(n-1))
	}
	return time.Duration(rand.Int64N(int64(bound) + 1))
}

func shorten(s string) string {
	if len(s) > maxErrorBytes {
		s = s[:maxErrorBytes]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
