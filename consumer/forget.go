package consumer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"time"

	"outlog/store"
)

// An event is applied if no parked row says otherwise and its inbox row is
// there, or the cursor is past it. So inbox rows below the cursor are only a
// second proof, and old ones can go. What keeps that true:
//
//   - rows go in log order, up to outlog_consumers.inbox_through, which stays
//     below the cursor and below every parked event of the consumer;
//   - a reset, the only thing that moves a cursor back, undoes the effects of
//     the events it will handle again, and lowers inbox_through to its target.

// Forget removes the inbox rows of the events after position after, up to
// through, in the transaction that prunes these events and before it does.
func Forget(ctx context.Context, tx *store.Tx, after, through int64) error {
	_, err := tx.ExecContext(ctx, `DELETE FROM outlog_inbox WHERE (consumer, event_id) IN (
		SELECT c.name, o.event_id FROM outlog_consumers c CROSS JOIN outbox o
		 WHERE c.inbox_through < ?2 AND o.position > max(?1, c.inbox_through) AND o.position <= ?2)`, after, through)
	if err != nil {
		return fmt.Errorf("forget inbox rows: %w", err)
	}
	return nil
}

// inboxSpan reads what a consumer's inbox may lose: the rows of the events
// after from, up to through, which is window positions below what it needs.
const inboxSpan = `SELECT max(c.inbox_through, c.start_position, m.pruned_through),
	min(c.position, coalesce((SELECT min(position) - 1 FROM outlog_parked WHERE consumer = c.name), c.position)) - ?2
	FROM outlog_consumers c, outlog_meta m WHERE c.name = ?1`

// TrimInbox removes the inbox rows of up to limit events that lie more than
// window positions below everything the consumer still needs. It does nothing
// for fewer than limit positions, so that an idle database is not written to.
// It reports whether there is more to do.
func TrimInbox(ctx context.Context, db *store.DB, name string, window int64, limit int) (more bool, err error) {
	var from, through int64
	found, err := scanNoRow(db.Reader().QueryRowContext(ctx, inboxSpan, name, window), &from, &through)
	if err != nil || !found || through-from < int64(limit) {
		return false, err
	}
	err = db.UpdateLazy(ctx, func(tx *store.Tx) error {
		more = false
		if found, err = scanNoRow(tx.QueryRowContext(ctx, inboxSpan, name, window), &from, &through); err != nil || !found || through <= from {
			return err
		}
		var last int64 // of limit events; positions may have gaps
		full, err := scanNoRow(tx.QueryRowContext(ctx, `SELECT position FROM outbox WHERE position > ? AND position <= ? ORDER BY position LIMIT 1 OFFSET ?`,
			from, through, limit-1), &last)
		if err != nil {
			return err
		}
		if more = full; full {
			through = last
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM outlog_inbox WHERE consumer = ?1 AND event_id IN (
			SELECT event_id FROM outbox WHERE position > ?2 AND position <= ?3)`, name, from, through); err != nil {
			return err
		}
		r, err := tx.ExecContext(ctx, `UPDATE outlog_consumers SET inbox_through = ?1 WHERE name = ?2 AND position >= ?1`, through, name)
		if err != nil {
			return err
		}
		if n, err := r.RowsAffected(); err != nil || n != 1 {
			return errors.Join(errChanged, err)
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("trim the inbox of %s: %w", name, err)
	}
	return more, nil
}

// oldAttempts are the rows of history before ?1 that nobody needs. They lie at
// the lower end, up to the first that is younger; one with a future time was
// made by a wrong clock. What was discarded stays for ever: it is the only
// proof that an event was left out on purpose.
const oldAttempts = `SELECT id FROM outlog_attempts a
	WHERE id < coalesce((SELECT min(id) FROM outlog_attempts WHERE at BETWEEN ?1 AND ?2), ?4) AND at < ?1 AND outcome <> 'discarded'
	  AND NOT EXISTS (SELECT 1 FROM outlog_parked k WHERE k.consumer = a.consumer AND k.event_id = a.event_id) ORDER BY id LIMIT ?3`

// TrimAttempts removes up to limit rows of the history of failed attempts that
// are older than age, but for those of events that are parked now, and for
// discarded ones. It reports whether there may be more.
func TrimAttempts(ctx context.Context, db *store.DB, age time.Duration, limit int) (more bool, err error) {
	args := func(now time.Time) []any {
		return []any{now.Add(-age).UnixMicro(), now.UnixMicro(), limit, math.MaxInt64}
	}
	var some bool
	if err := db.Reader().QueryRowContext(ctx, `SELECT EXISTS (`+oldAttempts+`)`, args(db.Now())...).Scan(&some); err != nil || !some {
		return false, err
	}
	err = db.UpdateLazy(ctx, func(tx *store.Tx) error {
		r, err := tx.ExecContext(ctx, `DELETE FROM outlog_attempts WHERE id IN (`+oldAttempts+`)`, args(tx.Now())...)
		if err != nil {
			return err
		}
		n, err := r.RowsAffected()
		more = n == int64(limit)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("trim the history of attempts: %w", err)
	}
	return more, nil
}

// Names returns the consumers that have run on this database, by name.
func Names(ctx context.Context, db *sql.DB) (names []string, err error) {
	rows, err := db.QueryContext(ctx, `SELECT name FROM outlog_consumers ORDER BY name`)
	if err != nil {
		return nil, fmt.Errorf("list consumers: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, fmt.Errorf("list consumers: %w", err)
		}
		names = append(names, name)
	}
	return names, rows.Err()
}
