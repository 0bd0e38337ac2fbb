package relay

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"outlog/store"
)

// Cursor is how far the relay has come in the log, and what the stream ends
// with.
type Cursor struct {
	// Position: every event up to here is on the stream, parked, or skipped.
	Position int64
	// EventID is the last message on the stream, "" if there was none; with
	// StreamSeq it proves that the stream is still the one we wrote.
	EventID   string
	StreamSeq uint64
	// EventPosition is that event's. It lies before Position when the events
	// after it are parked, or when it was parked itself and came late. Not
	// stored: event and stream tell it.
	EventPosition int64
}

// claim takes the relay's row for this owner: it raises the fencing token, so
// that every earlier owner's writes fail from now on, and reads the cursor.
func (r *Relay) claim(ctx context.Context) error {
	return r.db.Update(ctx, func(tx *store.Tx) error {
		var c Cursor
		var token int64
		err := tx.QueryRowContext(ctx, `UPDATE outlog_relay SET token = token + 1 WHERE name = 'main'
			RETURNING position, event_id, stream_seq, token`).Scan(&c.Position, &c.EventID, &c.StreamSeq, &token)
		if err == nil {
			err = tx.QueryRowContext(ctx, `SELECT coalesce((SELECT position FROM outbox WHERE event_id = ?), ?)`, c.EventID, c.Position).Scan(&c.EventPosition)
		}
		if err != nil {
			return fmt.Errorf("claim the relay's cursor: %w", err)
		}
		r.cursor, r.token = c, token
		return nil
	})
}

// guard fails with ErrFenced when another owner has taken over. Every write
// transaction of the relay begins with it or with the cursor.
func (r *Relay) guard(ctx context.Context, q querier) error {
	var token int64
	if err := q.QueryRowContext(ctx, `SELECT token FROM outlog_relay WHERE name = 'main'`).Scan(&token); err != nil {
		return err
	}
	if token != r.token {
		return ErrFenced
	}
	return nil
}

// querier is a transaction, or the database.
type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// change is what a transaction does besides moving the cursor.
type change func(ctx context.Context, tx *store.Tx) error

// store writes the cursor and applies changes in one transaction guarded by
// the token. A power loss may take it back: reconcile finds the cursor again.
func (r *Relay) store(ctx context.Context, c Cursor, changes ...change) error {
	return r.db.UpdateLazy(ctx, func(tx *store.Tx) error {
		res, err := tx.ExecContext(ctx, `UPDATE outlog_relay SET position = ?, event_id = ?, stream = ?, stream_seq = ?
			WHERE name = 'main' AND token = ?`, c.Position, c.EventID, r.opts.Stream, c.StreamSeq, r.token)
		if err != nil {
			return fmt.Errorf("write the relay's cursor: %w", err)
		}
		if n, err := res.RowsAffected(); err != nil || n != 1 {
			return errors.Join(fmt.Errorf("write the relay's cursor: %w", ErrFenced), err)
		}
		for _, apply := range changes {
			if err := apply(ctx, tx); err != nil {
				return err
			}
		}
		return nil
	})
}

// highestSeq is the highest stream sequence the relay ever had acknowledged.
func (r *Relay) highestSeq(ctx context.Context) (seq uint64, err error) {
	err = r.db.Reader().QueryRowContext(ctx, `SELECT max(coalesce((SELECT max(last_stream_seq) FROM outlog_publications), 0),
		(SELECT stream_seq FROM outlog_relay WHERE name = 'main'))`).Scan(&seq)
	return seq, err
}

// lookBehind finds the cursor that belongs to a stream that ends at seq; found
// is false when the log no longer knows.
func (r *Relay) lookBehind(ctx context.Context, seq uint64) (c Cursor, found bool, err error) {
	var last int64
	var lastSeq uint64
	q := r.db.Reader()
	err = q.QueryRowContext(ctx, `SELECT last_position, last_stream_seq FROM outlog_publications
		WHERE first_stream_seq <= ?1 AND last_stream_seq >= ?1`, seq).Scan(&last, &lastSeq)
	if err == nil {
		err = q.QueryRowContext(ctx, `SELECT position, event_id FROM outbox WHERE position <= ?
			ORDER BY position DESC LIMIT 1 OFFSET ?`, last, lastSeq-seq).Scan(&c.EventPosition, &c.EventID)
	}
	if err == nil { // sequences rise with positions but for events that came late
		err = q.QueryRowContext(ctx, `SELECT max(?2, coalesce(max(last_position), 0)) FROM outlog_publications
			WHERE last_stream_seq <= ?1`, seq, c.EventPosition).Scan(&c.Position)
	}
	if errors.Is(err, sql.ErrNoRows) {
		return c, false, nil
	}
	c.StreamSeq = seq
	return c, err == nil, err
}
