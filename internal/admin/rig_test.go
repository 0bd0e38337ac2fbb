package admin_test

import (
	"context"
	"errors"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// rig is a data directory with a table of effects, beside which an operator
// works through a database handle of his own, as a command does.
type rig struct {
	t      *testing.T
	dir    string
	op     *store.DB // the operator's
	log    *outbox.Log
	poison sync.Map // aggregate/version → why its handler fails
	broken bool     // the database contradicts itself on purpose
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, dir: t.TempDir()}
	n, err := node.Open(t.Context(), node.Options{Dir: r.dir, NoBroker: true})
	require.NoError(t, err)
	require.NoError(t, n.Close())
	r.op, err = store.Open(t.Context(), store.Options{Path: filepath.Join(r.dir, "outlog.db"), NoMigrate: true, Synchronous: "NORMAL"})
	require.NoError(t, err)
	r.log, err = outbox.Open(t.Context(), r.op)
	require.NoError(t, err)
	r.op.Register(consumer.Checks...)
	r.exec(`CREATE TABLE effects (n INTEGER PRIMARY KEY AUTOINCREMENT, consumer TEXT, event_id TEXT, aggregate TEXT, version INTEGER) STRICT`)
	t.Cleanup(func() {
		r.verify()
		require.NoError(t, r.op.Close())
	})
	return r
}

func (r *rig) verify() {
	r.t.Helper()
	if r.broken {
		return
	}
	results, err := r.op.Verify(context.Background())
	require.NoError(r.t, err)
	for _, c := range results {
		require.True(r.t, c.OK, "%s: %s", c.Name, c.Detail)
	}
}

func (r *rig) exec(query string, args ...any) {
	r.t.Helper()
	require.NoError(r.t, r.op.Update(context.Background(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(context.Background(), query, args...)
		return err
	}))
}

func (r *rig) ask(query string, args ...any) (s string) {
	r.t.Helper()
	require.NoError(r.t, r.op.Reader().QueryRowContext(context.Background(), query, args...).Scan(&s))
	return s
}

func (r *rig) eventually(want, query string, args ...any) {
	r.t.Helper()
	got := ""
	require.Eventually(r.t, func() bool { got = r.ask(query, args...); return got == want }, 20*time.Second, 2*time.Millisecond,
		"%s", query)
}

// append adds one event of type Placed per aggregate named, in one transaction.
func (r *rig) append(aggregates ...string) (last outbox.Appended) {
	r.t.Helper()
	return r.appendType("Placed", aggregates...)
}

func (r *rig) appendType(eventType string, aggregates ...string) (last outbox.Appended) {
	r.t.Helper()
	require.NoError(r.t, r.op.Update(context.Background(), func(tx *store.Tx) error {
		for _, a := range aggregates {
			out, err := r.log.Append(context.Background(), tx, outbox.Event{AggregateType: "order", AggregateID: a, Type: eventType, Data: a})
			if err != nil {
				return err
			}
			last = out[0]
		}
		return nil
	}))
	return last
}

// id is the id of an event given as aggregate/version.
func (r *rig) id(event string) string {
	r.t.Helper()
	aggregate, version, _ := strings.Cut(event, "/")
	return r.ask(`SELECT event_id FROM outbox WHERE aggregate_id = ? AND aggregate_version = ?`, aggregate, version)
}

// options are of a consumer that writes one effect per event, and can undo them.
func (r *rig) options(name string) consumer.Options {
	return consumer.Options{Name: name, Start: consumer.Beginning, Poll: 20 * time.Millisecond, BackoffMin: time.Millisecond, BackoffMax: time.Millisecond,
		Routes: []consumer.Route{consumer.Apply("Placed", r.effect(name))},
		Clear: func(ctx context.Context, tx *store.Tx, after int64) error {
			_, err := tx.ExecContext(ctx, `DELETE FROM effects WHERE consumer = ? AND event_id IN (SELECT event_id FROM outbox WHERE position > ?)`, name, after)
			return err
		}}
}

func (r *rig) effect(name string) func(context.Context, *store.Tx, consumer.Event[string]) error {
	return func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO effects (consumer, event_id, aggregate, version) VALUES (?, ?, ?, ?)`,
			name, e.ID, e.AggregateID, e.AggregateVersion); err != nil {
			return err
		}
		return r.trouble(e)
	}
}

func (r *rig) trouble(e consumer.Event[string]) error {
	why, ok := r.poison.Load(e.AggregateID + "/" + strconv.FormatInt(e.AggregateVersion, 10))
	if !ok {
		return nil
	}
	return consumer.Permanent(errors.New(why.(string)))
}

// effects are those of a consumer in the order they happened.
func (r *rig) effects(name string) string {
	return r.ask(`SELECT coalesce(group_concat(aggregate || '/' || version, ' ' ORDER BY n), '') FROM effects WHERE consumer = ?`, name)
}

// history is what happened to an event at a consumer.
func (r *rig) history(name, event string) string {
	return r.ask(`SELECT coalesce(group_concat(outcome || ' ' || attempt, ', ' ORDER BY id), '') FROM outlog_attempts WHERE consumer = ? AND event_id = ?`, name, r.id(event))
}

// run runs a node with these consumers until the test ends or stop is called.
func (r *rig) run(o node.Options, consumers ...consumer.Options) (n *node.Node, stop func()) {
	r.t.Helper()
	o.Dir = r.dir
	n, err := node.Open(r.t.Context(), o)
	require.NoError(r.t, err)
	for _, c := range consumers {
		require.NoError(r.t, n.Handle(c))
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(r.t, <-done)
		require.NoError(r.t, n.Close())
	})
	r.t.Cleanup(stop)
	return n, stop
}

func (r *rig) waitApplied(n *node.Node, name string, position int64) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(r.t, n.WaitApplied(ctx, name, position))
}

// known leaves the row of a consumer that has come to the end of the log.
func (r *rig) known(name string) {
	r.exec(`INSERT INTO outlog_consumers (name, position, start_position, types, created_at, updated_at)
		SELECT ?, coalesce(max(position), 0), 0, '["Placed"]', 0, 0 FROM outbox`, name)
}

// park leaves behind a consumer, or the relay, that has parked these events
// ("a/1 dead"), and applied all others.
func (r *rig) park(name string, events ...string) {
	r.t.Helper()
	if name != "relay" {
		r.known(name)
		r.exec(`INSERT INTO outlog_inbox (consumer, event_id, position, applied_at) SELECT ?, event_id, position, 0 FROM outbox`, name)
	}
	for _, e := range events {
		event, state, _ := strings.Cut(e, " ")
		r.exec(`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, attempts, next_attempt_at, last_error, fingerprint, failed_at, parked_at)
			SELECT ?1, event_id, position, aggregate_type, aggregate_id, ?2, CASE ?2 WHEN 'blocked' THEN 0 ELSE 10 END, 0, 'no such host ' || position, 'f00', position, 0
			  FROM outbox WHERE event_id = ?3`, name, state, r.id(event))
		r.exec(`DELETE FROM outlog_inbox WHERE consumer = ? AND event_id = ?`, name, r.id(event))
	}
}

// parked are the parked events of a consumer with their states, in log order.
func (r *rig) parked(name string) string {
	return r.ask(`SELECT coalesce(group_concat(k.aggregate_id || '/' || o.aggregate_version || ' ' || k.state, ', ' ORDER BY k.position), '')
		FROM outlog_parked k JOIN outbox o USING (position) WHERE k.consumer = ?`, name)
}
