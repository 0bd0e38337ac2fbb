package admin

import (
	"context"

	"outlog/consumer"
	"outlog/outbox"
	"outlog/relay"
	"outlog/store"
)

// Verify runs the checks of store, log, relay and consumers, then those of the
// application, on one snapshot. A check that fails is a result; an error means
// that they could not be run.
func Verify(ctx context.Context, db *store.DB, application ...store.Check) ([]store.Result, error) {
	if _, err := outbox.OpenReader(ctx, db); err != nil {
		return nil, err
	}
	db.Register(relay.Checks...)
	db.Register(consumer.Checks...)
	db.Register(application...)
	return db.Verify(ctx)
}
