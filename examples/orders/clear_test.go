package orders

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/admin"
	"outlog/node"
	"outlog/store"
)

// effects is everything a consumer has written, without the time of writing.
// SKUs with nothing reserved do not count: a reset leaves them.
func (r *rig) effects(q store.Querier, name string) (s string) {
	r.t.Helper()
	query := map[string]string{
		Inventory: `SELECT coalesce(group_concat(line, char(10)), '') FROM (
			SELECT sku || ' ' || reserved AS line FROM inventory WHERE reserved > 0
			UNION ALL SELECT order_id || ' ' || sku || ' ' || qty || ' ' || event_id FROM reservations ORDER BY 1)`,
		Notifications: `SELECT coalesce(group_concat(line, char(10)), '') FROM (
			SELECT event_id || order_id || kind || recipient || body AS line FROM notifications ORDER BY 1)`,
	}[name]
	require.NoError(r.t, q.QueryRowContext(context.Background(), query).Scan(&s))
	return s
}

// history places and cancels orders at random, up to n events.
func (r *rig) history(random *rand.Rand, n int) (all []Receipt) {
	var open []string
	for range n {
		if i := random.IntN(3); i == 0 && len(open) > 0 {
			all = append(all, r.cancel(open[0]))
			open = open[1:]
			continue
		}
		lines := []Line{{"pen", 1 + random.Int64N(9), 10}, {"ink", 2, 5}, {"pen", 1, 10}}[:1+random.IntN(3)]
		all = append(all, r.place(Order{CustomerID: "ada", Lines: lines}))
		open = append(open, all[len(all)-1].OrderID)
	}
	return all
}

// TestClear undoes the effects after every position: what is left is what was
// there when the consumer had come so far. Some events are parked, discarded
// or skipped meanwhile.
func TestClear(t *testing.T) {
	const events = 30
	for _, o := range Consumers() {
		for seed := range uint64(4) {
			t.Run(fmt.Sprintf("%s seed %d", o.Name, seed), func(t *testing.T) {
				random := rand.New(rand.NewPCG(seed, 1))
				r := open(t)
				all := r.history(random, events)
				parked := map[string]bool{}
				var list []string
				for range 4 {
					id := all[random.IntN(len(all))].EventID
					parked[id] = true
					list = append(list, id)
				}
				at := []string{r.effects(r.Reader(), o.Name)}
				for i := range events {
					if i == 20 { // the next two are skipped
						at = append(at, at[i], at[i])
						r.exec(`UPDATE outlog_consumers SET position = position + 2 WHERE name = ?`, o.Name)
						r.exec(`INSERT INTO outlog_skips SELECT name, position - 2, position, 1 FROM outlog_consumers`)
						continue
					}
					if i == 21 {
						continue
					}
					r.consume(o.Name, 1, list...)
					at = append(at, r.effects(r.Reader(), o.Name))
				}
				// A parked event with nothing behind it is discarded.
				r.exec(`INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at)
					SELECT consumer, event_id, position, 1, 'discarded', 'test', 1 FROM outlog_parked k WHERE NOT EXISTS
						(SELECT 1 FROM outlog_parked l WHERE l.aggregate_id = k.aggregate_id AND l.position > k.position)`)
				r.exec(`DELETE FROM outlog_parked WHERE event_id IN (SELECT event_id FROM outlog_attempts)`)
				require.Empty(t, r.faults())

				undo := errors.New("undo")
				for after := range int64(events + 1) {
					err := r.Update(t.Context(), func(tx *store.Tx) error {
						require.NoError(t, o.Clear(t.Context(), tx, after))
						require.Equal(t, at[after], r.effects(tx, o.Name), "after position %d", after)
						return undo
					})
					require.ErrorIs(t, err, undo)
				}
			})
		}
	}
}

// TestClearFromAPrunedLog undoes a cancellation whose OrderCreated is gone.
func TestClearFromAPrunedLog(t *testing.T) {
	r := open(t)
	placed := r.place(book)
	r.consume(Inventory, 100)
	before := r.effects(r.Reader(), Inventory)
	cancelled := r.cancel(placed.OrderID)
	r.consume(Inventory, 100)
	(&scene{rig: r}).prune(placed.Position)
	require.NoError(t, r.Update(t.Context(), func(tx *store.Tx) error {
		require.NoError(t, clearInventory(t.Context(), tx, placed.Position))
		_, err := tx.ExecContext(t.Context(), `UPDATE reservations SET event_id = ? WHERE event_id = ''`, placed.EventID)
		return err
	}))
	require.Equal(t, before, r.effects(r.Reader(), Inventory), "but for the id, which nobody remembers")
	r.exec(`UPDATE outlog_consumers SET position = ?`, placed.Position)
	r.exec(`DELETE FROM outlog_inbox WHERE event_id = ?`, cancelled.EventID)
}

// TestResetOnANode resets both consumers to every position of a history, one
// event of which is discarded: after catching up, everything is as it was.
func TestResetOnANode(t *testing.T) {
	const events = 12
	r := open(t)
	all := r.history(rand.New(rand.NewPCG(7, 7)), events)
	names := []string{Inventory, Notifications}
	for _, name := range names {
		r.consume(name, events, all[2].EventID)
		r.exec(`UPDATE outlog_parked SET state = 'dead' WHERE event_id = ?`, all[2].EventID)
	}
	n, err := node.Open(t.Context(), node.Options{DB: r.Path(), NoBroker: true, Migrations: []store.Migrations{Migrations()}})
	require.NoError(t, err)
	for _, o := range Consumers() {
		o.Poll = 10 * time.Millisecond
		require.NoError(t, n.Handle(o))
	}
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- n.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, <-stopped)
		require.NoError(t, n.Close())
	}()
	count, err := admin.Discard(ctx, r.DB, admin.Selector{EventID: all[2].EventID}, "test")
	require.NoError(t, err)
	require.Equal(t, 2, count)
	caughtUp := func() bool {
		return r.ask(`SELECT min(position) FROM outlog_consumers`) == events && r.ask(`SELECT count(*) FROM outlog_parked`) == 0
	}
	require.Eventually(t, caughtUp, 10*time.Second, time.Millisecond)
	require.Empty(t, r.faults())
	view, err := r.Show(ctx, all[2].OrderID)
	require.NoError(t, err)
	states := map[string]bool{}
	for _, e := range view.Events {
		for _, c := range e.Consumers {
			states[c.State] = true
		}
	}
	require.Contains(t, states, "discarded")
	for _, name := range names {
		want := r.effects(r.Reader(), name)
		for after := range events + 1 {
			_, err := admin.Reset(ctx, r.DB, name, consumer.ResetRequest{To: fmt.Sprint(after), KeepDiscarded: true})
			require.NoError(t, err)
			require.Empty(t, r.faults(), "%s on its way from %d", name, after)
			require.Eventually(t, caughtUp, 10*time.Second, time.Millisecond)
			require.Empty(t, r.faults())
			require.Equal(t, want, r.effects(r.Reader(), name), "%s from %d", name, after)
		}
	}
}
