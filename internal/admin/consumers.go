package admin

import (
	"context"
	"database/sql"
	"fmt"

	"outlog/internal/lock"
	"outlog/store"
)

// ConsumerDetail is all there is to know about a consumer.
type ConsumerDetail struct {
	Consumer
	StartPosition int64   `json:"start_position"` // events up to here are not its business
	Running       bool    `json:"running"`        // in a live program
	OnDead        string  `json:"on_dead"`        // block or skip
	Retrying      int64   `json:"retrying"`       // waiting for another attempt
	Blocked       int64   `json:"blocked"`        // waiting behind an earlier event of their aggregate
	Executing     int64   `json:"executing"`      // external effects under way
	Skipped       []Range `json:"skipped"`        // left out by resets to a later position
	ResetPending  bool    `json:"reset_pending"`  // a reset was asked for and is not done yet
}

// Range is the positions above After, up to Through.
type Range struct {
	After   int64 `json:"after"`
	Through int64 `json:"through"`
}

// ListConsumers reads all consumers in one snapshot, by name. Cost: that of
// ReadStatus.
func ListConsumers(ctx context.Context, db *store.DB) ([]ConsumerDetail, error) {
	_, owned, err := lock.Holder(db.Path())
	if err != nil {
		return nil, err
	}
	tx, err := db.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("list consumers: %w", err)
	}
	defer tx.Rollback()
	consumers, err := consumerStatus(ctx, tx, db.Now())
	if err != nil {
		return nil, fmt.Errorf("list consumers: %w", err)
	}
	list := make([]ConsumerDetail, len(consumers))
	for i, c := range consumers {
		if list[i], err = detail(ctx, tx, c, owned); err != nil {
			return nil, fmt.Errorf("list consumers: %s: %w", c.Name, err)
		}
	}
	return list, nil
}

func detail(ctx context.Context, q store.Querier, c Consumer, owned bool) (d ConsumerDetail, err error) {
	d.Consumer = c
	err = q.QueryRowContext(ctx, `SELECT start_position, running, on_dead,
			(SELECT count(*) FROM outlog_parked WHERE consumer = name AND state IN ('retrying', 'delayed')),
			(SELECT count(*) FROM outlog_parked WHERE consumer = name AND state = 'blocked'),
			(SELECT count(*) FROM outlog_parked WHERE consumer = name AND state = 'running'),
			EXISTS (SELECT 1 FROM outlog_requests WHERE consumer = name AND done_at = 0)
		FROM outlog_consumers WHERE name = ?`, c.Name).
		Scan(&d.StartPosition, &d.Running, &d.OnDead, &d.Retrying, &d.Blocked, &d.Executing, &d.ResetPending)
	if err != nil {
		return d, err
	}
	d.Running = d.Running && owned
	d.Skipped, err = collect(ctx, q, func(rows *sql.Rows, r *Range) error { return rows.Scan(&r.After, &r.Through) },
		`SELECT after_position, through_position FROM outlog_skips WHERE consumer = ? ORDER BY after_position`, c.Name)
	return d, err
}

// Pause stops a consumer at the end of the batch it is in; Resume lets it go
// on. A running consumer notices within consumer.Options.Poll, and before its
// next batch whatever happens. changed is false when it was paused already.
//
// Errors: consumer.ErrUnknown, or the store's.
func Pause(ctx context.Context, db *store.DB, name string) (changed bool, err error) {
	return setPaused(ctx, db, name, true)
}

// Resume is the opposite of Pause.
func Resume(ctx context.Context, db *store.DB, name string) (changed bool, err error) {
	return setPaused(ctx, db, name, false)
}

// setPaused writes no other column, so a batch that commits meanwhile loses
// nothing to it, and the batch's own write leaves paused alone.
func setPaused(ctx context.Context, db *store.DB, name string, paused bool) (changed bool, err error) {
	err = db.Update(ctx, func(tx *store.Tx) error {
		r, err := tx.ExecContext(ctx, `UPDATE outlog_consumers SET paused = ?1, updated_at = ?2 WHERE name = ?3 AND paused <> ?1`,
			paused, tx.Now().UnixMicro(), name)
		if err != nil {
			return err
		}
		n, err := r.RowsAffected()
		if changed = n == 1; err != nil || changed {
			return err
		}
		return CheckKnown(ctx, tx, name)
	})
	if err != nil {
		return false, fmt.Errorf("change consumer: %w", err)
	}
	return changed, nil
}

// CheckKnown returns consumer.ErrUnknown for a consumer that has never run here.
func CheckKnown(ctx context.Context, q store.Querier, name string) error {
	var ok bool
	err := q.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outlog_consumers WHERE name = ?)`, name).Scan(&ok)
	if err == nil && !ok {
		return unknown(name)
	}
	return err
}
