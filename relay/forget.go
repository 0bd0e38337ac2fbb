package relay

import (
	"context"
	"fmt"

	"outlog/store"
)

// Forget removes what is kept about the publication of the events up to a
// position, in the transaction that prunes them. A window that goes on behind
// it stays whole: sequences are counted from its end.
func Forget(ctx context.Context, tx *store.Tx, through int64) error {
	for _, query := range []string{
		`DELETE FROM outlog_publications WHERE first_position <= ?1 AND last_position <= ?1`,
		`DELETE FROM outlog_skips WHERE consumer = 'relay' AND through_position <= ?1`,
	} {
		if _, err := tx.ExecContext(ctx, query, through); err != nil {
			return fmt.Errorf("forget publications: %w", err)
		}
	}
	return nil
}

// Register notes that a relay publishes this log, before the first one runs:
// from then on nothing is pruned that it has not published.
func Register(ctx context.Context, db *store.DB) error {
	var token int64
	err := db.Reader().QueryRowContext(ctx, `SELECT token FROM outlog_relay WHERE name = 'main'`).Scan(&token)
	if err != nil || token > 0 {
		return err
	}
	return db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE outlog_relay SET token = 1 WHERE name = 'main' AND token = 0`)
		return err
	})
}
