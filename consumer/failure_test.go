package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/outbox"
	"outlog/store"
)

// polling sets Poll, which on a virtual clock costs real time.
func polling(o consumer.Options, d time.Duration) consumer.Options {
	o.Poll = d
	return o
}

// TestFailuresAreRecorded: what happened is in outlog_attempts, once
// per attempt, with the stack of the handler.
func TestFailuresAreRecorded(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("panic", "goexit", "error")
	o := options("c", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		return trouble[e.AggregateID]()
	})
	o.MaxAttempts = 2
	c, stop := r.run(down{}, o)
	r.eventually("3", `SELECT count(*) FROM outlog_parked WHERE state = 'dead' AND failed_at > 0 AND length(fingerprint) = 12`)
	stop()
	require.Equal(t, int64(6), c.Status().Failed)
	require.Zero(t, c.Status().Latency.Count, "nothing was applied")
	require.GreaterOrEqual(t, c.Status().Handlers.Count, uint64(6))
	r.eventually("2 2 2", `SELECT group_concat(n, ' ') FROM (SELECT count(*) AS n FROM outlog_attempts WHERE outcome = 'failed' GROUP BY event_id)`)
	r.eventually("4", `SELECT count(*) FROM outlog_attempts WHERE stack LIKE '%failure_test.go%' AND (error LIKE '%with an error value%' OR error LIKE '%Goexit%')`)
	r.eventually("0", `SELECT count(*) FROM outlog_inbox`)
}

// TestDatabaseTroubleIsNoAttemptWhateverTheHandlerSays: a statement of the
// handler meets a full database, and the handler loses the error, panics over
// it, or hides it.
func TestDatabaseTroubleIsNoAttemptWhateverTheHandlerSays(t *testing.T) {
	for name, say := range map[string]func(error) error{
		"chain lost": func(err error) error { return fmt.Errorf("reserve: %v", err) },
		"permanent":  func(err error) error { return consumer.Permanent(fmt.Errorf("reserve: %v", err)) },
		"hidden":     func(error) error { return nil },
		"panic":      func(err error) error { panic(err.Error()) },
		"goexit":     func(error) error { return trouble["goexit"]() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, store.Options{})
			r.exec(`CREATE TABLE bulk (b BLOB) STRICT`)
			last := r.append("good", "a", "a")
			var full atomic.Bool
			full.Store(true)
			c, _ := r.run(down{}, options("c", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
				if full.Load() && e.AggregateID == "a" {
					// The database's own page limit, as close to a full disk as a
					// test gets without one: the last rowid is taken.
					if _, err := tx.ExecContext(ctx, `INSERT INTO effects (n) VALUES (9223372036854775807), (NULL)`); err != nil {
						return say(err)
					}
				}
				return effect(ctx, tx, "c", e)
			}))
			require.Eventually(t, func() bool { return !c.Status().TroubleSince.IsZero() }, 10*time.Second, time.Millisecond)
			require.Contains(t, c.Status().LastError, "full")
			r.eventually("0 0", `SELECT (SELECT count(*) FROM outlog_parked) || ' ' || (SELECT count(*) FROM outlog_attempts)`)
			full.Store(false)
			require.NoError(t, r.wait(c, last))
			require.Equal(t, "good1 a1 a2", r.effects("c"))
		})
	}
}

// TestDeferredForeignKeyBlamesItsEvent: a violation that shows only at the
// commit is the event's failure, not the batch's.
func TestDeferredForeignKeyBlamesItsEvent(t *testing.T) {
	r := newRig(t, store.Options{})
	r.exec(`CREATE TABLE parent (id TEXT PRIMARY KEY) STRICT`)
	r.exec(`CREATE TABLE child (id TEXT REFERENCES parent DEFERRABLE INITIALLY DEFERRED) STRICT`)
	r.append("good", "bad", "fair")
	c, _ := r.run(down{}, options("c", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		if e.AggregateID == "bad" {
			_, err := tx.ExecContext(ctx, `INSERT INTO child VALUES ('orphan')`)
			return err
		}
		return effect(ctx, tx, "c", e)
	}))
	require.NoError(t, r.wait(c, 3))
	require.Equal(t, "good1 fair1", r.effects("c"))
	r.eventually("1", `SELECT count(*) FROM outlog_parked WHERE position = 2 AND last_error LIKE '%foreign key%'`)
}

// nobody is an error whose methods panic.
type nobody struct{ text string }

func (n *nobody) Error() string { return n.text }

func TestErrorsThatPanicAreFailures(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("bad", "good")
	c, _ := r.run(down{}, options("c", failing("c", func(e consumer.Event[string]) error {
		if e.AggregateID == "bad" {
			return (*nobody)(nil)
		}
		return nil
	})))
	require.NoError(t, r.wait(c, 2))
	r.eventually("1", `SELECT count(*) FROM outlog_parked WHERE position = 1 AND attempts > 0`)
}

// TestOutageInTheMiddleOfABatch: what came before it is applied, the cursor is
// just before the event, nothing is counted or parked, and it goes on in order.
func TestOutageInTheMiddleOfABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		last := r.append("a", "b", "c", "b")
		over := time.Now().Add(time.Hour)
		calls := 0
		c, _ := r.run(down{}, polling(options("c", failing("c", func(e consumer.Event[string]) error {
			if e.AggregateID == "c" && time.Now().Before(over) {
				calls++
				require.Equal(t, 1, e.Attempt)
				return consumer.Outage(errors.New("no route to host"))
			}
			return nil
		})), time.Minute))
		time.Sleep(59 * time.Minute)
		require.Equal(t, "a1 b1", r.effects("c"))
		r.eventually("2 0 0", `SELECT position || ' ' || (SELECT count(*) FROM outlog_parked) || ' ' || (SELECT count(*) FROM outlog_attempts) FROM outlog_consumers`)
		require.Contains(t, c.Status().PausedReason, "no route to host")
		require.False(t, c.Status().PausedSince.IsZero())
		time.Sleep(3 * time.Minute)
		require.NoError(t, r.wait(c, last))
		require.Equal(t, "a1 b1 c1 b2", r.effects("c"))
		require.Zero(t, c.Status().PausedSince)
		require.Less(t, calls, 300, "the pauses grow")
		require.Equal(t, int64(calls), c.Status().Outages)
		require.Equal(t, uint64(4), c.Status().Latency.Count)
		require.Greater(t, c.Status().Latency.Sum, (2 * time.Hour).Seconds(), "two of them waited")
	})
}

// TestStormPausesTheConsumer: when the events of many aggregates fail in a row
// the consumer says so and waits; a success ends it.
func TestStormPausesTheConsumer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		var names []string
		for i := range 40 {
			names = append(names, fmt.Sprint("k", i))
		}
		r.append(names...)
		var broken atomic.Bool
		broken.Store(true)
		var out syncBuffer
		o := options("c", failing("c", func(e consumer.Event[string]) error {
			if broken.Load() {
				return errors.New("all of them")
			}
			return nil
		}))
		o.BackoffMin, o.BackoffMax, o.MaxAttempts, o.Poll = time.Second, time.Second, 1000, time.Second
		o.Logger = slog.New(slog.NewTextHandler(&out, nil))
		c, _ := r.run(down{}, o)
		time.Sleep(10 * time.Second)
		require.Equal(t, "events of many aggregates fail in a row", c.Status().PausedReason)
		broken.Store(false)
		time.Sleep(15 * time.Second)
		require.Zero(t, c.Status().PausedSince)
		r.eventually("40", `SELECT count(*) FROM effects`)
		require.Equal(t, 1, strings.Count(out.String(), "consumer pauses by itself"), "one line at its start")
		require.Contains(t, out.String(), "paused_for=")
	})
}

func TestRetryAfterIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		r.append("a")
		var at []time.Time
		r.run(down{}, polling(options("c", failing("c", func(e consumer.Event[string]) error {
			at = append(at, time.Now())
			if e.Attempt == 1 {
				return consumer.RetryAfter(time.Hour, errors.New("too many requests"))
			}
			return nil
		})), time.Minute))
		time.Sleep(2 * time.Hour)
		require.Len(t, at, 2)
		require.WithinDuration(t, at[0].Add(time.Hour), at[1], 100*time.Millisecond)
	})
}

// TestIdleConsumerOpensNoTransaction: with nothing to do, with an event that is
// due in an hour, and when paused with events to come.
func TestIdleConsumerOpensNoTransaction(t *testing.T) {
	for name, begin := range map[string]func(r *rig){
		"nothing to do": func(*rig) {},
		"parked":        func(r *rig) { r.append("later") },
		"paused":        func(r *rig) { r.exec(`UPDATE outlog_consumers SET paused = 1`); r.append("a") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var commits atomic.Int64
				r := newRig(t, store.Options{Failpoint: func(point string) error {
					if point == "store.before-commit" {
						commits.Add(1)
					}
					return nil
				}})
				o := options("c", failing("c", func(e consumer.Event[string]) error {
					if e.AggregateID == "later" {
						return consumer.RetryAfter(time.Hour, errors.New("later"))
					}
					return nil
				}))
				o.Poll = time.Second
				r.run(down{}, o)
				time.Sleep(time.Second)
				begin(r)
				time.Sleep(10 * time.Second)
				before := commits.Load()
				time.Sleep(10 * time.Minute)
				require.Equal(t, before, commits.Load())
			})
		})
	}
}

// TestClockStepsBack: an event that the clock's step would have put off by the
// step is due soon.
func TestClockStepsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var back atomic.Int64
		r := newRig(t, store.Options{Now: func() time.Time { return time.Now().Add(-time.Duration(back.Load())) }})
		last := r.append("a")
		o := options("c", failing("c", func(e consumer.Event[string]) error {
			if e.Attempt == 1 {
				return consumer.RetryAfter(10*time.Second, errors.New("not yet"))
			}
			return nil
		}))
		o.Poll = time.Second
		_, stop := r.run(down{}, o)
		time.Sleep(time.Second)
		r.eventually("retrying", `SELECT state FROM outlog_parked`)
		stop() // its timer is the one thing that remembers the old time
		back.Store(int64(10 * time.Hour))
		c, _ := r.run(down{}, o)
		time.Sleep(2 * time.Second)
		require.NoError(t, r.wait(c, last))
	})
}

// TestTimeZoneDoesNotMatter runs as in Asia/Kolkata.
func TestTimeZoneDoesNotMatter(t *testing.T) {
	kolkata := time.FixedZone("IST", 5*3600+1800)
	r := newRig(t, store.Options{Now: func() time.Time { return time.Now().In(kolkata) }})
	before := time.Now().Add(-time.Second).UnixMicro()
	r.append("a")
	c, _ := r.run(down{}, options("c", failing("c", func(e consumer.Event[string]) error {
		require.Equal(t, time.UTC, e.CreatedAt.Location())
		if e.Attempt < 3 {
			return errors.New("again")
		}
		return nil
	})))
	r.eventually("1", `SELECT count(*) FROM outlog_inbox`)
	require.NoError(t, r.wait(c, 1))
	var n int
	require.NoError(t, r.db.Reader().QueryRow(`SELECT count(*) FROM outlog_attempts WHERE at BETWEEN ? AND ?`, before, time.Now().UnixMicro()).Scan(&n))
	require.Equal(t, 2, n)
}

// TestChainIsReleasedAtOnce: once the first of a hundred succeeds the others
// follow in the same breath, without a poll in between.
func TestChainIsReleasedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		names := make([]string, 100)
		for i := range names {
			names[i] = "a"
		}
		last := r.append(names...)
		var repaired atomic.Bool
		o := options("c", failing("c", func(e consumer.Event[string]) error {
			if !repaired.Load() {
				return consumer.Permanent(errors.New("broken"))
			}
			return nil
		}))
		o.Poll = time.Minute
		c, _ := r.run(down{}, o)
		time.Sleep(time.Second)
		r.eventually("99", `SELECT count(*) FROM outlog_parked WHERE state = 'blocked'`)
		repaired.Store(true)
		r.exec(`UPDATE outlog_parked SET state = 'retrying', attempts = 0, next_attempt_at = 0 WHERE state = 'dead'`)
		time.Sleep(time.Minute) // the poll that sees the redrive
		start := time.Now()
		require.NoError(t, r.wait(c, last))
		require.Less(t, time.Since(start), 100*time.Millisecond)
	})
}

// TestFailingEventsDoNotStarveTheLog: parked events that are due again as soon
// as they have failed do not keep fresh ones from being applied.
func TestFailingEventsDoNotStarveTheLog(t *testing.T) {
	var late atomic.Int64 // the store's clock runs ahead of any backoff
	r := newRig(t, store.Options{Now: func() time.Time { return time.Now().Add(time.Duration(late.Load())) }})
	names := []string{"bad1", "bad2", "bad3"}
	for i := range 30 {
		names = append(names, fmt.Sprint("good", i))
	}
	last := r.append(names...)
	poisoned, before := 0, 0
	o := options("c", failing("c", func(e consumer.Event[string]) error {
		if strings.HasPrefix(e.AggregateID, "bad") {
			late.Add(int64(10 * time.Millisecond))
			poisoned++
			return errors.New("poison")
		}
		before = poisoned
		return nil
	}))
	o.MaxAttempts = 1000
	c, stop := r.run(down{}, o)
	require.NoError(t, r.wait(c, last))
	stop()
	require.Less(t, before, 20, "the log has its turn after each failure")
}

// TestSkipLetsLaterEventsGo: a dead event blocks nobody under OnDead Skip, one
// that is still being retried does; and one that is redriven with another
// behind it is handled before that.
func TestSkipLetsLaterEventsGo(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "a", "a")
	var repaired atomic.Bool
	o := options("c", failing("c", func(e consumer.Event[string]) error {
		if e.AggregateVersion < 3 && !repaired.Load() {
			return errors.New("broken")
		}
		return nil
	}))
	o.OnDead, o.MaxAttempts = consumer.Skip, 2
	c, _ := r.run(down{}, o)
	require.Eventually(t, func() bool { return r.wait(c, 3) == nil }, 10*time.Second, time.Millisecond)
	r.eventually("1:dead 2:dead", `SELECT group_concat(s, ' ') FROM (SELECT position || ':' || state AS s FROM outlog_parked ORDER BY position)`)
	require.Equal(t, "a3", r.effects("c"))
	repaired.Store(true)
	r.exec(`UPDATE outlog_parked SET state = 'retrying', attempts = 0, delay_us = 10000000, next_attempt_at = CASE position WHEN 1 THEN ? ELSE 0 END WHERE state = 'dead'`,
		r.db.Now().Add(300*time.Millisecond).UnixMicro())
	r.eventually("0", `SELECT count(*) FROM outlog_parked`)
	require.Equal(t, "a3 a1 a2", r.effects("c"))
}

// TestOnDeadMayChange: events that waited behind a dead one go on when the
// consumer starts with OnDead Skip.
func TestOnDeadMayChange(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "a", "a")
	o := options("c", failing("c", func(e consumer.Event[string]) error {
		if e.AggregateVersion == 1 {
			return consumer.Permanent(errors.New("broken"))
		}
		return nil
	}))
	_, stop := r.run(down{}, o)
	r.eventually("2", `SELECT count(*) FROM outlog_parked WHERE state = 'blocked'`)
	stop()
	o.OnDead = consumer.Skip
	c, stop := r.run(down{}, o)
	require.Eventually(t, func() bool { return r.wait(c, 3) == nil }, 10*time.Second, time.Millisecond)
	stop()
	require.Equal(t, "a2 a3", r.effects("c"))
}

// TestParkedEventWithoutLogRow: somebody removed the row by force; the event is
// dead with that reason and the consumer does not spin on it.
func TestParkedEventWithoutLogRow(t *testing.T) {
	db, err := store.Open(t.Context(), store.Options{Path: t.TempDir() + "/outlog.db", Synchronous: "NORMAL"})
	require.NoError(t, err)
	defer db.Close()
	log, err := outbox.Open(t.Context(), db)
	require.NoError(t, err)
	r := &rig{t: t, db: db, log: log} // no check at its end: the log is damaged on purpose
	r.exec(`CREATE TABLE effects (n INTEGER PRIMARY KEY AUTOINCREMENT, consumer TEXT, event_id TEXT, aggregate TEXT, version INTEGER) STRICT`)
	r.append("a")
	o := options("c", failing("c", func(consumer.Event[string]) error { return consumer.RetryAfter(time.Minute, errors.New("later")) }))
	_, stop := r.run(down{}, o)
	r.eventually("retrying", `SELECT state FROM outlog_parked`)
	stop()
	r.exec(`UPDATE outlog_meta SET pruned_through = 1`)
	r.exec(`DELETE FROM outbox`)
	r.exec(`UPDATE outlog_parked SET next_attempt_at = 0`)
	_, stop = r.run(down{}, o)
	r.eventually("dead the event is not in the log any more", `SELECT state || ' ' || last_error FROM outlog_parked`)
	stop()
}

// TestHandlerContextEndsWithIt: what a handler leaves running sees that it is
// over.
func TestHandlerContextEndsWithIt(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a")
	var left context.Context
	c, stop := r.run(down{}, options("c", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		left = ctx
		return effect(ctx, tx, "c", e)
	}))
	require.NoError(t, r.wait(c, last))
	stop()
	require.ErrorIs(t, left.Err(), context.Canceled)
	require.ErrorIs(t, r.db.Update(left, func(*store.Tx) error { return nil }), context.Canceled)
}

// TestStopNamesAStuckHandler: a handler that never returns does not keep Run,
// which says whose fault it is; what it was doing is not stored.
func TestStopNamesAStuckHandler(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a")
	entered, leave := make(chan struct{}), make(chan struct{})
	var out syncBuffer
	o := options("c", func(ctx context.Context, tx *store.Tx, e consumer.Event[string]) error {
		close(entered)
		<-leave
		return errors.New("too late")
	})
	o.DrainTimeout, o.Logger = 10*time.Millisecond, slog.New(slog.NewTextHandler(&out, nil))
	c, err := consumer.New(r.db, r.log, down{}, o)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	<-entered
	require.Contains(t, c.Status().Handling, "Placed ")
	cancel()
	require.ErrorIs(t, <-done, consumer.ErrStuck)
	require.Contains(t, out.String(), "is left behind")
	close(leave)
	r.eventually("0 0", `SELECT (SELECT count(*) FROM outlog_parked) || ' ' || (SELECT count(*) FROM outlog_attempts)`)
}

// TestConsumerBelowTheHorizonIsRefused: what lies between its cursor and the
// horizon may be lost, so a person decides.
func TestConsumerBelowTheHorizonIsRefused(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a", "b", "c")
	o := options("c", failing("c", fine))
	c, stop := r.run(down{}, o)
	require.NoError(t, r.wait(c, last))
	stop()
	r.append("d")
	r.exec(`UPDATE outlog_meta SET pruned_through = 4`)
	r.exec(`DELETE FROM outbox WHERE position <= 4`)
	r.exec(`DELETE FROM outlog_inbox`)
	c, err := consumer.New(r.db, r.log, down{}, o)
	require.NoError(t, err)
	require.ErrorIs(t, c.Run(t.Context()), consumer.ErrPruned)
}

// TestWaitAppliedTellsWaitingFromFailed: it waits for an event whose turn has
// not come, and gives up on one that failed or waits behind one that did.
func TestWaitAppliedTellsWaitingFromFailed(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a", "a")
	entered, leave := make(chan struct{}, 2), make(chan struct{})
	o := options("c", failing("c", fine))
	o.Routes = []consumer.Route{consumer.Do("Placed", func(ctx context.Context, e consumer.Event[string]) error {
		entered <- struct{}{}
		<-leave
		if e.AggregateVersion == 2 {
			return consumer.Permanent(errors.New("no"))
		}
		return nil
	})}
	c, _ := r.run(down{}, o)
	<-entered
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, c.WaitApplied(short, 1), context.DeadlineExceeded)
	short2, cancel2 := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel2()
	require.ErrorIs(t, c.WaitApplied(short2, 2), context.DeadlineExceeded, "it waits behind one that is under way")
	close(leave)
	require.NoError(t, r.wait(c, 1))
	require.ErrorIs(t, r.wait(c, 2), consumer.ErrParked)
	r.append("a")
	require.Eventually(t, func() bool { return errors.Is(r.wait(c, 3), consumer.ErrParked) }, 10*time.Second, time.Millisecond)
}
