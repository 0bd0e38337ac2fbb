package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"outlog/store"
)

// Pruning takes events away from the old end of the log. One number says how
// far, outlog_meta.pruned_through, and it moves only here: in the transaction
// that deletes, after looking, in that same transaction, at everybody who needs
// an event. So whoever begins at a position, in a transaction too, either holds
// the log there or is told ErrPruned.

// settled is for how long a published event stays in the log: a power cut can
// take from the stream what the broker, or the kernel after a killed process,
// has not yet written (1 s and 30 s), and the relay publishes it again.
const settled = time.Minute

// Extent is what retention asks of an event.
type Extent struct {
	Position  int64
	EventID   string
	CreatedAt time.Time
	Bytes     int64 // of payload and headers
}

// Extents reads the events after position after, in log order, at most limit.
func (l *Log) Extents(ctx context.Context, after int64, limit int) ([]Extent, error) {
	rows, err := l.db.Reader().QueryContext(ctx, `SELECT position, event_id, created_at, octet_length(payload) + octet_length(headers)
		FROM outbox WHERE position > ? ORDER BY position LIMIT ?`, after, limit)
	if err != nil {
		return nil, fmt.Errorf("read log after %d: %w", after, err)
	}
	defer rows.Close()
	var out []Extent
	for rows.Next() {
		var e Extent
		var at int64
		if err := rows.Scan(&e.Position, &e.EventID, &at, &e.Bytes); err != nil {
			return nil, fmt.Errorf("read log after %d: %w", after, err)
		}
		e.CreatedAt = time.UnixMicro(at).UTC()
		out = append(out, e)
	}
	return out, rows.Err()
}

// Horizon returns pruned_through: events up to there may be gone.
func (l *Log) Horizon(ctx context.Context) (through int64, err error) {
	err = l.db.Reader().QueryRowContext(ctx, `SELECT pruned_through FROM outlog_meta`).Scan(&through)
	return through, err
}

// ErrHorizonMoved is returned by Prune when the events are not the oldest of
// the log any more; the caller should look again.
var ErrHorizonMoved = errors.New("somebody else has pruned the log meanwhile")

// HeldError is returned by Prune when somebody needs one of the events.
type HeldError struct{ By Holder }

func (e *HeldError) Error() string { return "cannot be pruned: " + e.By.String() }

// Needs says who counts.
type Needs struct {
	// NoRelay prunes what was never published: nobody publishes this log.
	NoRelay bool
}

// Prune deletes events, which must be the oldest of the log without a gap, in
// tx. What others keep about them by id (inbox rows) goes before, in the same
// transaction.
//
// Errors: *HeldError, ErrHorizonMoved, or the store's; nothing may be committed
// after one.
func (l *Log) Prune(ctx context.Context, tx *store.Tx, events []Extent, n Needs) error {
	if len(events) == 0 {
		return nil
	}
	first, last := events[0].Position, events[len(events)-1].Position
	var horizon, oldest int64
	err := tx.QueryRowContext(ctx, `SELECT pruned_through, coalesce((SELECT min(position) FROM outbox), 0) FROM outlog_meta`).Scan(&horizon, &oldest)
	if err != nil {
		return err
	}
	if oldest != first {
		return ErrHorizonMoved
	}
	held, err := Holders(ctx, tx, horizon, last, tx.Now(), n)
	if err != nil {
		return err
	}
	if len(held) > 0 {
		return &HeldError{held[0]}
	}
	if _, err := tx.ExecContext(ctx, `UPDATE outlog_meta SET pruned_through = ?, pruned_created_at = max(pruned_created_at, ?)`,
		last, newest(events, tx.Now()).UnixMicro()); err != nil {
		return err
	}
	r, err := tx.ExecContext(ctx, `DELETE FROM outbox WHERE position <= ?`, last)
	if err != nil {
		return err
	}
	if gone, err := r.RowsAffected(); err != nil || gone != int64(len(events)) {
		return errors.Join(fmt.Errorf("%d events were to be pruned through position %d, there are %d", len(events), last, gone), err)
	}
	return nil
}

// newest is the latest time that an id of the events carries, for ErrEventTooOld.
// The ids count and not created_at: a client's clock may be ahead, and its
// event, appended again, must not be taken for a new one. An id further ahead
// than Append accepts was made by a clock that nobody should be measured by.
func newest(events []Extent, now time.Time) time.Time {
	latest := time.UnixMicro(0)
	for _, e := range events {
		if t := idTime(e.EventID); t.After(latest) && !t.After(now.Add(maxAhead)) {
			latest = t
		}
	}
	return latest
}

// NextBefore returns the time of the first event after position after that was
// created before a time.
func (l *Log) NextBefore(ctx context.Context, after int64, before time.Time) (at time.Time, found bool, err error) {
	var us int64
	err = l.db.Reader().QueryRowContext(ctx, `SELECT created_at FROM outbox WHERE position > ? AND created_at < ? ORDER BY position LIMIT 1`,
		after, before.UnixMicro()).Scan(&us)
	if errors.Is(err, sql.ErrNoRows) {
		return at, false, nil
	}
	return time.UnixMicro(us).UTC(), err == nil, err
}
