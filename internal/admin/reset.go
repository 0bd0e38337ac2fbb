package admin

import (
	"context"
	"errors"
	"fmt"

	"outlog/consumer"
	"outlog/store"
)

// ResetResult is what a reset did.
type ResetResult struct {
	Consumer   string `json:"consumer"`
	From       int64  `json:"from"`       // the cursor before
	To         int64  `json:"to"`         // and after
	Generation int64  `json:"generation"` // of the consumer now
}

// PendingReset is a reset that was asked for.
type PendingReset struct {
	ID   int64 // of the request
	db   *store.DB
	name string
	from int64
}

// RequestReset asks the program that handles a consumer to reset it, which it
// does within consumer.Options.Poll when it runs, and else when it starts next.
//
// Errors: consumer.ErrUnknown, or the store's.
func RequestReset(ctx context.Context, db *store.DB, name string, q consumer.ResetRequest) (*PendingReset, error) {
	p := &PendingReset{db: db, name: name}
	err := db.Update(ctx, func(tx *store.Tx) error {
		known, err := found(tx.QueryRowContext(ctx, `SELECT position FROM outlog_consumers WHERE name = ?`, name), &p.from)
		if err == nil && !known {
			err = unknown(name)
		}
		if err == nil {
			p.ID, err = consumer.RequestReset(ctx, tx, name, q, tx.Now())
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("request reset: %w", err)
	}
	return p, nil
}

// Wait returns when the reset is done or refused. When ctx ends first the
// request is withdrawn, so that it does not surprise anybody later.
//
// Errors: *consumer.RefusedError with the reason, ctx's (nothing was changed),
// or the store's.
func (p *PendingReset) Wait(ctx context.Context) (ResetResult, error) {
	err := consumer.AwaitReset(ctx, p.db.Reader(), p.ID)
	late := context.WithoutCancel(ctx) // a request must not be left behind
	if _, refused := errors.AsType[*consumer.RefusedError](err); err != nil && !refused {
		if err = p.withdraw(late, err); err == nil {
			err = consumer.AwaitReset(late, p.db.Reader(), p.ID)
		}
	}
	r := ResetResult{Consumer: p.name, From: p.from}
	if err == nil { // run_position is where the consumer last began: its reset
		err = p.db.Reader().QueryRowContext(late, `SELECT run_position, generation FROM outlog_consumers WHERE name = ?`, p.name).
			Scan(&r.To, &r.Generation)
	}
	if err != nil {
		return ResetResult{}, fmt.Errorf("reset %s: %w", p.name, err)
	}
	return r, nil
}

// withdraw takes the request back and returns why, or nil when it was too late.
func (p *PendingReset) withdraw(ctx context.Context, why error) error {
	var ok bool
	err := p.db.Update(ctx, func(tx *store.Tx) (err error) {
		ok, err = consumer.WithdrawReset(ctx, tx, p.ID, tx.Now())
		return err
	})
	if err == nil && !ok {
		return nil
	}
	return errors.Join(why, err)
}

// Reset is RequestReset and Wait.
func Reset(ctx context.Context, db *store.DB, name string, q consumer.ResetRequest) (ResetResult, error) {
	p, err := RequestReset(ctx, db, name, q)
	if err != nil {
		return ResetResult{}, err
	}
	return p.Wait(ctx)
}
