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

const selectState = `SELECT position, generation, paused FROM outlog_consumers WHERE name = ?`

func readState(ctx context.Context, tx *store.Tx, name string) (s state, err error) {
	err = tx.QueryRowContext(ctx, selectState, name).Scan(&s.position, &s.generation, &s.paused)
	return s, err
}

// register reads the consumer's row, or makes it when the consumer runs for
// the first time, and stores its event types.
func (c *Consumer) register(ctx context.Context) error {
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
			if err = checkTypes(ctx, tx, c.opts.Name, types); err != nil {
				return err
			}
			_, err = tx.ExecContext(ctx, `UPDATE outlog_consumers SET types = ?, updated_at = ? WHERE name = ? AND types <> ?1`,
				string(encoded), now, c.opts.Name)
		}
		if err != nil {
			return fmt.Errorf("register consumer %s: %w", c.opts.Name, err)
		}
		c.state = s
		return nil
	})
}

// startPosition is the cursor of a consumer that has done nothing yet.
func startPosition(ctx context.Context, tx *store.Tx, s Start) (int64, error) {
	var pruned, head int64
	err := tx.QueryRowContext(ctx, `SELECT pruned_through, max(pruned_through, coalesce((SELECT max(position) FROM outbox), 0))
		FROM outlog_meta`).Scan(&pruned, &head)
	if err != nil {
		return 0, err
	}
	switch s.kind {
	case startNow:
		return head, nil
	case startAt:
		if s.position < pruned {
			return 0, fmt.Errorf("%w: start is %d, the first position still held is after %d", ErrPruned, s.position, pruned)
		}
		if s.position > head {
			return 0, invalid("Start", s.position, fmt.Sprintf("a position up to the log's head, %d", head))
		}
		return s.position, nil
	default:
		return pruned, nil
	}
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
