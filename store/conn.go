package store

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strings"

	"modernc.org/sqlite"
)

// role says what a connection may do.
type role int

const (
	roleWriter role = iota // the one writer: statements of callbacks, no transaction control
	roleReader             // query_only
	rolePlain              // migrations and backups
)

// maxStatements bounds the prepared statements kept per connection; beyond it
// further texts are prepared for one use.
const maxStatements = 512

// connector opens wrapped connections without registering a driver globally.
type connector struct {
	driver.Connector
	role   role
	pragma []pragma
}

// Connect opens a connection, applies the settings and reads them back.
func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	dc, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	k := &conn{sqliteConn: dc.(sqliteConn), role: c.role, stmts: map[string]*cachedStmt{}, controls: map[string]*cachedStmt{}}
	if err := k.configure(ctx, c.pragma); err != nil {
		_ = dc.Close()
		return nil, err
	}
	if c.role == roleWriter {
		// A transaction that SQLite ends by itself must not let later
		// statements run in autocommit: invariant 3 of the package doc.
		dc.(sqlite.HookRegisterer).RegisterRollbackHook(func() { k.dead, k.cause = k.inTx, nil })
		if err := dc.(sqlite.AuthorizerRegisterer).RegisterAuthorizer(k.authorize); err != nil {
			_ = dc.Close()
			return nil, err
		}
	}
	return k, nil
}

// sqliteConn is what every modernc connection implements.
type sqliteConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
	driver.SessionResetter
	driver.Validator
	sqlite.DBStatus
}

// conn wraps one SQLite connection: it keeps prepared statements by their
// text, and on the writer it refuses transaction control from callbacks and
// statements in a transaction that SQLite has already ended. database/sql
// serialises all calls on it.
type conn struct {
	sqliteConn
	role     role
	stmts    map[string]*cachedStmt // of callbacks
	controls map[string]*cachedStmt // of the writer, which authorize let pass
	open     []*rows                // rows not yet closed, writer only

	inTx     bool  // the writer has begun a transaction
	dead     bool  // and SQLite has rolled it back by itself
	cause    error // the error of the statement that did it
	lazy     bool  // commits do not sync now
	trouble  error // the first of this callback's errors that IsUnavailable recognises
	wrote    bool  // this callback ran a statement that may have changed something
	internal bool  // the writer itself is at work: authorize lets it pass
	values   []driver.NamedValue
}

// Unwrap returns the driver's own connection.
func (k *conn) Unwrap() driver.Conn { return k.sqliteConn }

// authorize refuses BEGIN, COMMIT and ROLLBACK in any spelling, and the
// writer's own savepoint, to callbacks.
func (k *conn) authorize(action sqlite.AuthorizerActionCode, arg1, arg2, _, _ string) sqlite.AuthorizerReturnCode {
	if k.internal {
		return sqlite.AuthorizerOK
	}
	switch action {
	case sqlite.AuthTransaction, sqlite.AuthAttach, sqlite.AuthDetach:
		return sqlite.AuthorizerDeny
	case sqlite.AuthSavepoint:
		if strings.EqualFold(arg2, savepointName) {
			return sqlite.AuthorizerDeny
		}
	case sqlite.AuthPragma:
		// Reading a setting is fine, changing one would outlive the callback.
		if arg2 != "" && !strings.HasPrefix(strings.ToLower(arg1), "table_") && !strings.HasPrefix(strings.ToLower(arg1), "index_") {
			return sqlite.AuthorizerDeny
		}
	}
	return sqlite.AuthorizerOK
}

// setLazy chooses whether the next transactions sync at their commit.
func (k *conn) setLazy(lazy bool) error {
	if k.lazy == lazy {
		return nil
	}
	query := "PRAGMA synchronous = FULL"
	if lazy {
		query = "PRAGMA synchronous = NORMAL"
	}
	if err := k.control(query); err != nil {
		return err
	}
	k.lazy = lazy
	return nil
}

// control runs one of the writer's own statements.
func (k *conn) control(query string) error {
	k.internal = true
	defer func() { k.internal = false }()
	_, err := k.exec(context.Background(), query, nil)
	return err
}

func (k *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if k.dead {
		return nil, k.aborted()
	}
	r, err := k.exec(ctx, query, args)
	k.note(err)
	return r, err
}

// run is ExecContext for arguments of the plain types; ok is false, and nothing
// was done, if there is another, which database/sql converts. It spares a
// statement a fifth of its cost.
func (k *conn) run(query string, args []any) (r driver.Result, ok bool, err error) {
	if !k.plain(args) {
		return nil, false, nil
	}
	r, err = k.ExecContext(context.Background(), query, k.values)
	return r, true, err
}

// plain puts args into k.values, if all are of plain types.
func (k *conn) plain(args []any) bool {
	k.values = k.values[:0]
	for i, a := range args {
		switch v := a.(type) {
		case int64, string, nil:
		case int:
			a = int64(v)
		case []byte:
			if v == nil {
				a = nil
			}
		default:
			return false
		}
		k.values = append(k.values, driver.NamedValue{Ordinal: i + 1, Value: a})
	}
	return true
}

// scan calls row with the values of each row of a query, until it returns
// false.
func (k *conn) scan(query string, args []any, row func([]driver.Value) bool) (err error) {
	if !k.plain(args) {
		return fmt.Errorf("%w: arguments of Scan", ErrInvalidOption)
	}
	r, err := k.QueryContext(context.Background(), query, k.values)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	values := make([]driver.Value, len(r.Columns()))
	for {
		switch err := r.Next(values); {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		case !row(values):
			return nil
		}
	}
}

// note remembers what Tx.Err will say about a statement's error.
func (k *conn) note(err error) {
	switch {
	case err == nil || k.role != roleWriter:
	case k.dead:
		k.cause = err
	case k.trouble == nil && IsUnavailable(err):
		k.trouble = err
	}
}

// aborted says that the transaction is gone, and why: whether the database or
// the statement was to blame.
func (k *conn) aborted() error {
	if k.cause == nil {
		return ErrTxAborted
	}
	return fmt.Errorf("%w: %w", ErrTxAborted, k.cause)
}

func (k *conn) exec(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	s, err := k.statement(ctx, query)
	if err != nil {
		return nil, err
	}
	defer s.release()
	k.wrote = true
	return s.stmt.(driver.StmtExecContext).ExecContext(ctx, args)
}

func (k *conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if k.dead {
		return nil, k.aborted()
	}
	s, err := k.statement(ctx, query)
	if err != nil {
		return nil, err
	}
	k.wrote = k.wrote || !s.selects
	r, err := s.stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
	if err != nil {
		k.note(err)
		s.release()
		return nil, err
	}
	w := &rows{sqliteRows: r.(sqliteRows), stmt: s, conn: k}
	if k.role == roleWriter {
		k.open = append(k.open, w)
	}
	return w, nil
}

// statement returns a prepared statement for query, from the cache unless it
// is in use.
func (k *conn) statement(ctx context.Context, query string) (*cachedStmt, error) {
	cache := k.stmts
	if k.internal {
		cache = k.controls
	}
	if s := cache[query]; s != nil && !s.busy {
		s.busy = true
		return s, nil
	}
	ds, err := k.sqliteConn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	s := &cachedStmt{stmt: ds, busy: true, selects: len(query) > 6 && strings.EqualFold(query[:6], "SELECT")}
	if _, taken := cache[query]; !taken && len(cache) < maxStatements {
		s.kept = true
		cache[query] = s
	}
	return s, nil
}

// closeOpenRows ends the reads a callback left open, so that none outlives it.
func (k *conn) closeOpenRows() {
	for _, r := range k.open {
		r.revoke()
	}
	clear(k.open)
	k.open = k.open[:0]
}

// begin opens a transaction.
func (k *conn) begin() error {
	if err := k.control("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	k.inTx, k.dead = true, false
	return nil
}

// enter prepares for a callback.
func (k *conn) enter(savepoint bool) error {
	k.wrote, k.trouble = false, nil
	if !savepoint {
		return nil
	}
	err := k.control("SAVEPOINT " + savepointName)
	k.wrote = false
	return err
}

// leave ends a callback that returned err: what it left open is closed, and
// its error is that of the transaction if that is gone, or could not be
// committed for a violated deferred foreign key, which would fail the whole
// group.
func (k *conn) leave(savepoint bool, err error) error {
	k.closeOpenRows()
	k.trouble = nil
	if err == nil && k.dead {
		err = k.aborted()
	}
	if err == nil && k.wrote {
		var violated bool
		if violated, err = k.deferredForeignKeys(); err == nil && violated {
			err = ErrForeignKey
		}
	}
	if err == nil && savepoint {
		err = k.control("RELEASE " + savepointName)
	}
	return err
}

// deferredForeignKeys reports whether a deferred foreign key is violated now.
func (k *conn) deferredForeignKeys() (bool, error) {
	n, _, err := k.Status(sqlite.DBStatusDeferredFKs, false)
	return n != 0, err
}

func (k *conn) Close() error {
	for _, cache := range []map[string]*cachedStmt{k.stmts, k.controls} {
		for _, s := range cache {
			_ = s.stmt.Close()
		}
		clear(cache)
	}
	return k.sqliteConn.Close()
}

// cachedStmt is a prepared statement and whether somebody is using it.
type cachedStmt struct {
	stmt    driver.Stmt
	busy    bool
	kept    bool // in the connection's cache; otherwise closed after its one use
	selects bool // it is a SELECT, which changes nothing
}

func (s *cachedStmt) release() {
	s.busy = false
	if !s.kept {
		_ = s.stmt.Close()
	}
}

// sqliteRows is what every modernc result set implements.
type sqliteRows interface {
	driver.Rows
	driver.RowsColumnTypeDatabaseTypeName
	driver.RowsColumnTypeLength
	driver.RowsColumnTypeNullable
	driver.RowsColumnTypePrecisionScale
	driver.RowsColumnTypeScanType
}

// rows gives its statement back when closed.
type rows struct {
	sqliteRows
	stmt    *cachedStmt
	conn    *conn
	closed  bool
	revoked bool
}

func (r *rows) Next(dest []driver.Value) error {
	if r.revoked {
		return ErrTxDone
	}
	err := r.sqliteRows.Next(dest)
	if err != io.EOF {
		r.conn.note(err)
	}
	return err
}

func (r *rows) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	err := r.sqliteRows.Close()
	r.stmt.release()
	for i, o := range r.conn.open {
		if o == r {
			last := len(r.conn.open) - 1
			r.conn.open[i] = r.conn.open[last]
			r.conn.open = r.conn.open[:last]
			break
		}
	}
	return err
}

func (r *rows) revoke() {
	r.revoked = true
	if !r.closed {
		r.closed = true
		_ = r.sqliteRows.Close()
		r.stmt.release()
	}
}

// pragma is a setting and the value it must read back as.
type pragma struct{ name, value, want string }

// configure applies the settings in order and verifies each: SQLite ignores
// unknown names and impossible values silently.
func (k *conn) configure(ctx context.Context, settings []pragma) error {
	for _, p := range settings {
		if p.value != "" {
			if _, err := k.sqliteConn.ExecContext(ctx, fmt.Sprintf("PRAGMA %s = %s", p.name, p.value), nil); err != nil {
				return fmt.Errorf("set %s: %w", p.name, err)
			}
		}
		got, err := k.readPragma(ctx, p.name)
		if err != nil {
			return fmt.Errorf("read back %s: %w", p.name, err)
		}
		if got != p.want {
			return fmt.Errorf("%w: %s is %q, want %q", ErrPragma, p.name, got, p.want)
		}
	}
	return nil
}

func (k *conn) readPragma(ctx context.Context, name string) (string, error) {
	r, err := k.sqliteConn.QueryContext(ctx, "PRAGMA "+name, nil)
	if err != nil {
		return "", err
	}
	defer r.Close()
	dest := make([]driver.Value, len(r.Columns()))
	if err := r.Next(dest); err == io.EOF {
		return "", nil // SQLite does not know the name
	} else if err != nil {
		return "", err
	}
	return fmt.Sprint(dest[0]), nil
}
