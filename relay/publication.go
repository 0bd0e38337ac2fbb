package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"outlog/outbox"
	"outlog/store"
)

// publication is a run of events that lie side by side in the log and on the
// stream, so that the sequence of each can be counted out. It ends at every
// event that was passed over. An event that was parked and comes late is a
// publication of its own: no other covers its position, and its sequence is
// higher than those of events after it. So publications never overlap, neither
// in positions nor in sequences, but only the first rise one with the other
// without exception.
type publication struct {
	firstPosition, lastPosition int64
	firstSeq, lastSeq           uint64
	at                          int64 // µs
	// joins: the log holds nothing between the publication before this one and
	// it. Then, and only then, the two may become one.
	joins bool
}

// entry is an event that belongs on the stream next.
type entry struct {
	outbox.Record
	// joins: nothing was passed over between the entry before it and this one.
	joins bool
}

// publish returns a publication of one event.
func publish(e entry, seq uint64) publication {
	return publication{firstPosition: e.Position, lastPosition: e.Position, firstSeq: seq, lastSeq: seq, joins: e.joins}
}

// appendPublication adds p to pubs, as part of the last one if it can be.
func appendPublication(pubs []publication, p publication) []publication {
	if n := len(pubs); n > 0 && p.joins && pubs[n-1].lastSeq+1 == p.firstSeq {
		pubs[n-1].lastPosition, pubs[n-1].lastSeq, pubs[n-1].at = p.lastPosition, p.lastSeq, p.at
		return pubs
	}
	return append(pubs, p)
}

// publications are those of entries that were stored after sequence base.
func publications(entries []entry, base uint64, at time.Time) (pubs []publication) {
	for i, e := range entries {
		p := publish(e, base+1+uint64(i))
		p.at = at.UnixMicro()
		pubs = appendPublication(pubs, p)
	}
	return pubs
}

// addPublications writes publications. One that is there already was committed
// by a write that was told that it had failed, and may have grown since.
func addPublications(pubs []publication) change {
	return func(ctx context.Context, tx *store.Tx) error {
		for _, p := range pubs {
			r, err := tx.ExecContext(ctx, `INSERT INTO outlog_publications
				(first_position, last_position, first_stream_seq, last_stream_seq, published_at) VALUES (?, ?, ?, ?, ?)
				ON CONFLICT (first_position) DO UPDATE SET last_position = excluded.last_position, last_stream_seq = excluded.last_stream_seq,
					published_at = excluded.published_at WHERE first_stream_seq = excluded.first_stream_seq`,
				p.firstPosition, p.lastPosition, p.firstSeq, p.lastSeq, p.at)
			if err != nil {
				return fmt.Errorf("write publication: %w", err)
			}
			if n, err := r.RowsAffected(); err != nil || n != 1 {
				return errors.Join(fmt.Errorf("write publication: position %d is on the stream at another sequence than %d", p.firstPosition, p.firstSeq), err)
			}
		}
		return nil
	}
}

// cutAfterSeq makes publications true again for a stream that has lost what
// was behind the cursor's sequence. Lost events up to the cursor's position
// came late; the relay does not read them again, so they are parked again, due
// at once.
func cutAfterSeq(c Cursor) change {
	return func(ctx context.Context, tx *store.Tx) error {
		for _, s := range []struct {
			query string
			args  []any
		}{
			{`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, next_attempt_at, last_error, parked_at)
				SELECT 'relay', o.event_id, o.position, o.aggregate_type, o.aggregate_id, 'retrying', ?3, 'the stream has lost it', ?3
				  FROM outlog_publications p JOIN outbox o ON o.position BETWEEN p.first_position AND p.last_position
				 WHERE p.first_stream_seq > ?1 AND o.position <= ?2 ON CONFLICT DO NOTHING`,
				[]any{c.StreamSeq, c.Position, tx.Now().UnixMicro()}},
			{`DELETE FROM outlog_publications WHERE first_stream_seq > ?`, []any{c.StreamSeq}},
			{`UPDATE outlog_publications SET last_position = ?1, last_stream_seq = ?2 WHERE first_stream_seq <= ?2 AND last_stream_seq > ?2`,
				[]any{c.EventPosition, c.StreamSeq}},
		} {
			if _, err := tx.ExecContext(ctx, s.query, s.args...); err != nil {
				return fmt.Errorf("cut publications: %w", err)
			}
		}
		return nil
	}
}

// cutAfterPosition forgets publications behind the cursor of a stream that is
// about to be filled again from there, and notes what it will never hold.
func cutAfterPosition(c Cursor) change {
	return func(ctx context.Context, tx *store.Tx) error {
		for _, s := range []struct {
			query string
			args  []any
		}{
			{`DELETE FROM outlog_publications WHERE first_position > ?`, []any{c.Position}},
			{`UPDATE outlog_publications SET last_position = ?1,
				last_stream_seq = last_stream_seq - (SELECT count(*) FROM outbox WHERE position > ?1 AND position <= last_position)
				WHERE last_position > ?1`, []any{c.Position}},
			{`DELETE FROM outlog_skips WHERE consumer = 'relay'`, nil},
			{`INSERT INTO outlog_skips (consumer, after_position, through_position, skipped_at)
				SELECT 'relay', pruned_through, ?1, ?2 FROM outlog_meta WHERE pruned_through < ?1`, []any{c.Position, tx.Now().UnixMicro()}},
		} {
			if _, err := tx.ExecContext(ctx, s.query, s.args...); err != nil {
				return fmt.Errorf("cut publications: %w", err)
			}
		}
		return nil
	}
}
