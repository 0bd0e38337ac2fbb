package orders

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/web"
	"outlog/outbox"
	"outlog/store"
)

// direct is an Outlog without a node: only the store and its log.
type direct struct {
	*store.DB
	Log *outbox.Log
}

func (d direct) Store() *store.DB { return d.DB }

// WaitApplied waits for nobody: there are no consumers.
func (d direct) WaitApplied(ctx context.Context, _ string, _ int64) error {
	<-ctx.Done()
	return ctx.Err()
}

func (d direct) Append(ctx context.Context, tx outbox.Execer, events ...outbox.Event) ([]outbox.Appended, error) {
	return d.Log.Append(ctx, tx, events...)
}

// rig is a service on a database of its own.
type rig struct {
	t testing.TB
	direct
	*Service
}

// open returns a service whose database is verified when the test ends.
func open(t testing.TB) *rig {
	r := openDamaged(t)
	t.Cleanup(func() { require.Empty(t, r.faults()) })
	return r
}

// openDamaged is open for tests that damage the database.
func openDamaged(t testing.TB) *rig {
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "outlog.db"), Synchronous: "NORMAL",
		Migrations: []store.Migrations{Migrations()}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	log, err := outbox.Open(t.Context(), db)
	require.NoError(t, err)
	db.Register(Checks()...)
	r := &rig{t: t, direct: direct{db, log}}
	r.Service = New(r.direct, nil)
	return r
}

// faults are the details of the failed checks by name.
func (r *rig) faults() map[string]string {
	results, err := r.Verify(context.Background())
	require.NoError(r.t, err)
	faults := map[string]string{}
	for _, res := range results {
		if !res.OK {
			faults[res.Name] = res.Detail
		}
	}
	return faults
}

func (r *rig) place(o Order) Receipt {
	receipt, err := r.Place(r.t.Context(), "", o)
	require.NoError(r.t, err)
	return receipt
}

func (r *rig) cancel(orderID string) Receipt {
	receipt, err := r.Cancel(r.t.Context(), "", orderID)
	require.NoError(r.t, err)
	return receipt
}

// exec runs statements of somebody who knows no rules.
func (r *rig) exec(query string, args ...any) {
	r.t.Helper()
	require.NoError(r.t, r.Update(context.Background(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(context.Background(), query, args...)
		return err
	}))
}

// ask reads one number.
func (r *rig) ask(query string, args ...any) (n int64) {
	r.t.Helper()
	require.NoError(r.t, r.Reader().QueryRowContext(context.Background(), query, args...).Scan(&n))
	return n
}

// handlers are the consumers' effects, as their routes have them.
var handlers = map[string]map[string]func(context.Context, *store.Tx, outbox.Record) error{
	Inventory:     {TypeOrderCreated: decoded(reserve), TypeOrderCancelled: decoded(release)},
	Notifications: {TypeOrderCreated: decoded(notifyCreated), TypeOrderCancelled: decoded(notifyCancelled)},
}

func decoded[T any](handle func(context.Context, *store.Tx, consumer.Event[T]) error) func(context.Context, *store.Tx, outbox.Record) error {
	return func(ctx context.Context, tx *store.Tx, r outbox.Record) error {
		e := consumer.Event[T]{ID: r.EventID, Position: r.Position, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
			AggregateVersion: r.AggregateVersion, Type: r.Type, Attempt: 1}
		if err := json.Unmarshal(r.Payload, &e.Data); err != nil {
			return err
		}
		return handle(ctx, tx, e)
	}
}

// consume leaves behind what a consumer does that applies the next events, up
// to max of them. Events in parked are parked, and those of their aggregates
// behind them.
func (r *rig) consume(name string, max int, parked ...string) {
	r.t.Helper()
	ctx := context.Background()
	require.NoError(r.t, r.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO outlog_consumers (name, position, start_position, types, created_at, updated_at)
			VALUES (?, 0, 0, '["OrderCancelled","OrderCreated"]', 1, 1)`, name)
		if err != nil {
			return err
		}
		var cursor int64
		if err := tx.QueryRowContext(ctx, `SELECT position FROM outlog_consumers WHERE name = ?`, name).Scan(&cursor); err != nil {
			return err
		}
		events, err := r.Log.Read(ctx, cursor, outbox.Page{Rows: max})
		if err != nil {
			return err
		}
		for _, e := range events {
			if err := applyOrPark(ctx, tx, name, e, parked); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `UPDATE outlog_consumers SET position = ? WHERE name = ?`, e.Position, name); err != nil {
				return err
			}
		}
		return nil
	}))
}

func applyOrPark(ctx context.Context, tx *store.Tx, name string, e outbox.Record, parked []string) error {
	var behind bool
	err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outlog_parked WHERE consumer = ? AND aggregate_id = ?)`, name, e.AggregateID).Scan(&behind)
	if err != nil {
		return err
	}
	for _, id := range parked {
		if behind || id == e.EventID {
			state := map[bool]string{false: "retrying", true: "blocked"}[behind]
			_, err := tx.ExecContext(ctx, `INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, attempts, next_attempt_at, last_error, parked_at)
				VALUES (?, ?, ?, 'order', ?, ?, 3, 1000000, 'shelf on fire', 1)`, name, e.EventID, e.Position, e.AggregateID, state)
			return err
		}
	}
	if err := handlers[name][e.Type](ctx, tx, e); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO outlog_inbox (consumer, event_id, position, applied_at) VALUES (?, ?, ?, 2000000)`, name, e.EventID, e.Position)
	return err
}

// server serves the service as the program does.
func (r *rig) server() *httptest.Server {
	mux := http.NewServeMux()
	r.Routes(mux)
	srv := httptest.NewServer(web.Mux(mux))
	r.t.Cleanup(srv.Close)
	return srv
}

// answer is what a client gets.
type answer struct {
	status int
	header http.Header
	body   string
}

// send sends a request; header is name, value, …
func send(t testing.TB, method, url, body string, header ...string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, url, bytes.NewBufferString(body))
	require.NoError(t, err)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		if header[i+1] == "" {
			req.Header.Del(header[i])
		} else {
			req.Header.Set(header[i], header[i+1])
		}
	}
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return answer{res.StatusCode, res.Header, string(b)}
}

func decode[T any](t testing.TB, a answer) (v T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(a.body), &v), a.body)
	return v
}

// requireProblem holds a refusal to RFC 9457.
func requireProblem(t testing.TB, a answer, status int, field string) {
	t.Helper()
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"))
	p := decode[struct {
		Title, Detail, Field string
		Status               int
	}](t, a)
	require.Equal(t, status, p.Status)
	require.NotEmpty(t, p.Title)
	require.NotEmpty(t, p.Detail)
	require.Equal(t, field, p.Field, p.Detail)
}

// book is an order of two SKUs, one of them on two lines.
var book = Order{CustomerID: "ada", Lines: []Line{{"pen", 2, 150}, {"ink", 1, 999}, {"pen", 3, 140}}}
