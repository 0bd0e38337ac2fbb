package admin_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/admin"
	"outlog/node"
	"outlog/outbox"
)

// TestListAndShow reads what two consumers and the relay have parked.
func TestListAndShow(t *testing.T) {
	r := newRig(t)
	r.append("a", "a", "b", "a")
	r.park("mail", "a/1 dead", "a/2 blocked", "b/1 dead", "a/3 blocked")
	r.park("relay", "b/1 dead")
	r.exec(`UPDATE outlog_parked SET last_error = last_error || char(10) || 'second line'`)

	for _, c := range []struct {
		consumer string
		limit    int
		want     []string
	}{
		{"", 0, []string{"mail a/1 2", "mail b/1 0", "relay b/1 0"}},
		{"", 2, []string{"mail a/1 2", "mail b/1 0"}},
		{"relay", 0, []string{"relay b/1 0"}},
		{"nobody", 0, nil},
	} {
		letters, err := admin.ListDead(t.Context(), r.op, c.consumer, c.limit)
		require.NoError(t, err)
		var got []string
		for _, d := range letters {
			require.Equal(t, r.id(d.AggregateID+"/1"), d.EventID)
			require.Equal(t, "Placed", d.Type)
			require.Equal(t, 10, d.Attempts)
			require.NotContains(t, d.Error, "\n")
			require.Equal(t, time.UnixMicro(d.Position).UTC(), d.FailedAt)
			got = append(got, d.Consumer+" "+d.AggregateID+"/1 "+string(rune('0'+d.Waiting)))
		}
		require.Equal(t, c.want, got)
	}

	groups, err := admin.GroupDead(t.Context(), r.op, "")
	require.NoError(t, err)
	require.Equal(t, []admin.DeadGroup{
		{Consumer: "mail", Fingerprint: "f00", Count: 2, First: time.UnixMicro(1).UTC(), Last: time.UnixMicro(3).UTC(), SampleEventID: r.id("b/1"), SampleError: "no such host 3"},
		{Consumer: "relay", Fingerprint: "f00", Count: 1, First: time.UnixMicro(3).UTC(), Last: time.UnixMicro(3).UTC(), SampleEventID: r.id("b/1"), SampleError: "no such host 3"},
	}, groups)

	p, err := admin.ShowParked(t.Context(), r.op, r.id("a/1"), "")
	require.NoError(t, err)
	require.JSONEq(t, `"a"`, string(p.Payload))
	require.Equal(t, []admin.Place{{Consumer: "mail", State: "dead", Attempts: 10, Fingerprint: "f00", History: []admin.Attempt{}, Waiting: 2,
		Behind: []admin.Behind{{r.id("a/2"), "Placed", 2, 2}, {r.id("a/3"), "Placed", 3, 4}}}}, p.Places)
	p, err = admin.ShowParked(t.Context(), r.op, r.id("b/1"), "relay")
	require.NoError(t, err)
	require.Len(t, p.Places, 1)
	_, err = admin.ShowParked(t.Context(), r.op, r.id("a/1"), "relay")
	require.ErrorIs(t, err, admin.ErrNotFound)
	_, err = admin.ShowParked(t.Context(), r.op, "01AAAAAAAAAAAAAAAAAAAAAAAA", "")
	require.ErrorIs(t, err, outbox.ErrNotFound)
}

// TestSelectors redrives and discards what each selector means, twice: the
// second time there is nothing to do.
func TestSelectors(t *testing.T) {
	for _, c := range []struct {
		name     string
		selector func(r *rig) admin.Selector
		want     int
		err      error
	}{
		{"event at both", func(r *rig) admin.Selector { return admin.Selector{EventID: r.id("b/1")} }, 2, nil},
		{"event at one", func(r *rig) admin.Selector { return admin.Selector{EventID: r.id("b/1"), Consumer: "relay"} }, 1, nil},
		{"event that is blocked", func(r *rig) admin.Selector { return admin.Selector{EventID: r.id("a/2")} }, 0, nil},
		{"event that was applied", func(r *rig) admin.Selector { return admin.Selector{EventID: r.id("c/1")} }, 0, admin.ErrNotFound},
		{"no event", func(*rig) admin.Selector { return admin.Selector{EventID: "x"} }, 0, admin.ErrNotFound},
		{"consumer", func(*rig) admin.Selector { return admin.Selector{Consumer: "mail"} }, 2, nil},
		{"no consumer", func(*rig) admin.Selector { return admin.Selector{Consumer: "nobody"} }, 0, consumer.ErrUnknown},
		{"fingerprint", func(*rig) admin.Selector { return admin.Selector{Fingerprint: "f00"} }, 3, nil},
		{"fingerprint at one", func(*rig) admin.Selector { return admin.Selector{Fingerprint: "f00", Consumer: "mail"} }, 2, nil},
		{"fingerprint of none", func(*rig) admin.Selector { return admin.Selector{Fingerprint: "bad"} }, 0, nil},
		{"all", func(*rig) admin.Selector { return admin.Selector{All: true} }, 3, nil},
		{"all of one", func(*rig) admin.Selector { return admin.Selector{All: true, Consumer: "mail"} }, 0, admin.ErrSelector},
		{"two", func(*rig) admin.Selector { return admin.Selector{EventID: "x", Fingerprint: "f00"} }, 0, admin.ErrSelector},
		{"none", func(*rig) admin.Selector { return admin.Selector{} }, 0, admin.ErrSelector},
	} {
		for verb, do := range map[string]func(context.Context, *rig, admin.Selector) (int, error){
			"redrive": func(ctx context.Context, r *rig, s admin.Selector) (int, error) { return admin.Redrive(ctx, r.op, s) },
			"discard": func(ctx context.Context, r *rig, s admin.Selector) (int, error) {
				return admin.Discard(ctx, r.op, s, "not needed")
			},
		} {
			t.Run(verb+" "+c.name, func(t *testing.T) {
				r := newRig(t)
				r.append("a", "a", "b", "c")
				r.park("mail", "a/1 dead", "a/2 blocked", "b/1 dead")
				r.park("relay", "b/1 dead")
				for _, want := range []int{c.want, 0} {
					n, err := do(t.Context(), r, c.selector(r))
					require.ErrorIs(t, err, c.err)
					require.Equal(t, want, n)
				}
			})
		}
	}
}

// TestRedriveBesideANode: the consumer takes up what a command redrives while it
// runs, in order, and the history stays.
func TestRedriveBesideANode(t *testing.T) {
	r := newRig(t)
	r.poison.Store("a/1", "smtp 4711 down")
	o := r.options("mail")
	o.Poll = 0 // the default
	n, _ := r.run(node.Options{}, o)
	last := r.append("a", "b", "a", "a")
	r.waitApplied(n, "mail", 2)
	r.eventually("4", `SELECT position FROM outlog_consumers`)
	require.Equal(t, "a/1 dead, a/2 blocked, a/3 blocked", r.parked("mail"))

	redrive := func() {
		n, err := admin.Redrive(t.Context(), r.op, admin.Selector{EventID: r.id("a/1")})
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	redrive()
	r.eventually("2", `SELECT count(*) FROM outlog_attempts WHERE outcome = 'failed'`) // dies again
	require.Equal(t, "failed 1, redriven 1, failed 1", r.history("mail", "a/1"))

	r.poison.Clear()
	redrive()
	began := time.Now()
	r.eventually("0", `SELECT count(*) FROM outlog_parked`)
	require.Less(t, time.Since(began), 5*time.Second, "noticed at the next poll, which is every second")
	require.Equal(t, "b/1 a/1 a/2 a/3", r.effects("mail"))
	r.waitApplied(n, "mail", last.Position)
	p, err := admin.ShowParked(t.Context(), r.op, r.id("a/1"), "")
	require.NoError(t, err)
	require.Empty(t, p.Places[0].State)
	require.Len(t, p.Places[0].History, 4)
	require.Equal(t, "smtp 4711 down", p.Places[0].History[0].Error)
}

// TestTwoRedrivesAtOnce: every dead letter is redriven once, whoever does it.
func TestTwoRedrivesAtOnce(t *testing.T) {
	const events = 450 // more than two transactions' worth
	r := newRig(t)
	r.append(strings.Split(strings.Repeat("abc", events/3), "")...)
	r.known("mail")
	r.exec(`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, attempts, parked_at)
		SELECT 'mail', event_id, position, aggregate_type, event_id, 'dead', 10, 0 FROM outbox`) // each of an aggregate of its own
	var counts [2]int
	var wg sync.WaitGroup
	for i := range counts {
		wg.Go(func() {
			n, err := admin.Redrive(t.Context(), r.op, admin.Selector{All: true})
			require.NoError(t, err)
			counts[i] = n
		})
	}
	wg.Wait()
	require.Equal(t, events, counts[0]+counts[1])
	require.Equal(t, "450", r.ask(`SELECT count(*) FROM outlog_attempts WHERE outcome = 'redriven'`))
	require.Equal(t, "450", r.ask(`SELECT count(*) FROM outlog_parked WHERE state = 'retrying' AND attempts = 0`))
}

// TestChainAfterRedrive: a hundred events behind a dead one need no poll each.
// The consumers look at the database once a minute; what makes them look is
// one event of another aggregate.
func TestChainAfterRedrive(t *testing.T) {
	const chain = 100
	for _, kind := range []string{"Apply", "Do"} {
		t.Run(kind, func(t *testing.T) {
			r := newRig(t)
			r.poison.Store("a/1", "not yet")
			o := r.options("mail")
			o.Poll = time.Minute
			var mu sync.Mutex
			var done []int64
			if kind == "Do" {
				o.Routes = []consumer.Route{consumer.Do("Placed", func(_ context.Context, e consumer.Event[string]) error {
					if err := r.trouble(e); err != nil {
						return err
					}
					mu.Lock()
					defer mu.Unlock()
					if e.AggregateID == "a" {
						done = append(done, e.AggregateVersion)
					}
					return nil
				})}
			}
			n, _ := r.run(node.Options{NoBroker: true}, o)
			r.append(strings.Split(strings.Repeat("a", chain), "")...)
			r.append("b")
			r.eventually("1 99 100", `SELECT count(*) FILTER (WHERE state = 'dead') || ' ' || count(*) FILTER (WHERE state = 'blocked') || ' ' || count(*) FROM outlog_parked`)
			r.eventually("101", `SELECT position FROM outlog_consumers`)

			r.poison.Clear()
			count, err := admin.Redrive(t.Context(), n.Store(), admin.Selector{All: true})
			require.NoError(t, err)
			require.Equal(t, 1, count)
			began := time.Now()
			r.append("b")
			r.eventually("102", `SELECT count(*) FROM outlog_inbox`)
			t.Logf("%d events in %v", chain, time.Since(began))
			require.Equal(t, "0", r.ask(`SELECT count(*) FROM outlog_parked`))
			if kind == "Do" {
				require.Len(t, done, chain)
				require.IsIncreasing(t, done)
			} else {
				require.Equal(t, "100", r.ask(`SELECT count(*) FROM effects e WHERE aggregate = 'a' AND NOT EXISTS
					(SELECT 1 FROM effects l WHERE l.aggregate = 'a' AND l.n < e.n AND l.version > e.version)`))
			}
		})
	}
}

// TestRedriveOfAnAppliedEvent: an event with an inbox row is never applied
// again, even if somebody parks and redrives it.
func TestRedriveOfAnAppliedEvent(t *testing.T) {
	r := newRig(t)
	n, stop := r.run(node.Options{NoBroker: true}, r.options("mail"))
	r.waitApplied(n, "mail", r.append("a", "a").Position)
	stop()
	r.exec(`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at)
		SELECT 'mail', event_id, position, aggregate_type, aggregate_id, 'dead', 0 FROM outbox WHERE position = 1`)
	count, err := admin.Redrive(t.Context(), r.op, admin.Selector{All: true})
	require.NoError(t, err)
	require.Equal(t, 1, count)
	r.run(node.Options{NoBroker: true}, r.options("mail"))
	r.eventually("0", `SELECT count(*) FROM outlog_parked`)
	require.Equal(t, "a/1 a/2", r.effects("mail"))
}

// TestRedriveKeepsOrder redrives dead letters whose aggregate has an earlier
// one.
func TestRedriveKeepsOrder(t *testing.T) {
	for _, c := range []struct {
		name, policy string
		redrive      []string
		want         string
	}{
		{"skip, all: the second waits for the first", "skip", []string{"a/1", "a/2"}, "a/1 retrying, a/2 blocked"},
		{"skip, the second alone", "skip", []string{"a/2"}, "a/1 dead, a/2 retrying"},
		{"block, the second alone waits for the first", "block", []string{"a/2"}, "a/1 dead, a/2 blocked"},
		{"block, first the second", "block", []string{"a/2", "a/1"}, "a/1 retrying, a/2 blocked"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.append("a", "a")
			r.park("mail", "a/1 dead", "a/2 dead")
			r.exec(`UPDATE outlog_consumers SET on_dead = ?`, c.policy)
			for _, e := range c.redrive {
				n, err := admin.Redrive(t.Context(), r.op, admin.Selector{EventID: r.id(e)})
				require.NoError(t, err)
				require.Equal(t, 1, n)
			}
			require.Equal(t, c.want, r.parked("mail"))
		})
	}
}

// TestDiscard gives a dead event up beside a running consumer: what waits behind
// it goes on.
func TestDiscard(t *testing.T) {
	r := newRig(t)
	r.poison.Store("a/1", "never")
	n, _ := r.run(node.Options{}, r.options("mail"))
	r.append("a", "a", "b")
	r.waitApplied(n, "mail", 3)
	for _, reason := range []string{"", " \n", strings.Repeat("x", admin.MaxReasonBytes+1)} {
		_, err := admin.Discard(t.Context(), r.op, admin.Selector{All: true}, reason)
		require.ErrorIs(t, err, admin.ErrNoReason)
	}
	count, err := admin.Discard(t.Context(), r.op, admin.Selector{EventID: r.id("a/2")}, "it only waits")
	require.NoError(t, err)
	require.Zero(t, count, "only dead events can be discarded")

	count, err = admin.Discard(t.Context(), r.op, admin.Selector{EventID: r.id("a/1")}, "customer is gone")
	require.NoError(t, err)
	require.Equal(t, 1, count)
	r.eventually("0", `SELECT count(*) FROM outlog_parked`)
	require.Equal(t, "b/1 a/2", r.effects("mail"))
	require.Equal(t, "failed 1, discarded 1", r.history("mail", "a/1"))
	r.verify()
	count, err = admin.Redrive(t.Context(), r.op, admin.Selector{EventID: r.id("a/1")})
	require.NoError(t, err)
	require.Zero(t, count, "it is given up for good")
}

// TestDiscardAtTheRelay: the relay's dead letters block like a consumer's.
func TestDiscardAtTheRelay(t *testing.T) {
	r := newRig(t)
	r.append("a", "a", "a")
	r.park("relay", "a/1 dead", "a/2 dead", "a/3 blocked")
	r.verify()
	discard := func(event string) {
		n, err := admin.Discard(t.Context(), r.op, admin.Selector{EventID: r.id(event)}, "too large")
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	discard("a/1")
	require.Equal(t, "a/2 dead, a/3 blocked", r.parked("relay"), "a/3 still has a dead one before it")
	discard("a/2")
	require.Equal(t, "a/3 retrying", r.parked("relay"))
}
