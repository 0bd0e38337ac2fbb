package admin_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/admin"
	"outlog/internal/lock"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// TestListConsumers reads everything there is to know, and who runs.
func TestListConsumers(t *testing.T) {
	r := newRig(t)
	r.append("a", "a", "b", "c")
	r.park("mail", "a/1 dead", "a/2 blocked", "b/1 retrying", "c/1 running")
	r.append("d")
	r.exec(`UPDATE outlog_consumers SET running = 1, paused = 1, on_dead = 'skip'`)
	r.exec(`INSERT INTO outlog_skips VALUES ('mail', 5, 6, 0)`)
	r.broken = true // all made up
	_, err := admin.RequestReset(t.Context(), r.op, "mail", consumer.ResetRequest{To: "now"})
	require.NoError(t, err)

	list, err := admin.ListConsumers(t.Context(), r.op)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.GreaterOrEqual(t, list[0].LagSeconds, 0.0)
	list[0].LagSeconds = 0
	want := admin.ConsumerDetail{OnDead: "skip", Retrying: 1, Blocked: 1, Executing: 1, Skipped: []admin.Range{{After: 5, Through: 6}}, ResetPending: true,
		Consumer: admin.Consumer{Name: "mail", Position: 4, Generation: 1, Paused: true, Backlog: admin.Backlog{LagEvents: 1, Parked: 3, Dead: 1}}}
	require.Equal(t, want, list[0], "the flag of a program that was killed does not make it run")

	l, err := lock.Acquire(filepath.Join(r.dir, "outlog.db"))
	require.NoError(t, err)
	list, err = admin.ListConsumers(t.Context(), r.op)
	require.NoError(t, err)
	require.True(t, list[0].Running)
	require.NoError(t, l.Release())
}

// TestPauseBesideABusyConsumer pauses and resumes again and again while events
// flow: no batch and no pause undoes the other.
func TestPauseBesideABusyConsumer(t *testing.T) {
	r := newRig(t)
	o := r.options("mail")
	o.Poll, o.BatchRows = 10*time.Millisecond, 3
	n, _ := r.run(node.Options{}, o, r.options("other"))
	r.waitApplied(n, "mail", r.append("a").Position)
	var last outbox.Appended
	for i := range 60 {
		last = r.append("a", "b", "a", "c", "d")
		change := admin.Pause
		if i%2 == 1 {
			change = admin.Resume
		}
		changed, err := change(t.Context(), r.op, "mail")
		require.NoError(t, err)
		require.True(t, changed)
		changed, err = change(t.Context(), r.op, "mail")
		require.NoError(t, err)
		require.False(t, changed)
	}
	r.waitApplied(n, "mail", last.Position)

	_, err := admin.Pause(t.Context(), r.op, "mail")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return n.Status().Consumers[0].Paused }, 5*time.Second, time.Millisecond, "noticed without an event")
	first := last.Position
	last = r.append("a", "b")
	r.waitApplied(n, "other", last.Position)
	require.Equal(t, strconv.FormatInt(first, 10), r.ask(`SELECT position FROM outlog_consumers WHERE name = 'mail'`))
	_, err = admin.Resume(t.Context(), r.op, "mail")
	require.NoError(t, err)
	r.waitApplied(n, "mail", last.Position)
	require.Equal(t, r.effects("other"), r.effects("mail"), "all, once, in order")
	require.Equal(t, "303 1 0", r.ask(`SELECT count(*) || ' ' || generation || ' ' || paused FROM effects, outlog_consumers WHERE consumer = 'mail' AND name = 'mail'`))

	_, err = admin.Pause(t.Context(), r.op, "nobody")
	require.ErrorIs(t, err, consumer.ErrUnknown)
	_, err = admin.Resume(t.Context(), r.op, "relay")
	require.ErrorIs(t, err, consumer.ErrUnknown)
}

// reset asks the running node for a reset and waits.
func (r *rig) reset(name string, q consumer.ResetRequest) (admin.ResetResult, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), 20*time.Second)
	defer cancel()
	return admin.Reset(ctx, r.op, name, q)
}

// TestReset replays from every kind of target, beside a running node.
func TestReset(t *testing.T) {
	r := newRig(t)
	n, _ := r.run(node.Options{}, r.options("mail"))
	last := r.append("a", "b", "a", "c").Position
	r.waitApplied(n, "mail", last)
	generation := int64(1)
	for _, c := range []struct {
		to   string
		want int64
	}{{"2", 2}, {"beginning", 0}, {"4", 4}, {"now", 4}, {"0", 0}, {"3", 3}} {
		got, err := r.reset("mail", consumer.ResetRequest{To: c.to})
		require.NoError(t, err, c.to)
		generation++
		require.Equal(t, admin.ResetResult{Consumer: "mail", From: 4, To: c.want, Generation: generation}, got)
		r.eventually("4", `SELECT position FROM outlog_consumers`)
		require.Equal(t, "a/1 b/1 a/2 c/1", r.effects("mail"), c.to)
		r.verify()
	}

	_, err := admin.Pause(t.Context(), r.op, "mail")
	require.NoError(t, err)
	got, err := r.reset("mail", consumer.ResetRequest{To: "1"}) // a paused consumer can be reset
	require.NoError(t, err)
	require.Equal(t, int64(1), got.To)
	require.Equal(t, "a/1", r.effects("mail"))
	_, err = r.reset("mail", consumer.ResetRequest{To: "3"}) // forward: leaves b/1 and a/2 out
	require.NoError(t, err)
	_, err = admin.Resume(t.Context(), r.op, "mail")
	require.NoError(t, err)
	r.waitApplied(n, "mail", last)
	require.Equal(t, "a/1 c/1", r.effects("mail"))
	list, err := admin.ListConsumers(t.Context(), r.op)
	require.NoError(t, err)
	require.Equal(t, []admin.Range{{After: 1, Through: 3}}, list[0].Skipped)
	require.True(t, list[0].Running)
	_, err = r.reset("nobody", consumer.ResetRequest{To: "now"})
	require.ErrorIs(t, err, consumer.ErrUnknown)
}

// TestResetRefusals: the reason comes back, nothing changes, and the node runs
// on.
func TestResetRefusals(t *testing.T) {
	r := newRig(t)
	plain, appends, all := r.options("plain"), r.options("appends"), r.options("all")
	plain.Clear = nil
	all.ClearAll = true
	var n *node.Node
	appends.Routes = []consumer.Route{consumer.Apply("Placed", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		_, err := n.Append(ctx, tx, outbox.Event{AggregateType: "copy", AggregateID: e.AggregateID, Type: "Copied", Data: e.Data})
		return err
	})}
	broken := r.options("broken")
	broken.Clear = func(context.Context, *store.Tx, int64) error { return errors.New("cannot undo") }
	last := r.append("a", "a", "a", "a").Position
	n, stop := r.run(node.Options{NoBroker: true}, plain, all, broken)
	for _, name := range []string{"plain", "all", "broken"} {
		r.waitApplied(n, name, last)
	}
	stop()
	r.exec(`UPDATE outlog_meta SET pruned_through = 2`)
	r.exec(`DELETE FROM outbox WHERE position <= 2`)
	n, _ = r.run(node.Options{NoBroker: true}, plain, all, broken, appends)
	r.waitApplied(n, "appends", last)
	r.broken = true // pruning is made up: the inbox rows of pruned events are there

	for _, c := range []struct {
		name string
		q    consumer.ResetRequest
		why  string
	}{
		{"plain", consumer.ResetRequest{To: "3"}, consumer.ErrNoClear.Error()},
		{"all", consumer.ResetRequest{To: "3"}, "it can only be reset to the beginning"},
		{"all", consumer.ResetRequest{To: "1"}, "below the prune horizon: 1; the first position still held is 3"},
		{"plain", consumer.ResetRequest{To: "0"}, "the first position still held is 3"},
		{"all", consumer.ResetRequest{To: "99"}, "at most the log's head"},
		{"all", consumer.ResetRequest{To: "soon"}, `"beginning", "now" or a position`},
		{"appends", consumer.ResetRequest{To: "beginning"}, consumer.ErrAppends.Error()},
		{"broken", consumer.ResetRequest{To: "3"}, "cannot undo"},
	} {
		_, err := r.reset(c.name, c.q)
		var refused *consumer.RefusedError
		require.ErrorAs(t, err, &refused, c.why)
		require.ErrorContains(t, err, c.why)
	}
	require.Equal(t, "1", r.ask(`SELECT max(generation) FROM outlog_consumers`))
	_, err := r.reset("all", consumer.ResetRequest{To: "beginning"})
	require.NoError(t, err)
	r.waitApplied(n, "all", last)
}

// TestResetWithoutAnOwner is not done, and not left behind either.
func TestResetWithoutAnOwner(t *testing.T) {
	r := newRig(t)
	r.known("mail")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p, err := admin.RequestReset(t.Context(), r.op, "mail", consumer.ResetRequest{To: "now"})
	require.NoError(t, err)
	_, err = p.Wait(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, "withdrawn", r.ask(`SELECT error FROM outlog_requests WHERE done_at > 0`))
	_, stop := r.run(node.Options{NoBroker: true}, r.options("mail"))
	r.eventually("1", `SELECT running FROM outlog_consumers`)
	stop()
	require.Equal(t, "1", r.ask(`SELECT generation FROM outlog_consumers`))
}

// TestResetBesideAConstantStream: a stream that is never silent does not keep a
// request waiting.
func TestResetBesideAConstantStream(t *testing.T) {
	r := newRig(t)
	o := r.options("mail")
	o.Poll = 500 * time.Millisecond
	n, _ := r.run(node.Options{}, o)
	r.waitApplied(n, "mail", r.append("a").Position)
	done := make(chan error, 1)
	go func() {
		_, err := r.reset("mail", consumer.ResetRequest{To: "beginning"})
		done <- err
	}()
	began := time.Now()
	var last outbox.Appended
	for waiting := true; waiting && time.Since(began) < 10*time.Second; {
		last = r.append("a")
		r.waitApplied(n, "mail", last.Position)
		select {
		case err := <-done:
			require.NoError(t, err)
			waiting = false
		default:
		}
	}
	require.Less(t, time.Since(began), 10*time.Second)
	r.waitApplied(n, "mail", last.Position)
	require.Equal(t, strconv.FormatInt(last.Version, 10), r.ask(`SELECT count(*) FROM effects`))
}

// TestResetOfADiscardedEvent: a reset handles it again, or leaves it discarded.
func TestResetOfADiscardedEvent(t *testing.T) {
	for _, c := range []struct {
		name string
		keep bool
		want string
	}{{"keep", true, "b/1 a/2"}, {"again", false, "a/1 b/1 a/2"}} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.poison.Store("a/1", "no")
			n, _ := r.run(node.Options{}, r.options("mail"))
			last := r.append("a", "b", "a").Position
			r.waitApplied(n, "mail", 2)
			_, err := admin.Discard(t.Context(), r.op, admin.Selector{All: true}, "not needed")
			require.NoError(t, err)
			r.eventually("0", `SELECT count(*) FROM outlog_parked`)
			r.poison.Clear()
			_, err = admin.Pause(t.Context(), r.op, "mail")
			require.NoError(t, err)
			_, err = r.reset("mail", consumer.ResetRequest{To: "beginning", KeepDiscarded: c.keep})
			require.NoError(t, err)
			r.verify() // at its beginning
			_, err = admin.Resume(t.Context(), r.op, "mail")
			require.NoError(t, err)
			r.waitApplied(n, "mail", last)
			require.Equal(t, c.want, r.effects("mail"))
			require.Contains(t, r.ask(`SELECT group_concat(error) FROM outlog_attempts`), "not needed", "the history stays")
		})
	}
}

// TestResetLetsTypesGrow: a consumer that gets a new type starts after a reset
// to the beginning, which its own refused start executes.
func TestResetLetsTypesGrow(t *testing.T) {
	r := newRig(t)
	n, stop := r.run(node.Options{NoBroker: true}, r.options("mail"))
	r.append("a")
	r.appendType("Cancelled", "a")
	last := r.append("b").Position
	r.waitApplied(n, "mail", last)
	stop()
	grown := r.options("mail")
	grown.Routes = append(grown.Routes, consumer.Apply("Cancelled", r.effect("mail")))

	refused, err := node.Open(t.Context(), node.Options{Dir: r.dir, NoBroker: true})
	require.NoError(t, err)
	require.NoError(t, refused.Handle(grown))
	require.ErrorIs(t, refused.Run(t.Context()), consumer.ErrNewTypes)
	require.NoError(t, refused.Close())

	_, err = admin.RequestReset(t.Context(), r.op, "mail", consumer.ResetRequest{To: "beginning"})
	require.NoError(t, err)
	r.run(node.Options{NoBroker: true}, grown)
	r.eventually("a/1 a/2 b/1", `SELECT coalesce(group_concat(aggregate || '/' || version, ' ' ORDER BY n), '') FROM effects`)
}

// TestRemove frees a consumer that nobody runs.
func TestRemove(t *testing.T) {
	r := newRig(t)
	r.poison.Store("a/1", "no")
	r.poison.Store("c/1", "neither")
	n, stop := r.run(node.Options{NoBroker: true}, r.options("mail"), r.options("other"))
	last := r.append("a", "a", "b", "c", "d").Position
	r.waitApplied(n, "mail", last)
	r.waitApplied(n, "other", last)
	_, err := admin.Discard(t.Context(), r.op, admin.Selector{EventID: r.id("c/1")}, "gone")
	require.NoError(t, err)
	_, err = admin.Remove(t.Context(), r.op, "mail")
	require.ErrorIs(t, err, admin.ErrInUse)
	require.ErrorContains(t, err, "pid "+strconv.Itoa(os.Getpid()))
	stop()
	r.exec(`UPDATE outlog_consumers SET running = 1`) // as if it had been killed

	got, err := admin.Remove(t.Context(), r.op, "mail")
	require.NoError(t, err)
	require.Equal(t, admin.Removed{Consumer: "mail", Inbox: 2, Parked: 2}, got)
	require.Equal(t, "other 2 2", r.ask(`SELECT group_concat(name) || ' ' || (SELECT count(*) FROM outlog_inbox) || ' ' || (SELECT count(*) FROM outlog_parked) FROM outlog_consumers`))
	require.Equal(t, "failed 1, reset 1", r.history("mail", "a/1"))
	require.Equal(t, "failed 1, reset 1", r.history("mail", "c/1"))
	_, err = admin.Remove(t.Context(), r.op, "mail")
	require.ErrorIs(t, err, consumer.ErrUnknown)

	r.poison.Clear()
	r.exec(`DELETE FROM effects WHERE consumer = 'mail'`)
	n, _ = r.run(node.Options{NoBroker: true}, r.options("mail"))
	r.waitApplied(n, "mail", last)
	require.Equal(t, "a/1 a/2 b/1 c/1 d/1", r.effects("mail"), "one of that name begins anew")
}

// TestRemoveInSteps: a large inbox goes in several transactions.
func TestRemoveInSteps(t *testing.T) {
	const events = 12_000
	r := newRig(t)
	r.append("a", "b")
	r.park("mail", "b/1 dead")
	r.exec(`WITH RECURSIVE n (i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
		INSERT INTO outlog_inbox (consumer, event_id, position, applied_at) SELECT 'mail', 'pruned ' || i, 0, 0 FROM n`, events)
	got, err := admin.Remove(t.Context(), r.op, "mail")
	require.NoError(t, err)
	require.Equal(t, admin.Removed{Consumer: "mail", Inbox: events, Parked: 1}, got)
	require.Equal(t, "0 0 0", r.ask(`SELECT (SELECT count(*) FROM outlog_inbox) || ' ' || (SELECT count(*) FROM outlog_parked) || ' ' || (SELECT count(*) FROM outlog_consumers)`))
}
