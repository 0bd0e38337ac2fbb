package store

import (
	"context"
	"database/sql"
	"fmt"
)

// Querier is what a check reads through: one snapshot of the database.
type Querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Check is a named consistency check, run by verify. Run returns a sentence
// about what it looked at, and an error that says what is wrong.
type Check struct {
	Name string
	Run  func(ctx context.Context, q Querier) (detail string, err error)
}

// Result is the outcome of one check.
type Result struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

// Register adds checks to those that Verify runs. Not safe beside Verify.
func (db *DB) Register(checks ...Check) { db.checks = append(db.checks, checks...) }

// Verify runs all registered checks on one snapshot, in the order they were
// registered. It returns an error only when it could not run them.
func (db *DB) Verify(ctx context.Context) ([]Result, error) {
	tx, err := db.reader.BeginTx(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	defer tx.Rollback()
	results := make([]Result, 0, len(db.checks))
	for _, c := range db.checks {
		r := Result{Name: c.Name, OK: true}
		if r.Detail, err = c.Run(ctx, tx); err != nil {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			r.OK, r.Detail = false, err.Error()
		}
		results = append(results, r)
	}
	return results, nil
}

// integrityCheck is SQLite's own: pages, indexes, constraints.
var integrityCheck = Check{Name: "database integrity", Run: func(ctx context.Context, q Querier) (string, error) {
	var s string
	if err := q.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&s); err != nil {
		return "", err
	}
	if s != "ok" {
		return "", fmt.Errorf("integrity_check: %s", s)
	}
	rows, err := q.QueryContext(ctx, "PRAGMA foreign_key_check")
	if err != nil {
		return "", err
	}
	defer rows.Close()
	if rows.Next() {
		var table, parent string
		var rowid, fk sql.NullInt64
		if err := rows.Scan(&table, &rowid, &parent, &fk); err != nil {
			return "", err
		}
		return "", fmt.Errorf("foreign key of %s row %d to %s is violated", table, rowid.Int64, parent)
	}
	return "integrity_check and foreign_key_check ok", rows.Err()
}}
