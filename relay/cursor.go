package relay

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"outlog/store"
)

// Cursor is how far the relay has come: the last event it published and the
// stream sequence that event has.
type Cursor struct {
	Position  int64
	EventID   string
	StreamSeq uint64
}

// publication is a run of log rows that lie side by side on the stream.
type publication struct {
	firstPosition, lastPosition int64
	firstSeq, lastSeq           uint64
	at                          int64 // µs
}

// claim takes the relay's row for this owner: it raises the fencing token, so
// that every earlier owner's writes fail from now on, and reads the cursor.
func (r *Relay) claim(ctx context.Context) error {
	return r.db.Update(ctx, func(tx *store.Tx) error {
		var c Cursor
		var token int64
		err := tx.QueryRowContext(ctx, `UPDATE outlog_relay SET token = token + 1 WHERE name = 'main'
			RETURNING position, event_id, stream_seq, token`).Scan(&c.Position, &c.EventID, &c.StreamSeq, &token)
		if err != nil {
			return fmt.Errorf("claim the relay's cursor: %w", err)
		}
		r.cursor, r.token = c, token
		return nil
	})
}

// store writes the cursor and what was published since the last write, in one
// transaction guarded by the token. cut: the cursor moved back, publications
// above it are no longer true.
func (r *Relay) store(ctx context.Context, c Cursor, pubs []publication, cut bool) error {
	return r.db.Update(ctx, func(tx *store.Tx) error {
		res, err := tx.ExecContext(ctx, `UPDATE outlog_relay SET position = ?, event_id = ?, stream = ?, stream_seq = ?
			WHERE name = 'main' AND token = ?`, c.Position, c.EventID, r.opts.Stream, c.StreamSeq, r.token)
		if err != nil {
			return fmt.Errorf("write the relay's cursor: %w", err)
		}
		if n, err := res.RowsAffected(); err != nil || n != 1 {
			return errors.Join(fmt.Errorf("write the relay's cursor: %w", ErrFenced), err)
		}
		if cut {
			if err := cutPublications(ctx, tx, c); err != nil {
				return err
			}
		}
		for _, p := range pubs {
			if _, err := tx.ExecContext(ctx, `INSERT INTO outlog_publications
				(first_position, last_position, first_stream_seq, last_stream_seq, published_at) VALUES (?, ?, ?, ?, ?)`,
				p.firstPosition, p.lastPosition, p.firstSeq, p.lastSeq, p.at); err != nil {
				return fmt.Errorf("write publication: %w", err)
			}
		}
		return nil
	})
}

func cutPublications(ctx context.Context, tx *store.Tx, c Cursor) error {
	if _, err := tx.ExecContext(ctx, `DELETE FROM outlog_publications WHERE first_position > ?`, c.Position); err != nil {
		return fmt.Errorf("cut publications: %w", err)
	}
	_, err := tx.ExecContext(ctx, `UPDATE outlog_publications SET last_position = ?1,
			last_stream_seq = last_stream_seq - (SELECT count(*) FROM outbox WHERE position > ?1 AND position <= last_position)
		WHERE first_position = (SELECT max(first_position) FROM outlog_publications) AND last_position > ?1`, c.Position)
	if err != nil {
		return fmt.Errorf("cut publications: %w", err)
	}
	return nil
}

// lookBehind finds the event that was published at stream sequence seq; found
// is false when the log no longer knows.
func (r *Relay) lookBehind(ctx context.Context, seq uint64) (c Cursor, found bool, err error) {
	var last int64
	var lastSeq uint64
	err = r.db.Reader().QueryRowContext(ctx, `SELECT last_position, last_stream_seq FROM outlog_publications
		WHERE first_stream_seq <= ?1 AND last_stream_seq >= ?1 ORDER BY first_position DESC LIMIT 1`, seq).Scan(&last, &lastSeq)
	if errors.Is(err, sql.ErrNoRows) {
		return c, false, nil
	}
	if err == nil {
		err = r.db.Reader().QueryRowContext(ctx, `SELECT position, event_id FROM outbox WHERE position <= ?
			ORDER BY position DESC LIMIT 1 OFFSET ?`, last, lastSeq-seq).Scan(&c.Position, &c.EventID)
	}
	if errors.Is(err, sql.ErrNoRows) {
		return c, false, nil
	}
	c.StreamSeq = seq
	return c, err == nil, err
}

// highestSeq is the highest stream sequence the relay ever had acknowledged.
func (r *Relay) highestSeq(ctx context.Context) (seq uint64, err error) {
	err = r.db.Reader().QueryRowContext(ctx, `SELECT max(coalesce((SELECT max(last_stream_seq) FROM outlog_publications), 0),
		(SELECT stream_seq FROM outlog_relay WHERE name = 'main'))`).Scan(&seq)
	return seq, err
}
