package admin

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"outlog/consumer"
	"outlog/outbox"
	"outlog/store"
)

// Selector says which dead letters are meant: exactly one of EventID,
// Fingerprint, Consumer and All is given, but that Consumer may narrow the
// first two.
type Selector struct {
	EventID     string
	Fingerprint string
	Consumer    string
	All         bool
}

// Check returns ErrSelector unless the selector says what it means.
func (s Selector) Check() error {
	n := 0
	for _, given := range []bool{s.EventID != "", s.Fingerprint != "", s.All, s.Consumer != "" && s.EventID == "" && s.Fingerprint == ""} {
		if given {
			n++
		}
	}
	if n != 1 {
		return ErrSelector
	}
	return nil
}

// deadKey is a dead letter that was selected, and may be dead no more.
type deadKey struct {
	consumer, eventID string
	aggregate         outbox.Aggregate
}

// deadChunk is how many dead letters one transaction deals with, so that a
// hundred thousand of them do not hold up the writer.
const deadChunk = 200

// eachDead calls fn for the selected dead letters, in order, deadChunk of them
// per transaction, and returns for how many it reported true. When it fails,
// that many are done already.
func eachDead(ctx context.Context, db *store.DB, s Selector, fn func(*store.Tx, deadKey) (bool, error)) (done int, err error) {
	if err := s.Check(); err != nil {
		return 0, err
	}
	keys, err := s.keys(ctx, db.Reader())
	if err != nil {
		return 0, err
	}
	for len(keys) > 0 {
		chunk := keys[:min(deadChunk, len(keys))]
		keys = keys[len(chunk):]
		var n int
		err := db.Update(ctx, func(tx *store.Tx) error {
			n = 0
			for _, k := range chunk {
				did, err := fn(tx, k)
				if err != nil {
					return fmt.Errorf("event %s at %s: %w", k.eventID, k.consumer, err)
				}
				if did {
					n++
				}
			}
			return nil
		})
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

// keys reads what is selected. An event that was never parked, and a consumer
// that never ran, are errors; one that is not dead (any more) is not.
func (s Selector) keys(ctx context.Context, q store.Querier) ([]deadKey, error) {
	keys, err := collect(ctx, q, func(rows *sql.Rows, k *deadKey) error {
		return rows.Scan(&k.consumer, &k.eventID, &k.aggregate.Type, &k.aggregate.ID)
	}, `SELECT consumer, event_id, aggregate_type, aggregate_id FROM outlog_parked WHERE state = 'dead'
		AND (?1 = '' OR event_id = ?1) AND (?2 = '' OR fingerprint = ?2) AND (?3 = '' OR consumer = ?3) ORDER BY consumer, position`,
		s.EventID, s.Fingerprint, s.Consumer)
	if err != nil || len(keys) > 0 {
		return keys, err
	}
	var eventKnown, consumerKnown bool
	err = q.QueryRowContext(ctx, `SELECT
		EXISTS (SELECT 1 FROM (SELECT name FROM outlog_consumers UNION ALL SELECT 'relay') c
			LEFT JOIN outlog_parked k ON k.consumer = c.name AND k.event_id = ?1
			LEFT JOIN outlog_attempts h ON h.consumer = c.name AND h.event_id = ?1
			WHERE k.event_id IS NOT NULL OR h.event_id IS NOT NULL),
		?2 = 'relay' OR EXISTS (SELECT 1 FROM outlog_consumers WHERE name = ?2)`, s.EventID, s.Consumer).Scan(&eventKnown, &consumerKnown)
	switch {
	case err != nil:
		return nil, err
	case s.Consumer != "" && !consumerKnown:
		return nil, unknown(s.Consumer)
	case s.EventID != "" && !eventKnown:
		return nil, fmt.Errorf("%w: %s; `outlog dead list` shows them", ErrNotFound, s.EventID)
	}
	return nil, nil
}

// Redrive gives dead letters another chance: they are due now, with no attempt
// counted, and what happened before stays in their history. One with an earlier
// event of its aggregate still parked waits for that. It returns how many there
// were; repeated or run twice at the same time, each counts once.
//
// A running consumer takes them up within consumer.Options.Poll.
//
// Errors: ErrSelector, ErrNotFound, consumer.ErrUnknown, or the store's.
func Redrive(ctx context.Context, db *store.DB, s Selector) (int, error) {
	n, err := eachDead(ctx, db, s, func(tx *store.Tx, k deadKey) (bool, error) { return redrive(ctx, tx, k) })
	if err != nil {
		return n, fmt.Errorf("redrive: %w", err)
	}
	return n, nil
}

func redrive(ctx context.Context, tx *store.Tx, k deadKey) (bool, error) {
	now := tx.Now().UnixMicro()
	if recorded, err := record(ctx, tx, k, "redriven", ""); err != nil || !recorded {
		return false, err
	}
	return true, one(tx.ExecContext(ctx, `UPDATE outlog_parked AS k SET attempts = 0, next_attempt_at = ?1, delay_us = 0,
			state = CASE WHEN EXISTS (SELECT 1 FROM outlog_parked e LEFT JOIN outlog_consumers c ON c.name = e.consumer
				WHERE e.consumer = k.consumer AND e.aggregate_type = k.aggregate_type AND e.aggregate_id = k.aggregate_id
				  AND e.position < k.position AND NOT (e.state = 'dead' AND c.on_dead IS 'skip')) THEN 'blocked' ELSE 'retrying' END
		WHERE consumer = ?2 AND event_id = ?3 AND state = 'dead'`, now, k.consumer, k.eventID))
}

// record writes what is about to happen to a dead letter into its history. It
// reports false when it is not dead any more.
func record(ctx context.Context, tx *store.Tx, k deadKey, outcome, reason string) (bool, error) {
	r, err := tx.ExecContext(ctx, `INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at)
		SELECT consumer, event_id, position, attempts, ?1, ?2, ?3 FROM outlog_parked WHERE consumer = ?4 AND event_id = ?5 AND state = 'dead'`,
		outcome, reason, tx.Now().UnixMicro(), k.consumer, k.eventID)
	if err != nil {
		return false, err
	}
	n, err := r.RowsAffected()
	return n == 1, err
}

// MaxReasonBytes bounds the reason of a discard.
const MaxReasonBytes = 1000

// Discard gives dead letters up for good: the event is never applied by that
// consumer, the reason stays in its history, and the next event of its
// aggregate goes on. Only a reset of the consumer brings it back, unless that
// keeps discarded events. It returns how many there were, each counted once.
//
// Errors: ErrNoReason, ErrSelector, ErrNotFound, consumer.ErrUnknown, or the
// store's.
func Discard(ctx context.Context, db *store.DB, s Selector, reason string) (int, error) {
	if reason = strings.TrimSpace(reason); reason == "" || len(reason) > MaxReasonBytes {
		return 0, ErrNoReason
	}
	n, err := eachDead(ctx, db, s, func(tx *store.Tx, k deadKey) (bool, error) { return discard(ctx, tx, k, reason) })
	if err != nil {
		return n, fmt.Errorf("discard: %w", err)
	}
	return n, nil
}

func discard(ctx context.Context, tx *store.Tx, k deadKey, reason string) (bool, error) {
	if recorded, err := record(ctx, tx, k, "discarded", reason); err != nil || !recorded {
		return false, err
	}
	err := one(tx.ExecContext(ctx, `DELETE FROM outlog_parked WHERE consumer = ? AND event_id = ? AND state = 'dead'`, k.consumer, k.eventID))
	if err != nil {
		return false, err
	}
	_, err = consumer.ReleaseNext(ctx, tx, k.consumer, k.aggregate, tx.Now())
	return true, err
}

func unknown(name string) error {
	return fmt.Errorf("%w: %s; `outlog consumers list` shows them", consumer.ErrUnknown, name)
}
