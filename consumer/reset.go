package consumer

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"outlog/store"
)

// A reset moves a consumer's cursor. Only the program that handles the
// consumer can undo its effects, so a reset is a row in outlog_requests that
// the owner executes within Options.Poll, in one transaction: undo, inbox and
// parked rows above the target go, cursor, generation + 1.

// ResetRequest says where a consumer should go on.
type ResetRequest struct {
	// To is "beginning", "now" or a position: the cursor to be.
	To string `json:"to"`
	// Force resets a consumer that appends events. Those it appended stay in the
	// log and are not appended again, as long as the handler gives the same ones.
	Force bool `json:"force,omitempty"`
	// KeepDiscarded leaves discarded events discarded; otherwise they are
	// handled again.
	KeepDiscarded bool `json:"keep_discarded,omitempty"`
}

var (
	// ErrNoClear is returned for a reset to an earlier position of a consumer
	// that cannot undo its effects.
	ErrNoClear = errors.New("consumer has no Clear and cannot be reset to an earlier position")
	// ErrAppends is returned for a reset of a consumer that appends events,
	// unless it is forced.
	ErrAppends = errors.New("consumer appends events; force the reset")
	// ErrEffectsRunning is returned for a reset while external effects do not
	// end in time; the caller should try again.
	ErrEffectsRunning = errors.New("external effects are running")
)

// serveRequest executes the oldest open request for this consumer, and reports
// whether it did: a request that met trouble is looked at again at the next
// tick. Its only error is ErrRemoved.
func (c *Consumer) serveRequest(ctx context.Context) (done bool, err error) {
	var id int64
	var argument string
	found, err := scanNoRow(c.db.Reader().QueryRowContext(ctx, `SELECT id, argument FROM outlog_requests WHERE consumer = ? AND done_at = 0 ORDER BY id LIMIT 1`,
		c.opts.Name), &id, &argument)
	if err != nil || !found {
		return false, nil
	}
	err = c.reset(ctx, id, argument)
	if err != nil && ctx.Err() == nil && isRefusal(err) {
		c.opts.Logger.Warn("reset refused", "consumer", c.opts.Name, "error", err)
		refusal := err
		err = c.db.Update(ctx, func(tx *store.Tx) error { return closeRequest(ctx, tx, id, refusal.Error()) })
	}
	if err == nil {
		done, err = true, c.reload(ctx)
	}
	if errors.Is(err, ErrRemoved) {
		return done, err
	}
	if err != nil && ctx.Err() == nil {
		c.opts.Logger.Warn("reset request not served, trying again", "consumer", c.opts.Name, "error", err)
	}
	return done, nil
}

// closeRequest notes how a request ended: refusal "" means that it was done.
// One that was withdrawn, or served by another instance, is errChanged.
func closeRequest(ctx context.Context, tx *store.Tx, id int64, refusal string) error {
	r, err := tx.ExecContext(ctx, `UPDATE outlog_requests SET done_at = ?, error = ? WHERE id = ? AND done_at = 0`, tx.Now().UnixMicro(), refusal, id)
	if err != nil {
		return err
	}
	if n, err := r.RowsAffected(); err != nil || n != 1 {
		return errors.Join(errChanged, err)
	}
	return nil
}

// isRefusal reports whether a reset failed for good.
func isRefusal(err error) bool {
	return !store.IsUnavailable(err) && !errors.Is(err, errChanged)
}

// reset executes one request.
func (c *Consumer) reset(ctx context.Context, id int64, argument string) error {
	var q ResetRequest
	if err := json.Unmarshal([]byte(argument), &q); err != nil {
		return fmt.Errorf("reset request %d: %w", id, err)
	}
	if !c.effects.Load().idle(ctx, c.opts.DrainTimeout) {
		return ErrEffectsRunning
	}
	return apart(func() error { return c.moveTo(ctx, id, q) })
}

// apart runs fn on a goroutine of its own, so that a Goexit in somebody else's
// code ends only that.
func apart(fn func() error) error {
	err := errGoexit
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = fn()
	}()
	<-done
	return err
}

// moveTo is the transaction of a reset.
func (c *Consumer) moveTo(ctx context.Context, id int64, q ResetRequest) error {
	return c.db.Update(ctx, func(tx *store.Tx) error {
		if err := closeRequest(ctx, tx, id, ""); err != nil {
			return err
		}
		s, err := readState(ctx, tx, c.opts.Name)
		if err != nil {
			return err
		}
		target, err := resolve(ctx, tx, q.To)
		if err != nil {
			return err
		}
		if target < s.position {
			if err := c.undo(ctx, tx, target, q); err != nil {
				return err
			}
		} else if target > s.position {
			if err := recordSkip(ctx, tx, c.opts.Name, s.position, target); err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, `UPDATE outlog_consumers SET position = ?1, start_position = min(start_position, ?1), inbox_through = min(inbox_through, ?1),
			generation = generation + 1, run_position = ?1, updated_at = ?2 WHERE name = ?3`, target, tx.Now().UnixMicro(), c.opts.Name)
		if err != nil {
			return err
		}
		return c.hook("consumer.after-clear")
	})
}

// resolve turns a target into a position.
func resolve(ctx context.Context, tx *store.Tx, to string) (int64, error) {
	pruned, head, err := bounds(ctx, tx)
	if err != nil {
		return 0, err
	}
	switch to {
	case "beginning":
		return pruned, nil
	case "now":
		return head, nil
	}
	p, err := strconv.ParseInt(to, 10, 64)
	if err != nil {
		return 0, invalid("to", to, `"beginning", "now" or a position`)
	}
	return p, checkPosition(p, pruned, head)
}

// undo takes back the effects of all events above target.
func (c *Consumer) undo(ctx context.Context, tx *store.Tx, target int64, q ResetRequest) error {
	name := c.opts.Name
	var pruned, appends int64
	if err := tx.QueryRowContext(ctx, `SELECT m.pruned_through, c.appends FROM outlog_meta m, outlog_consumers c WHERE c.name = ?`, name).Scan(&pruned, &appends); err != nil {
		return err
	}
	switch {
	case c.opts.Clear == nil:
		return fmt.Errorf("%w: %s", ErrNoClear, name)
	case c.opts.ClearAll && target != pruned:
		return fmt.Errorf("%w: the Clear of %s undoes everything, so it can only be reset to the beginning", ErrNoClear, name)
	case appends != 0 && !q.Force:
		return fmt.Errorf("%w: %s", ErrAppends, name)
	}
	if err := c.clear(ctx, tx, target); err != nil {
		return fmt.Errorf("clear %s after position %d: %w", name, target, err)
	}
	for _, step := range []struct{ what, query string }{
		{"keep the history of parked events", `INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at)
			SELECT consumer, event_id, position, attempts, 'reset', state || ': ' || last_error, ?3 FROM outlog_parked WHERE consumer = ?1 AND position > ?2`},
		{"remove parked events", `DELETE FROM outlog_parked WHERE consumer = ?1 AND position > ?2 AND ?3 > 0`},
		{"remove inbox rows", `DELETE FROM outlog_inbox WHERE consumer = ?1 AND position > ?2 AND ?3 > 0`},
		{"forget skips", `DELETE FROM outlog_skips WHERE consumer = ?1 AND after_position >= ?2 AND ?3 > 0`},
		{"shorten skips", `UPDATE outlog_skips SET through_position = ?2 WHERE consumer = ?1 AND through_position > ?2 AND ?3 > 0`},
	} {
		if _, err := tx.ExecContext(ctx, step.query, name, target, tx.Now().UnixMicro()); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	discarded := `UPDATE outlog_attempts SET outcome = 'reset', error = 'discarded: ' || error
		WHERE consumer = ?1 AND position > ?2 AND outcome = 'discarded' AND ?3 > 0`
	if q.KeepDiscarded {
		discarded = `INSERT INTO outlog_inbox (consumer, event_id, position, applied_at)
			SELECT DISTINCT consumer, event_id, position, ?3 FROM outlog_attempts WHERE consumer = ?1 AND position > ?2 AND outcome = 'discarded'`
	}
	_, err := tx.ExecContext(ctx, discarded, name, target, tx.Now().UnixMicro())
	return err
}

// clear calls Options.Clear. As with handlers, an unavailable database is what
// counts, whatever Clear says.
func (c *Consumer) clear(ctx context.Context, tx *store.Tx, target int64) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked(p)
		}
		if e := tx.Err(); e != nil && (err == nil || store.IsUnavailable(e)) {
			err = e
		}
	}()
	return c.opts.Clear(ctx, tx, target)
}

// recordSkip notes the events that a forward reset leaves out.
func recordSkip(ctx context.Context, tx *store.Tx, name string, after, through int64) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO outlog_skips (consumer, after_position, through_position, skipped_at) VALUES (?, ?, ?, ?)
		ON CONFLICT (consumer, after_position) DO UPDATE SET through_position = max(through_position, excluded.through_position)`,
		name, after, through, tx.Now().UnixMicro())
	return err
}

// RequestReset asks the program that handles a consumer to reset it, and
// returns the request's id for AwaitReset.
func RequestReset(ctx context.Context, tx Execer, name string, q ResetRequest, now time.Time) (id int64, err error) {
	argument, err := json.Marshal(q)
	if err != nil {
		return 0, err
	}
	r, err := tx.ExecContext(ctx, `INSERT INTO outlog_requests (consumer, verb, argument, requested_at)
		SELECT name, 'reset', ?, ? FROM outlog_consumers WHERE name = ?`, string(argument), now.UnixMicro(), name)
	if err != nil {
		return 0, err
	}
	if n, err := r.RowsAffected(); err != nil || n != 1 {
		return 0, errors.Join(fmt.Errorf("%w: %s", ErrUnknown, name), err)
	}
	return r.LastInsertId()
}

// ErrUnknown is returned for a consumer that has never run on this database.
var ErrUnknown = errors.New("no such consumer")

// RefusedError is returned by AwaitReset when the reset was refused, in the
// words of the program that refused it.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return e.Reason }

// WithdrawReset takes back a request that nobody has served yet. It reports
// false when it is too late: AwaitReset then tells how it ended.
func WithdrawReset(ctx context.Context, tx Execer, id int64, now time.Time) (bool, error) {
	r, err := tx.ExecContext(ctx, `UPDATE outlog_requests SET done_at = ?, error = 'withdrawn' WHERE id = ? AND done_at = 0`, now.UnixMicro(), id)
	if err != nil {
		return false, err
	}
	n, err := r.RowsAffected()
	return n == 1, err
}

// AwaitReset returns nil when the request is done, a *RefusedError that says why
// when it was refused, or ctx's error.
func AwaitReset(ctx context.Context, db *sql.DB, id int64) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var done int64
		var refusal string
		if err := db.QueryRowContext(ctx, `SELECT done_at, error FROM outlog_requests WHERE id = ?`, id).Scan(&done, &refusal); err != nil {
			return err
		}
		if done != 0 && refusal != "" {
			return &RefusedError{refusal}
		}
		if done != 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the program that handles the consumer has not done it yet: %w", ctx.Err())
		}
	}
}
