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

// A failed publish is one of four:
//
//	outage    the broker did not answer: nobody's attempt, wait and reconcile
//	conflict  the stream ends elsewhere: nobody's attempt, reconcile
//	refusal   the broker names this message: an attempt of this event
//	stuck     the broker answers, but never for this message. That looks like an
//	          outage, and is one unless other messages are stored meanwhile
//
// A stuck event needs a probe: another message for the same place on the
// stream. The relay has such messages, the events of other aggregates, and
// uses no artificial one, which would take a sequence that belongs to no
// event. When the event that is due next stays unstored stuckAfter times,
// although stream and cursor agreed each time, it is parked as delayed, with no
// attempt counted, and the next event is sent in its place. From then on a
// failure counts only between two successes: the message before it was
// acknowledged, nothing but this event failed, and the next other message was
// acknowledged at the very sequence that it did not get. So a stream that
// fails for all — a full disk answers to everything but publishes — uses up no
// attempts, whenever it begins and ends. With nothing else to send, nothing is
// proved, and nothing is held up either.

// stuckAfter is how often the next event must stay unstored to be sent later
// instead. It doubles with each event that is delayed already, so that an
// outage that looks like this delays few.
const stuckAfter = 3

// stuck is the event that is due next and was not stored.
type stuck struct {
	position int64
	times    int
	err      error
}

// suspicion is an event that alone has failed since the last success.
type suspicion struct {
	event outbox.Record
	err   error
}

// judge learns from the outcome of an append of events, of which n were stored.
func (r *Relay) judge(events []entry, n int, err error) {
	if n > 0 {
		if r.suspect != nil && r.suspect.event.EventID != events[0].EventID {
			r.convicted = r.suspect
		}
		r.suspect, r.stuck, r.unproved = nil, stuck{}, 0
		r.flowing = true
	}
	switch {
	case err == nil, isRefused(err): // a refusal proves nothing: it may not even have been sent
	case !errors.Is(err, ErrOutage):
		r.doubt()
	case r.flowing:
		r.suspect = &suspicion{events[n].Record, err}
		r.flowing = false
	case r.suspect != nil && r.suspect.event.EventID != events[n].EventID:
		r.suspect = nil
	}
}

// doubt forgets what spoke against a single event: the stream is at fault.
func (r *Relay) doubt() {
	r.suspect, r.stuck, r.flowing = nil, stuck{}, false
}

func isRefused(err error) bool {
	_, ok := errors.AsType[*RefusedError](err)
	return ok
}

// failedParked deals with the first parked event that was not stored.
func (r *Relay) failedParked(ctx context.Context, events []entry, n int, err error) (int, error) {
	e := &events[n].Record
	switch {
	case isRefused(err):
		return n + 1, r.countRefusal(ctx, e, err, true)
	case n > 0 || ctx.Err() != nil || !errors.Is(err, ErrOutage):
		return n, err
	}
	r.unproved++
	if perr := r.postpone(ctx, e, err); perr != nil {
		return 0, perr
	}
	if r.suspect != nil {
		return 1, nil // no outage yet; the stream is looked at before anything else is sent
	}
	return 0, err
}

// failedNext deals with the first event of a page that was not stored.
func (r *Relay) failedNext(ctx context.Context, e *outbox.Record, n int, err error) (int, error) {
	switch {
	case isRefused(err):
		return n + 1, r.countRefusal(ctx, e, err, false)
	case n == 0 && ctx.Err() == nil && errors.Is(err, ErrOutage):
		if r.stuck.position != e.Position {
			r.stuck = stuck{position: e.Position}
		}
		r.stuck.times++
		r.stuck.err = err
	}
	return n, fmt.Errorf("publish after position %d: %w", r.cursor.Position, err)
}

// parkStuck sets the next event aside, uncounted, when it was not stored too
// often and there is another that can be sent in its place.
func (r *Relay) parkStuck(ctx context.Context, entries []entry) (parked bool, err error) {
	if len(entries) == 0 || r.stuck.position != entries[0].Position || r.stuck.times < stuckAfter {
		return false, nil
	}
	other := false
	for _, e := range entries[1:] {
		other = other || e.Aggregate() != entries[0].Aggregate()
	}
	var delayed int
	if err := r.db.Reader().QueryRowContext(ctx, `SELECT count(*) FROM outlog_parked WHERE consumer = 'relay' AND state = 'delayed'`).Scan(&delayed); err != nil {
		return false, err
	}
	if !other || r.stuck.times < stuckAfter<<min(delayed, 20) {
		return false, nil
	}
	e, cause := entries[0].Record, r.stuck.err
	r.stuck = stuck{}
	r.opts.Logger.Warn("event is not stored and is parked, to see whether others are", "event", e.EventID, "type", e.Type,
		"position", e.Position, "error", cause)
	delay := attempt.Jitter(r.opts.RetryMin, r.opts.RetryMax, 1)
	r.lookWithin(delay)
	return true, r.park(ctx, []outbox.Record{e}, "delayed", delay, cause.Error())
}

// postpone keeps a parked event that failed, but whose fault that may not be,
// from being sent again at once.
func (r *Relay) postpone(ctx context.Context, e *outbox.Record, cause error) error {
	delay := attempt.Jitter(r.opts.RetryMin, r.opts.RetryMax, r.unproved)
	return r.db.Update(ctx, func(tx *store.Tx) error {
		if err := r.guard(ctx, tx); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `UPDATE outlog_parked SET state = CASE state WHEN 'blocked' THEN 'delayed' ELSE state END,
				next_attempt_at = ?, delay_us = ?, last_error = ? WHERE consumer = 'relay' AND event_id = ? AND state <> 'dead'`,
			tx.Now().Add(delay).UnixMicro(), delay.Microseconds(), attempt.Shorten(cause.Error()), e.EventID)
		return err
	})
}

// countRefusal parks an event after a refused attempt, and keeps the attempt.
// One that was parked and is not any more was discarded meanwhile.
func (r *Relay) countRefusal(ctx context.Context, e *outbox.Record, cause error, parked bool) error {
	text := cause.Error()
	if refused, ok := errors.AsType[*RefusedError](cause); ok {
		text = fmt.Sprintf("refused (code %d): %s", refused.Code, refused.Reason)
	}
	if err := r.hook("relay.before-park"); err != nil {
		return err
	}
	text = attempt.Shorten(text)
	var n int
	var state string
	var delay time.Duration
	err := r.db.Update(ctx, func(tx *store.Tx) error {
		if err := r.guard(ctx, tx); err != nil {
			return err
		}
		n = 0
		if !parked {
			if err := insertParked(ctx, tx, e, "retrying", 0, ""); err != nil {
				return err
			}
		}
		err := tx.QueryRowContext(ctx, `SELECT attempts + 1 FROM outlog_parked WHERE consumer = 'relay' AND event_id = ?`, e.EventID).Scan(&n)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		state, delay = "retrying", attempt.Jitter(r.opts.RetryMin, r.opts.RetryMax, n)
		if n >= r.opts.MaxAttempts {
			state, delay = "dead", 0
		}
		now := tx.Now()
		if _, err := tx.ExecContext(ctx, `UPDATE outlog_parked SET state = ?, attempts = ?, next_attempt_at = ?, delay_us = ?,
				last_error = ?, fingerprint = ?, failed_at = ? WHERE consumer = 'relay' AND event_id = ?`,
			state, n, now.Add(delay).UnixMicro(), delay.Microseconds(), text, attempt.Fingerprint(text), now.UnixMicro(), e.EventID); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at)
			VALUES ('relay', ?, ?, ?, 'failed', ?, ?)`, e.EventID, e.Position, n, text, now.UnixMicro())
		return err
	})
	if err != nil {
		return fmt.Errorf("park the event at position %d: %w", e.Position, err)
	}
	if n == 0 {
		return nil
	}
	r.lookWithin(delay)
	r.update(func(s *Status) {
		s.Refused++
		if !parked {
			s.Parked++
		}
	})
	log := r.opts.Logger.With("event", e.EventID, "type", e.Type, "position", e.Position, "attempt", n, "error", text)
	if state == "dead" {
		log.Error("event cannot be published and is dead")
	} else {
		log.Warn("event is refused by the broker and parked", "next_in", delay.Round(time.Millisecond))
	}
	return nil
}
