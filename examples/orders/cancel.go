package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"outlog/outbox"
	"outlog/store"
)

// Cancel marks the order as cancelled and appends its OrderCancelled in one
// transaction. With a key, the same call again returns the first receipt.
//
// Errors: *InputError (the key), ErrNotFound, ErrCancelled, ErrKeyReused, or
// the store's.
func (s *Service) Cancel(ctx context.Context, key, orderID string) (Receipt, error) {
	return s.once(ctx, key, digest("cancel", orderID), func(tx *store.Tx) (Receipt, error) {
		var version int64
		cancelled := OrderCancelled{OrderID: orderID}
		err := tx.QueryRowContext(ctx, `UPDATE orders SET status = 'cancelled', version = version + 1
			WHERE id = ? AND status = 'created' RETURNING version, customer_id`, orderID).Scan(&version, &cancelled.CustomerID)
		if errors.Is(err, sql.ErrNoRows) {
			return Receipt{}, whyNot(ctx, tx, orderID)
		}
		if err != nil {
			return Receipt{}, fmt.Errorf("cancel order: %w", err)
		}
		return s.append(ctx, tx, outbox.Event{AggregateType: AggregateType, AggregateID: orderID, Version: version,
			Type: TypeOrderCancelled, Data: cancelled})
	})
}

// whyNot says why an order could not be cancelled.
func whyNot(ctx context.Context, tx *store.Tx, orderID string) error {
	var exists bool
	err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM orders WHERE id = ?)`, orderID).Scan(&exists)
	switch {
	case err != nil:
		return err
	case !exists:
		return ErrNotFound
	}
	return ErrCancelled
}
