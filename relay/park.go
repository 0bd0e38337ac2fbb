package relay

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"outlog/internal/attempt"
	"outlog/outbox"
	"outlog/store"
)

// Events the relay cannot publish are set aside in outlog_parked, as consumer
// 'relay', and the log goes on without them:
//
//	pending ──refused──► retrying ──refused, attempts left──► retrying
//	  │                     │  └──────refused, none left────► dead ──redrive──► retrying
//	  │                     └──stored──► published; the rest of its aggregate follows at once
//	  ├──an earlier one of its aggregate is parked──► blocked
//	  └──the broker never answers for it──► delayed ──proved to be its own fault──► retrying
//
// Per aggregate only the first parked event, its head, is ever sent, and only
// when the cursor has passed it: after a rebuild it waits until it would have
// been reached. With OnDead Skip a dead event is nobody's head.
//
// A row is parked before anything later is published, in a transaction of its
// own. The cursor may follow behind: a parked row stays parked when the log is
// read again, so neither a crash, nor a stream that lost its tail, nor a
// rebuild needs to know where the cursor was when it was parked.

// passed is what the relay does with an event other than publish it.
type passed int

const (
	finished passed = iota + 1 // parked or discarded already
	waits                      // an earlier event of its aggregate is parked
)

// passedIn returns which events of a page are not to be published, by position.
func (r *Relay) passedIn(ctx context.Context, page []outbox.Record) (map[int64]passed, error) {
	q := r.db.Reader()
	var any bool
	err := q.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outlog_parked WHERE consumer = 'relay')
		OR EXISTS (SELECT 1 FROM outlog_attempts WHERE consumer = 'relay' AND outcome = 'discarded')`).Scan(&any)
	if err != nil || !any || len(page) == 0 {
		return nil, err
	}
	rows, err := q.QueryContext(ctx, `
WITH page AS (
	SELECT o.position,
	       EXISTS (SELECT 1 FROM outlog_parked k WHERE k.consumer = 'relay' AND k.event_id = o.event_id) OR
	       EXISTS (SELECT 1 FROM outlog_attempts d WHERE d.consumer = 'relay' AND d.event_id = o.event_id AND d.outcome = 'discarded') AS finished,
	       EXISTS (SELECT 1 FROM outlog_parked k WHERE k.consumer = 'relay' AND k.aggregate_type = o.aggregate_type AND k.aggregate_id = o.aggregate_id
	                  AND k.position < o.position AND NOT (k.state = 'dead' AND ?3)) AS waits
	  FROM outbox o WHERE o.position BETWEEN ?1 AND ?2)
SELECT position, finished FROM page WHERE finished OR waits`, page[0].Position, page[len(page)-1].Position, r.opts.OnDead == Skip)
	if err != nil {
		return nil, fmt.Errorf("look for parked events: %w", err)
	}
	defer rows.Close()
	out := map[int64]passed{}
	for rows.Next() {
		var position int64
		var done bool
		if err := rows.Scan(&position, &done); err != nil {
			return nil, err
		}
		out[position] = waits
		if done {
			out[position] = finished
		}
	}
	return out, rows.Err()
}

// sift splits a page into the entries to publish and the events that have to
// wait for an earlier one of their aggregate.
func (r *Relay) sift(page []outbox.Record, p map[int64]passed) (entries []entry, waiting []outbox.Record) {
	joins := r.cursor.Position == r.cursor.EventPosition
	for _, e := range page {
		switch p[e.Position] {
		case 0:
			entries = append(entries, entry{e, joins})
			joins = true
			continue
		case waits:
			waiting = append(waiting, e)
		}
		joins = false
	}
	return entries, waiting
}

// park sets events aside for the first time.
func (r *Relay) park(ctx context.Context, events []outbox.Record, state string, delay time.Duration, reason string) error {
	if len(events) == 0 {
		return nil
	}
	err := r.db.Update(ctx, func(tx *store.Tx) error {
		if err := r.guard(ctx, tx); err != nil {
			return err
		}
		for i := range events {
			if err := insertParked(ctx, tx, &events[i], state, delay, reason); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("park events behind position %d: %w", r.cursor.Position, err)
	}
	r.update(func(s *Status) { s.Parked += len(events) })
	return nil
}

// lookWithin makes the relay look for due events no later than in d.
func (r *Relay) lookWithin(d time.Duration) {
	if at := time.Now().Add(d); at.Before(r.lookAt) {
		r.lookAt = at
	}
}

func insertParked(ctx context.Context, tx *store.Tx, e *outbox.Record, state string, delay time.Duration, reason string) error {
	now := tx.Now()
	_, err := tx.ExecContext(ctx, `INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state,
			next_attempt_at, delay_us, last_error, parked_at) VALUES ('relay', ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		e.EventID, e.Position, e.AggregateType, e.AggregateID, state, now.Add(delay).UnixMicro(), delay.Microseconds(), attempt.Shorten(reason), now.UnixMicro())
	return err
}

// clearParked removes events that are on the stream. One that a person has
// discarded meanwhile is not there any more, and that is all right.
func clearParked(eventIDs []string) change {
	return func(ctx context.Context, tx *store.Tx) error {
		for _, id := range eventIDs {
			if _, err := tx.ExecContext(ctx, `DELETE FROM outlog_parked WHERE consumer = 'relay' AND event_id = ?`, id); err != nil {
				return fmt.Errorf("clear parked event: %w", err)
			}
		}
		return nil
	}
}

// parkedAmong returns the positions of those messages that are parked events.
func (r *Relay) parkedAmong(ctx context.Context, msgs []*Message) (map[string]int64, error) {
	out := map[string]int64{}
	for _, m := range msgs {
		if m == nil {
			continue
		}
		var position int64
		err := r.db.Reader().QueryRowContext(ctx, `SELECT position FROM outlog_parked WHERE consumer = 'relay' AND event_id = ?`, m.Record.EventID).Scan(&position)
		if err == nil {
			out[m.Record.EventID] = position
		} else if !errors.Is(err, sql.ErrNoRows) {
			return nil, err
		}
	}
	return out, nil
}

// head is a parked event that may be sent now.
type head struct {
	position int64
	outbox.Aggregate
	alone bool // it may well fail again: send nothing of its aggregate with it
}

// dueHead finds the first head that is due. It also learns how many events are
// parked and when to look again: within Poll, so that what a person changed is
// seen.
func (r *Relay) dueHead(ctx context.Context) (h head, found bool, err error) {
	now := r.db.Now().UnixMicro()
	q := r.db.Reader()
	var parked int
	var next sql.NullInt64
	if err = q.QueryRowContext(ctx, `SELECT count(*), min(next_attempt_at) FILTER (WHERE state IN ('retrying', 'delayed') AND next_attempt_at > ?)
		FROM outlog_parked WHERE consumer = 'relay'`, now).Scan(&parked, &next); err != nil {
		return h, false, err
	}
	r.update(func(s *Status) { s.Parked = parked })
	wait := r.opts.Poll
	if next.Valid {
		wait = min(wait, time.Duration(next.Int64-now)*time.Microsecond)
	}
	if parked > 0 {
		err = q.QueryRowContext(ctx, `
WITH head AS (
	SELECT aggregate_type, aggregate_id, state, attempts, next_attempt_at, delay_us, event_id, min(position) AS position
	  FROM outlog_parked WHERE consumer = 'relay' AND position <= ?3 AND NOT (state = 'dead' AND ?2) GROUP BY aggregate_type, aggregate_id)
SELECT h.position, h.aggregate_type, h.aggregate_id, h.attempts > 0 OR h.state = 'delayed'
  FROM head h JOIN outbox o ON o.position = h.position AND o.event_id = h.event_id
 WHERE h.state = 'blocked' OR h.state IN ('retrying', 'delayed') AND (h.next_attempt_at <= ?1 OR h.next_attempt_at > ?1 + h.delay_us)
 ORDER BY h.position LIMIT 1`, now, r.opts.OnDead == Skip, r.cursor.Position).Scan(&h.position, &h.Type, &h.ID, &h.alone)
		found = err == nil
		if errors.Is(err, sql.ErrNoRows) {
			err = nil
		}
	}
	if !found {
		r.lookAt = time.Now().Add(wait)
	}
	return h, found, err
}

// chain reads the head's event, and the blocked ones behind it up to a window.
func (r *Relay) chain(ctx context.Context, h head) (chain []entry, err error) {
	limit := r.opts.WindowRows
	if h.alone {
		limit = 1
	}
	positions, err := r.waitingBehind(ctx, h, limit)
	if err != nil {
		return nil, err
	}
	size := 0
	for _, position := range positions {
		e, err := r.log.Read(ctx, position-1, outbox.Page{Rows: 1, Through: position})
		if err != nil || len(e) == 0 || size > r.opts.WindowBytes {
			return chain, err
		}
		chain = append(chain, entry{Record: e[0]})
		size += len(e[0].Payload)
	}
	return chain, nil
}

// waitingBehind returns the positions of the head and of those that follow
// when it is published.
func (r *Relay) waitingBehind(ctx context.Context, h head, limit int) (out []int64, err error) {
	rows, err := r.db.Reader().QueryContext(ctx, `SELECT position, state FROM outlog_parked
		WHERE consumer = 'relay' AND aggregate_type = ? AND aggregate_id = ? AND position BETWEEN ? AND ? ORDER BY position`,
		h.Type, h.ID, h.position, r.cursor.Position)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() && len(out) < limit {
		var position int64
		var state string
		if err := rows.Scan(&position, &state); err != nil {
			return nil, err
		}
		switch {
		case position == h.position || state == "blocked":
			out = append(out, position)
		case state == "dead" && r.opts.OnDead == Skip:
		default:
			return out, nil
		}
	}
	return out, rows.Err()
}

// retryParked sends the first parked event that is due, with those that wait
// for it. It returns how many events it got further with.
func (r *Relay) retryParked(ctx context.Context) (int, error) {
	if r.draining || time.Now().Before(r.lookAt) {
		return 0, nil
	}
	h, found, err := r.dueHead(ctx)
	if err != nil || !found {
		return 0, err
	}
	events, err := r.chain(ctx, h)
	if err != nil || len(events) == 0 {
		r.lookAt = time.Now().Add(r.opts.Poll)
		return 0, err
	}
	if err := r.saver.flush(ctx); err != nil { // this cursor is stored below, out of turn
		return 0, err
	}
	n, err := r.append(ctx, events)
	if n > 0 {
		if err := r.unpark(ctx, events[:n]); err != nil {
			r.certain = false
			return 0, err
		}
	}
	if err == nil {
		return n, nil
	}
	return r.failedParked(ctx, events, n, err)
}

// unpark notes that parked events are on the stream now.
func (r *Relay) unpark(ctx context.Context, events []entry) error {
	c := r.cursor
	last := events[len(events)-1]
	c.EventID, c.EventPosition, c.StreamSeq = last.EventID, last.Position, c.StreamSeq+uint64(len(events))
	ids := make([]string, len(events))
	for i, e := range events {
		ids[i] = e.EventID
	}
	err := r.store(ctx, c, addPublications(publications(events, r.cursor.StreamSeq, r.db.Now())), clearParked(ids))
	if err == nil {
		r.setCursor(c)
		r.opts.Logger.Info("parked events published", "first", events[0].EventID, "events", len(events), "aggregate", last.AggregateID)
	}
	return err
}
