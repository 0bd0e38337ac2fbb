package admin

import (
	"context"
	"fmt"

	"outlog/internal/lock"
	"outlog/store"
)

// Removed is what the removal of a consumer took away.
type Removed struct {
	Consumer string `json:"consumer"`
	Inbox    int64  `json:"inbox"`  // rows that said what it had applied
	Parked   int64  `json:"parked"` // events it had not, which are history now
}

// removeChunk is how many inbox rows one transaction takes away.
const removeChunk = 5000

// Remove forgets a consumer that is not used any more, so that it keeps nothing
// from being pruned. What it did to the application's tables stays. A consumer
// of that name that runs again begins anew, and knows nothing of the old one.
//
// A large inbox goes in several transactions. It goes first: until the last
// one, cursor and parked rows say as well what was applied, so a removal that
// is cut short does no harm and can be repeated.
//
// Errors: consumer.ErrUnknown, ErrInUse, or the store's.
func Remove(ctx context.Context, db *store.DB, name string) (Removed, error) {
	total := Removed{Consumer: name}
	for last := false; !last; {
		var step Removed
		err := db.Update(ctx, func(tx *store.Tx) (err error) {
			step, last, err = removeStep(ctx, tx, db.Path(), name)
			return err
		})
		if err != nil {
			return total, fmt.Errorf("remove: %w", err)
		}
		total.Inbox += step.Inbox
		total.Parked += step.Parked
	}
	return total, nil
}

func removeStep(ctx context.Context, tx *store.Tx, path, name string) (r Removed, last bool, err error) {
	if err := unused(ctx, tx, path, name); err != nil {
		return r, false, err
	}
	r.Inbox, err = execute(ctx, tx, `DELETE FROM outlog_inbox WHERE consumer = ?1 AND event_id IN (SELECT event_id FROM outlog_inbox WHERE consumer = ?1
		AND position <= (SELECT position FROM outlog_consumers WHERE name = ?1) LIMIT ?2)`, name, removeChunk)
	if err != nil || r.Inbox == removeChunk {
		return r, false, err
	}
	now := tx.Now().UnixMicro()
	for _, s := range []struct {
		query string
		count *int64
	}{
		{`DELETE FROM outlog_inbox WHERE consumer = ?1 AND ?2 > 0`, &r.Inbox}, // of events discarded over a reset
		{`INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at)
			SELECT consumer, event_id, position, attempts, 'reset', 'consumer removed: ' || state || ': ' || last_error, ?2
			  FROM outlog_parked WHERE consumer = ?1`, nil},
		{`DELETE FROM outlog_parked WHERE consumer = ?1 AND ?2 > 0`, &r.Parked},
		// A consumer of this name that begins anew has discarded nothing.
		{`UPDATE outlog_attempts SET outcome = 'reset', error = 'consumer removed: discarded: ' || error
			WHERE consumer = ?1 AND outcome = 'discarded' AND ?2 > 0`, nil},
		{`DELETE FROM outlog_skips WHERE consumer = ?1 AND ?2 > 0`, nil},
		{`UPDATE outlog_requests SET done_at = ?2, error = 'the consumer was removed' WHERE consumer = ?1 AND done_at = 0`, nil},
	} {
		n, err := execute(ctx, tx, s.query, name, now)
		if err != nil {
			return r, false, err
		}
		if s.count != nil {
			*s.count += n
		}
	}
	return r, true, one(tx.ExecContext(ctx, `DELETE FROM outlog_consumers WHERE name = ?`, name))
}

// unused returns ErrInUse when a live owner runs the consumer. One that starts
// later finds no row, or its row as it was: begin is a transaction too.
func unused(ctx context.Context, tx *store.Tx, path, name string) error {
	var running bool
	known, err := found(tx.QueryRowContext(ctx, `SELECT running FROM outlog_consumers WHERE name = ?`, name), &running)
	switch {
	case err != nil:
		return err
	case !known:
		return unknown(name)
	case !running:
		return nil
	}
	owner, held, err := lock.Holder(path)
	if err == nil && held {
		err = fmt.Errorf("%w: %s is run by the owner of the database (pid %d); stop that, or take the consumer out of it", ErrInUse, name, owner.PID)
	}
	return err
}

func execute(ctx context.Context, tx *store.Tx, query string, args ...any) (int64, error) {
	r, err := tx.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}
