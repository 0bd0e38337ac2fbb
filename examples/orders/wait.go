package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"time"

	"outlog/consumer"
)

// maxWait bounds GET /orders/{id}?wait=.
const maxWait = 30 * time.Second

// Wait waits until both consumers have applied the order's last event, one of
// them has parked it, or ctx ends: whoever asks next reads what was written.
func (s *Service) Wait(ctx context.Context, orderID string) error {
	var position int64
	err := s.n.Store().Reader().QueryRowContext(ctx, `SELECT last_position FROM outlog_aggregates WHERE aggregate_type = ? AND aggregate_id = ?`,
		AggregateType, orderID).Scan(&position)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("wait for order: %w", err)
	}
	for _, name := range []string{Inventory, Notifications} {
		if err := s.n.WaitApplied(ctx, name, position); err != nil && !errors.Is(err, consumer.ErrParked) {
			return err
		}
	}
	return nil
}

// waitFor serves ?wait=2s. When the time is up the order is shown as it is.
func (s *Service) waitFor(r *http.Request, orderID string) error {
	text := r.URL.Query().Get("wait")
	if text == "" {
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 || d > maxWait {
		return refuse("wait", fmt.Sprintf("must be a duration up to %v, such as 2s", maxWait))
	}
	ctx, cancel := context.WithTimeout(r.Context(), d)
	defer cancel()
	if err := s.Wait(ctx, orderID); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}
