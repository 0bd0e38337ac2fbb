package consumer

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"outlog/store"
)

// state is the consumer's row in outlog_consumers, as last seen. Every batch
// reads it again in its own transaction and starts over if it has changed.
type state struct {
	position   int64 // the cursor: last position finished
	generation int64 // raised by every reset
	paused     bool
}

// Execer is a write transaction: *store.Tx, *sql.Tx and the like.
type Execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

type rowQuerier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

const selectState = `SELECT position, generation, paused FROM outlog_consumers WHERE name = ?`

func readState(ctx context.Context, q rowQuerier, name string) (s state, err error) {
	err = q.QueryRowContext(ctx, selectState, name).Scan(&s.position, &s.generation, &s.paused)
	return s, err
}

// reload takes over what somebody else has made of the consumer's row.
func (c *Consumer) reload(ctx context.Context) error {
	s, err := readState(ctx, c.db.Reader(), c.opts.Name)
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("%w: %s", ErrRemoved, c.opts.Name)
	}
	if err == nil {
		c.setState(s)
	}
	return err
}

func (c *Consumer) setState(s state) {
	c.state = s
	c.generation.Store(s.generation)
	c.paused.Store(s.paused)
}

// begin reads the consumer's row, or makes it when the consumer runs for the
// first time, and notes that it runs: external effects of a run that did not
// end are due again, and an unclean end is counted.
func (c *Consumer) begin(ctx context.Context) error {
	types := make([]string, 0, len(c.routes))
	for t := range c.routes {
		types = append(types, t)
	}
	slices.Sort(types)
	encoded, err := json.Marshal(types)
	if err != nil {
		return err
	}
	return c.db.Update(ctx, func(tx *store.Tx) error {
		now := tx.Now().UnixMicro()
		s, err := readState(ctx, tx, c.opts.Name)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			if s.position, err = startPosition(ctx, tx, c.opts.Start); err != nil {
				return err
			}
			s.generation = 1
			_, err = tx.ExecContext(ctx, `INSERT INTO outlog_consumers (name, position, start_position, types, created_at, updated_at)
				VALUES (?1, ?2, ?2, ?3, ?4, ?4)`, c.opts.Name, s.position, string(encoded), now)
		case err == nil:
			if err = checkHorizon(ctx, tx, s.position); err == nil {
				err = checkTypes(ctx, tx, c.opts.Name, types)
			}
		}
		if err != nil {
			return fmt.Errorf("register consumer %s: %w", c.opts.Name, err)
		}
		// An unclean end at the same position as the one before it, or while an
		// external effect was running, makes the next events suspects; see
		// isolate.go.
		var unclean int
		var suspect string
		err = tx.QueryRowContext(ctx, `UPDATE outlog_consumers SET types = ?, on_dead = ?,
				unclean_exits = CASE WHEN running = 0 THEN 0
					WHEN position = run_position OR EXISTS (SELECT 1 FROM outlog_parked WHERE consumer = name AND state = 'running') THEN unclean_exits + 1
					ELSE 1 END,
				suspect_exits = CASE WHEN running = 1 AND suspect <> '' THEN suspect_exits + 1 ELSE suspect_exits END,
				running = 1, run_position = position, updated_at = ? WHERE name = ? RETURNING unclean_exits, suspect`,
			string(encoded), c.opts.OnDead.String(), now, c.opts.Name).Scan(&unclean, &suspect)
		if err != nil {
			return fmt.Errorf("register consumer %s: %w", c.opts.Name, err)
		}
		if _, err := tx.ExecContext(ctx, `UPDATE outlog_parked SET state = 'retrying', next_attempt_at = ?, delay_us = 0
			WHERE consumer = ? AND state = 'running'`, now, c.opts.Name); err != nil {
			return fmt.Errorf("register consumer %s: %w", c.opts.Name, err)
		}
		if err := releaseAll(ctx, tx, c.opts.Name, now); err != nil {
			return fmt.Errorf("register consumer %s: %w", c.opts.Name, err)
		}
		c.isolate = 0
		if unclean >= suspectAfter || suspect != "" {
			// All that the batch can have held which ended the process.
			if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM outlog_parked WHERE consumer = ? AND state = 'retrying'`, c.opts.Name).Scan(&c.isolate); err != nil {
				return fmt.Errorf("register consumer %s: %w", c.opts.Name, err)
			}
			c.isolate += c.opts.BatchRows
		}
		c.setState(s)
		return nil
	})
}

// end notes that the run ended in order.
func (c *Consumer) end(ctx context.Context) error {
	return c.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := tx.ExecContext(ctx, `UPDATE outlog_consumers SET running = 0 WHERE name = ?`, c.opts.Name); err != nil {
			return err
		}
		return c.unmark(ctx, tx)
	})
}

// startPosition is the cursor of a consumer that has done nothing yet.
func startPosition(ctx context.Context, tx *store.Tx, s Start) (int64, error) {
	pruned, head, err := bounds(ctx, tx)
	if err != nil {
		return 0, err
	}
	switch s.kind {
	case startNow:
		return head, nil
	case startAt:
		return s.position, checkPosition(s.position, pruned, head)
	default:
		return pruned, nil
	}
}

// bounds are the lowest and the highest position a cursor can have.
func bounds(ctx context.Context, q rowQuerier) (pruned, head int64, err error) {
	err = q.QueryRowContext(ctx, `SELECT pruned_through, max(pruned_through, coalesce((SELECT max(position) FROM outbox), 0))
		FROM outlog_meta`).Scan(&pruned, &head)
	return pruned, head, err
}

func checkPosition(position, pruned, head int64) error {
	switch {
	case position < pruned:
		return fmt.Errorf("%w: %d; the first position still held is %d, so %d is the lowest to start after", ErrPruned, position, pruned+1, pruned)
	case position > head:
		return invalid("position", position, fmt.Sprintf("at most the log's head, %d", head))
	}
	return nil
}

// checkHorizon refuses a cursor whose next events may have been pruned.
func checkHorizon(ctx context.Context, tx *store.Tx, position int64) error {
	pruned, head, err := bounds(ctx, tx)
	if err != nil || position >= pruned {
		return err
	}
	return checkPosition(position, pruned, head)
}

// checkTypes refuses event types that the consumer has passed over before.
func checkTypes(ctx context.Context, tx *store.Tx, name string, types []string) error {
	var encoded string
	var position, start int64
	err := tx.QueryRowContext(ctx, `SELECT types, position, start_position FROM outlog_consumers WHERE name = ?`, name).
		Scan(&encoded, &position, &start)
	if err != nil {
		return err
	}
	var known []string
	if err := json.Unmarshal([]byte(encoded), &known); err != nil {
		return fmt.Errorf("types of consumer %s: %w", name, err)
	}
	for _, t := range types {
		if position > start && !slices.Contains(known, t) {
			return fmt.Errorf("%w: %s of consumer %s; events of this type may lie behind its position %d", ErrNewTypes, t, name, position)
		}
	}
	return nil
}
