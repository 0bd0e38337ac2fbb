package consumer

import (
	"context"
	"time"

	"outlog/internal/attempt"
	"outlog/outbox"
	"outlog/store"
)

// Parked events: the first of an aggregate waits for its next attempt
// (retrying), for its external effect (running) or for a person (dead); later
// ones of the aggregate wait behind it (blocked).
//
//	fresh ──fails──► retrying ──fails, attempts left──► retrying
//	  │                 │  └────fails, none left──────► dead ──redrive──► retrying
//	  │                 └──succeeds──► applied, the next of its aggregate retries at once
//	  ├──has a Do route──► running ──succeeds──► applied; fails ──► retrying ──due──► running
//	  └──an earlier one of its aggregate is parked──► blocked
//
// With OnDead Skip a dead event blocks nobody.

// insertParked parks an event, unless it is parked already.
func insertParked(ctx context.Context, tx *store.Tx, consumer string, r *outbox.Record, state string, now time.Time, reason string) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state,
			attempts, next_attempt_at, last_error, parked_at) VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?) ON CONFLICT DO NOTHING`,
		consumer, r.EventID, r.Position, r.AggregateType, r.AggregateID, state, now.UnixMicro(), reason, now.UnixMicro())
	return err
}

// recordFailure parks an event after a failed attempt and keeps the attempt.
func (c *Consumer) recordFailure(ctx context.Context, tx *store.Tx, now time.Time, it *item, f *failure) error {
	o := &c.opts
	n := it.attempts + 1
	v := o.judge(f, n)
	log := o.Logger.With("consumer", o.Name, "event", it.EventID, "type", it.Type, "position", it.Position, "attempt", n, "error", attempt.FirstLine(f.text))
	if v.state == "dead" {
		log.Error("event is dead")
	} else {
		log.Warn("event failed and is parked", "next_in", v.delay.Round(time.Millisecond))
	}
	text := attempt.Shorten(f.text)
	if _, err := tx.ExecContext(ctx, `INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state,
			attempts, next_attempt_at, delay_us, last_error, fingerprint, failed_at, parked_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?12)
		ON CONFLICT (consumer, event_id) DO UPDATE SET state = excluded.state, attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at,
			delay_us = excluded.delay_us, last_error = excluded.last_error, fingerprint = excluded.fingerprint, failed_at = excluded.failed_at`,
		o.Name, it.EventID, it.Position, it.AggregateType, it.AggregateID, v.state, n,
		now.Add(v.delay).UnixMicro(), v.delay.Microseconds(), text, attempt.Fingerprint(text), now.UnixMicro()); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, stack, at)
		VALUES (?, ?, ?, ?, 'failed', ?, ?, ?)`, o.Name, it.EventID, it.Position, n, text, attempt.Shorten(f.stack), now.UnixMicro()); err != nil {
		return err
	}
	if o.OnDead == Skip { // a dead one blocks nobody, and one redriven meanwhile waited for this
		if _, err := releaseNext(ctx, tx, o.Name, it.Aggregate(), now); err != nil {
			return err
		}
	}
	return c.hook("consumer.after-park")
}

// release removes an applied event from outlog_parked and makes the next one
// of its aggregate due at once. It returns that one.
func (b *run) release(it *item) ([]item, error) {
	if _, err := b.tx.ExecContext(b.ctx, deleteParked, b.c.opts.Name, it.EventID); err != nil {
		return nil, err
	}
	id, err := releaseNext(b.ctx, b.tx, b.c.opts.Name, it.Aggregate(), b.now)
	if err != nil || id == "" {
		return nil, err
	}
	return parkedItems(b.ctx, b.tx, `k.consumer = ? AND k.event_id = ?`, b.c.opts.Name, id)
}

const deleteParked = `DELETE FROM outlog_parked WHERE consumer = ? AND event_id = ?`

// ReleaseNext makes the next parked event of an aggregate due at once, for
// whoever takes away the one before it without applying it. It returns the id
// of the released event, "" if there is none that waits.
func ReleaseNext(ctx context.Context, tx Execer, consumer string, a outbox.Aggregate, now time.Time) (eventID string, err error) {
	return releaseNext(ctx, tx, consumer, a, now)
}

// releaseNext makes the first parked event of an aggregate due at once, if it
// is blocked; under OnDead Skip it looks past dead ones. It returns the id of
// the released event, "" if there is none.
func releaseNext(ctx context.Context, tx Execer, consumer string, a outbox.Aggregate, now time.Time) (eventID string, err error) {
	_, err = scanNoRow(tx.QueryRowContext(ctx, `UPDATE outlog_parked SET state = 'retrying', next_attempt_at = ?1, delay_us = 0
		WHERE consumer = ?2 AND state = 'blocked' AND event_id = (SELECT k.event_id FROM outlog_parked k
			LEFT JOIN outlog_consumers c ON c.name = k.consumer
			WHERE k.consumer = ?2 AND k.aggregate_type = ?3 AND k.aggregate_id = ?4 AND NOT (k.state = 'dead' AND c.on_dead IS 'skip')
			ORDER BY k.position LIMIT 1)
		RETURNING event_id`, now.UnixMicro(), consumer, a.Type, a.ID), &eventID)
	return eventID, err
}

// releaseAll makes every event due that waits behind nothing: OnDead was
// another in the last run, or somebody took away what was before it.
func releaseAll(ctx context.Context, tx *store.Tx, consumer string, now int64) error {
	_, err := tx.ExecContext(ctx, `UPDATE outlog_parked AS k SET state = 'retrying', next_attempt_at = ?1, delay_us = 0
		WHERE k.consumer = ?2 AND k.state = 'blocked' AND NOT EXISTS (SELECT 1 FROM outlog_parked e LEFT JOIN outlog_consumers c ON c.name = e.consumer
			WHERE e.consumer = k.consumer AND e.aggregate_type = k.aggregate_type AND e.aggregate_id = k.aggregate_id
			  AND e.position < k.position AND NOT (e.state = 'dead' AND c.on_dead IS 'skip'))`, now, consumer)
	return err
}

// waits reports whether an earlier event of a fresh one's aggregate is parked
// and blocks it, or the event itself is parked.
func (b *run) waits(r *outbox.Record) (ok bool, err error) {
	err = b.tx.QueryRowContext(b.ctx, `SELECT EXISTS (SELECT 1 FROM outlog_parked WHERE consumer = ? AND aggregate_type = ? AND aggregate_id = ?
		AND (state <> 'dead' OR ? OR event_id = ?))`, b.c.opts.Name, r.AggregateType, r.AggregateID, b.c.opts.OnDead == Block, r.EventID).Scan(&ok)
	return ok, err
}

// behind reports whether another event of a due one's aggregate blocks it: an
// earlier one, because a person has redriven both, or OnDead was another when
// it was parked; or a later one whose external effect is under way, which only
// OnDead Skip lets happen. It then waits again.
func (b *run) behind(it *item) (ok bool, err error) {
	r, err := b.tx.ExecContext(b.ctx, `UPDATE outlog_parked SET state = 'blocked' WHERE consumer = ?1 AND event_id = ?2 AND EXISTS (SELECT 1 FROM outlog_parked
		WHERE consumer = ?1 AND aggregate_type = ?3 AND aggregate_id = ?4 AND (position < ?5 AND (state <> 'dead' OR ?6) OR position > ?5 AND state = 'running'))`,
		b.c.opts.Name, it.EventID, it.AggregateType, it.AggregateID, it.Position, b.c.opts.OnDead == Block)
	if err != nil {
		return false, err
	}
	n, err := r.RowsAffected()
	return n > 0, err
}

// dueEvents returns the parked events whose next attempt is due, in log order.
func dueEvents(ctx context.Context, tx *store.Tx, consumer string, now time.Time, limit int) ([]item, error) {
	return parkedItems(ctx, tx, `k.consumer = ?1 AND k.state = 'retrying' AND k.next_attempt_at <= ?2
		ORDER BY k.position LIMIT ?3`, consumer, now.UnixMicro(), limit)
}

// reschedule makes those due that a clock scheduled which has since stepped
// back: they are further away than their own delay.
func (c *Consumer) reschedule(ctx context.Context) error {
	const tooFar = ` FROM outlog_parked WHERE consumer = ? AND state = 'retrying' AND next_attempt_at > ? + delay_us`
	var found bool
	err := c.db.Reader().QueryRowContext(ctx, `SELECT EXISTS (SELECT 1`+tooFar+`)`, c.opts.Name, c.db.Now().UnixMicro()).Scan(&found)
	if err != nil || !found {
		return err
	}
	return c.db.Update(ctx, func(tx *store.Tx) error {
		now := tx.Now().UnixMicro()
		_, err := tx.ExecContext(ctx, `UPDATE outlog_parked SET next_attempt_at = ?2, delay_us = 0
			WHERE consumer = ?1 AND state = 'retrying' AND next_attempt_at > ?2 + delay_us`, c.opts.Name, now)
		return err
	})
}

// parkedItems reads parked events with their rows of the log; missing is set
// for one whose row is gone.
func parkedItems(ctx context.Context, tx *store.Tx, where string, args ...any) ([]item, error) {
	rows, err := tx.QueryContext(ctx, `SELECT k.position, k.event_id, k.aggregate_type, k.aggregate_id, coalesce(o.aggregate_version, 0),
			coalesce(o.previous_position, 0), coalesce(o.type, ''), coalesce(o.schema_version, 0), coalesce(o.content_type, ''),
			o.payload, coalesce(o.headers, ''), coalesce(o.created_at, 0), k.attempts, o.position IS NULL
		FROM outlog_parked k LEFT JOIN outbox o ON o.position = k.position AND o.event_id = k.event_id WHERE `+where, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []item
	for rows.Next() {
		it := item{parked: true}
		var at int64
		if err := rows.Scan(&it.Position, &it.EventID, &it.AggregateType, &it.AggregateID, &it.AggregateVersion, &it.Previous,
			&it.Type, &it.SchemaVersion, &it.ContentType, &it.Payload, &it.RawHeaders, &at, &it.attempts, &it.missing); err != nil {
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

func inInbox(ctx context.Context, tx *store.Tx, consumer, eventID string) (ok bool, err error) {
	err = tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outlog_inbox WHERE consumer = ? AND event_id = ?)`, consumer, eventID).Scan(&ok)
	return ok, err
}

// nextDue is when the earliest retrying event is due, zero if there is none.
func nextDue(ctx context.Context, q rowQuerier, consumer string) (time.Time, error) {
	var at int64
	found, err := scanNoRow(q.QueryRowContext(ctx, `SELECT next_attempt_at FROM outlog_parked
		WHERE consumer = ? AND state = 'retrying' ORDER BY next_attempt_at LIMIT 1`, consumer), &at)
	if err != nil || !found {
		return time.Time{}, err
	}
	return time.UnixMicro(at), nil
}
