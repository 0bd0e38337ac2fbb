package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"sync"
	"time"
)

// Tx is the transaction an Update callback works in. It is valid only inside
// that callback and has no Commit: returning nil commits, an error, panic or
// Goexit undoes what this callback did and nothing else. Its statements are
// not cancelled by their context, because SQLite would roll back the work of
// everybody in the group.
type Tx struct {
	mu    sync.Mutex // held during each statement, so that revoke is final
	conn  *sql.Conn
	now   time.Time
	rows  []*sql.Rows
	done  bool
	first int64 // positions appended, 0 if none
	last  int64
}

// revokedCtx makes QueryRowContext of a finished Tx return a Row that holds
// ErrTxDone: a *sql.Row cannot be made otherwise.
var revokedCtx = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(ErrTxDone)
	return ctx
}()

// ExecContext runs a statement that returns no rows.
func (tx *Tx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.done {
		return nil, ErrTxDone
	}
	var r sql.Result
	var plain bool
	err := tx.conn.Raw(func(dc any) (err error) {
		r, plain, err = dc.(*conn).run(query, args)
		return err
	})
	if !plain && err == nil {
		return tx.conn.ExecContext(context.WithoutCancel(ctx), query, args...)
	}
	return r, err
}

// Scan is DB.Scan in the transaction.
func (tx *Tx) Scan(_ context.Context, query string, args []any, row func([]driver.Value) bool) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.done {
		return ErrTxDone
	}
	return tx.conn.Raw(func(dc any) error { return dc.(*conn).scan(query, args, row) })
}

// QueryContext runs a query. Its rows are closed when the callback returns.
func (tx *Tx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.done {
		return nil, ErrTxDone
	}
	r, err := tx.conn.QueryContext(context.WithoutCancel(ctx), query, args...)
	if err == nil {
		tx.rows = append(tx.rows, r)
	}
	return r, err
}

// QueryRowContext runs a query that returns at most one row.
func (tx *Tx) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.done {
		return tx.conn.QueryRowContext(revokedCtx, query, args...)
	}
	return tx.conn.QueryRowContext(context.WithoutCancel(ctx), query, args...)
}

// Err says what speaks against committing what the callback has done so far,
// for whoever calls foreign code with the Tx, which may hide it: ErrTxAborted
// with the cause when SQLite has rolled the whole transaction back, the first
// error that IsUnavailable recognises when a statement met one, ErrForeignKey
// when a deferred foreign key is violated now.
func (tx *Tx) Err() error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.done {
		return ErrTxDone
	}
	return tx.conn.Raw(func(dc any) error {
		k := dc.(*conn)
		if k.dead {
			return k.aborted()
		}
		if k.trouble != nil {
			return k.trouble
		}
		violated, err := k.deferredForeignKeys()
		if err == nil && violated {
			err = ErrForeignKey
		}
		return err
	})
}

// Now is the store's time, the same for the whole callback.
func (tx *Tx) Now() time.Time { return tx.now }

// Appended notes that this transaction gave out the log positions from first
// to last. Its commit wakes the followers of the store (DB.Subscribe) and, at
// FULL, makes those positions known to be on disk (DB.Durable).
func (tx *Tx) Appended(first, last int64) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.first == 0 {
		tx.first = first
	}
	tx.last = max(tx.last, last)
}

// revoke ends the Tx. After it returns no statement of it runs any more.
func (tx *Tx) revoke() {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	tx.done = true
	for _, r := range tx.rows {
		_ = r.Close()
	}
	tx.rows = nil
}
