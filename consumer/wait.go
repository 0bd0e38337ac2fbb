package consumer

import (
	"context"
	"errors"
	"fmt"
	"outlog/internal/attempt"
	"time"
)

// ErrParked is returned by WaitApplied when the event is parked because it, or
// one before it, failed; the caller should not wait longer for it.
var ErrParked = errors.New("event is parked")

// WaitApplied returns nil when the event at position is applied, or passed
// over because the consumer has no route for it or a person discarded it;
// ErrParked when it failed, or waits behind one of its aggregate that did;
// ctx's error when ctx ends first. An external effect that is under way is
// waited for, and so is one that only waits for its turn.
func (c *Consumer) WaitApplied(ctx context.Context, position int64) error {
	for {
		c.mu.Lock()
		moved := c.moved
		c.mu.Unlock()
		done, err := c.isApplied(ctx, position)
		if err != nil && !errors.Is(err, ErrParked) {
			err = fmt.Errorf("wait for %s to apply position %d: %w", c.opts.Name, position, err)
		}
		if done || err != nil {
			return err
		}
		select {
		case <-moved:
		case <-time.After(c.opts.Poll): // another instance may have moved it
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// isApplied looks whether there is something left to wait for. What counts for
// a blocked event is the first of its aggregate that is parked.
func (c *Consumer) isApplied(ctx context.Context, position int64) (bool, error) {
	var cursor int64
	var state, head, reason string
	var attempts int
	err := c.db.Reader().QueryRowContext(ctx, `SELECT coalesce((SELECT position FROM outlog_consumers WHERE name = ?1), -1),
			coalesce(k.state, ''), coalesce(h.state, ''), coalesce(h.attempts, 0), coalesce(h.last_error, '')
		FROM (SELECT 1) LEFT JOIN outlog_parked k ON k.consumer = ?1 AND k.event_id = (SELECT event_id FROM outbox WHERE position = ?2)
		LEFT JOIN outlog_parked h ON h.consumer = ?1 AND h.event_id = CASE WHEN k.state <> 'blocked' THEN k.event_id ELSE
			(SELECT e.event_id FROM outlog_parked e WHERE e.consumer = ?1 AND e.aggregate_type = k.aggregate_type AND e.aggregate_id = k.aggregate_id
				AND NOT (e.state = 'dead' AND ?3) ORDER BY e.position LIMIT 1) END`,
		c.opts.Name, position, c.opts.OnDead == Skip).Scan(&cursor, &state, &head, &attempts, &reason)
	switch {
	case err != nil:
		return false, err
	case state == "":
		return cursor >= position, nil
	case head == "running" || head == "retrying" && attempts == 0:
		return false, nil // on its way
	}
	return false, fmt.Errorf("%w: position %d is %s at consumer %s: %s", ErrParked, position, state, c.opts.Name, attempt.FirstLine(reason))
}
