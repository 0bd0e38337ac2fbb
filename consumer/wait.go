package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrParked is returned by WaitApplied when the event is parked; the caller
// should not wait longer for it.
var ErrParked = errors.New("event is parked")

// WaitApplied returns nil when the event at position is applied, or passed
// over because the consumer has no route for it; ErrParked when it is parked;
// ctx's error when ctx ends first.
func (c *Consumer) WaitApplied(ctx context.Context, position int64) error {
	for {
		c.mu.Lock()
		moved := c.moved
		c.mu.Unlock()
		var cursor int64
		var state, reason string
		err := c.db.Reader().QueryRowContext(ctx, `SELECT coalesce((SELECT position FROM outlog_consumers WHERE name = ?1), -1),
				coalesce((SELECT state FROM outlog_parked WHERE consumer = ?1 AND position = ?2), ''),
				coalesce((SELECT last_error FROM outlog_parked WHERE consumer = ?1 AND position = ?2), '')`,
			c.opts.Name, position).Scan(&cursor, &state, &reason)
		switch {
		case err != nil:
			return fmt.Errorf("wait for %s to apply position %d: %w", c.opts.Name, position, err)
		case state != "":
			return fmt.Errorf("%w: position %d is %s at consumer %s: %s", ErrParked, position, state, c.opts.Name, firstLine(reason))
		case cursor >= position:
			return nil
		}
		select {
		case <-moved:
		case <-time.After(c.opts.Poll): // another instance may have moved it
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
