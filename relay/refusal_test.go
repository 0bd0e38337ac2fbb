package relay_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/internal/failpoint"
	"outlog/relay"
)

// quick retries at once; slow does not retry within a test.
var (
	quick = relay.Options{RetryMin: time.Millisecond, RetryMax: 2 * time.Millisecond, BackoffMax: time.Millisecond, Poll: 10 * time.Millisecond}
	slow  = relay.Options{RetryMin: time.Hour, RetryMax: time.Hour, BackoffMax: time.Millisecond, Poll: 10 * time.Millisecond}
)

const pendingEvents = `SELECT count(*) FROM outbox_status WHERE state = 'pending'`

// notDue keeps a parked event from being due by chance: its delay has full jitter.
const notDue = `UPDATE outlog_parked SET next_attempt_at = next_attempt_at + 3600000000, delay_us = delay_us + 7200000000 WHERE state = 'retrying'`

// redriveAll is what `outlog dead redrive` does.
const redriveAll = `UPDATE outlog_parked SET state = 'retrying', attempts = 0, next_attempt_at = 0, delay_us = 0 WHERE state = 'dead'`

// TestRefusedEventIsParked: the real server refuses an event in the middle of a
// window. What is before it is stored, its aggregate waits, others go on; it
// stays so across a restart, and when the server has been set right the
// aggregate follows in order.
func TestRefusedEventIsParked(t *testing.T) {
	r := newLog(t)
	r.maxMessage = 64 << 10
	r.startBroker()
	log := &lines{}
	o := slow
	o.Logger = log.logger()
	r.of("a", "b")
	r.big("a")
	r.of("a", "b", "c", "a")
	re := r.relay(r.broker.Publisher(), o)
	require.Equal(t, []string{"a/1", "b/1", "b/2", "c/1"}, r.stream(r.broker.Publisher()))
	require.Equal(t, []string{"a/2 retrying 1", "a/3 blocked 0", "a/4 blocked 0"}, r.parked())
	require.Equal(t, 3, re.Status().Parked)
	require.EqualValues(t, 1, re.Status().Refused)
	require.EqualValues(t, 4, re.Status().Latency.Count, "the events published")
	require.Equal(t, 1, log.with("refused by the broker"))
	require.Zero(t, log.with("held up"), "a refusal is no outage")

	r.exec(notDue)
	r.of("a", "c")
	require.Equal(t, 4, r.relay(r.broker.Publisher(), o).Status().Parked)
	require.Equal(t, []string{"a/1", "b/1", "b/2", "c/1", "c/2"}, r.stream(r.broker.Publisher()))
	require.Equal(t, []string{"a/2 retrying 1", "a/3 blocked 0", "a/4 blocked 0", "a/5 blocked 0"}, r.parked())

	r.stop()
	r.maxMessage = 0
	r.startBroker()
	r.exec(`UPDATE outlog_parked SET next_attempt_at = 0 WHERE state = 'retrying'`)
	_, stop := r.start(r.broker.Publisher(), o)
	r.eventually(0, `SELECT count(*) FROM outlog_parked`)
	stop()
	require.Equal(t, []string{"a/1", "b/1", "b/2", "c/1", "c/2", "a/2", "a/3", "a/4", "a/5"}, r.stream(r.broker.Publisher()))
	require.Equal(t, []string{"failed 1"}, r.list(`SELECT outcome || ' ' || attempt FROM outlog_attempts`))
}

// TestManyPoisonEvents: more refused events than a window holds.
func TestManyPoisonEvents(t *testing.T) {
	r := newLog(t)
	r.maxMessage = 64 << 10
	r.startBroker()
	for i := range 100 {
		r.big(fmt.Sprint("poison", i))
		r.of("good")
	}
	o := quick
	o.WindowRows, o.MaxAttempts = 10, 3
	_, stop := r.start(r.broker.Publisher(), o)
	r.eventually(100, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
	r.eventually(100, `SELECT count(*) FROM outlog_parked WHERE state = 'dead' AND attempts = 3`)
	stop()
	require.Len(t, r.stream(r.broker.Publisher()), 100)
	require.Equal(t, []string{"300 1"}, r.list(`SELECT count(*) || ' ' || count(DISTINCT error) FROM outlog_attempts`))
}

// TestDeadThenRedriven: attempts end; a redrive sends the whole aggregate in
// order while others never wait.
func TestDeadThenRedriven(t *testing.T) {
	r := newRig(t)
	log := &lines{}
	o := quick
	o.MaxAttempts, o.Logger = 3, log.logger()
	pub := &scripted{Publisher: r.broker.Publisher(), fault: only("a", 2, refused)}
	r.of("a", "a", "b", "a")
	re, stop := r.start(pub, o)
	r.eventually(1, `SELECT count(*) FROM outlog_parked WHERE state = 'dead'`)
	r.of("b")
	for range 100 {
		r.of("a")
	}
	r.eventually(0, pendingEvents)
	require.Equal(t, "a/2 dead 3", r.parked()[0])
	require.Len(t, r.parked(), 102)
	require.EqualValues(t, 3, re.Status().Refused)
	require.Equal(t, 2, log.with("refused by the broker"))
	require.Equal(t, 1, log.with("is dead"))

	pub.set(nil)
	pub.mu.Lock()
	sent := pub.sent
	pub.mu.Unlock()
	r.exec(redriveAll)
	r.eventually(0, `SELECT count(*) FROM outlog_parked`)
	stop()
	require.LessOrEqual(t, pub.sent, sent+5, "a chain is a window, not a poll per event")
	got := r.stream(r.broker.Publisher())
	require.Equal(t, []string{"a/1", "b/1", "b/2", "a/2", "a/3", "a/4"}, got[:6])
	require.Len(t, got, 105)
	require.Equal(t, []string{"3"}, r.list(`SELECT count(*) FROM outlog_attempts`))
}

// TestDeadSkipped: with policy Skip the aggregate goes on without its dead event.
func TestDeadSkipped(t *testing.T) {
	r := newRig(t)
	o := quick
	o.MaxAttempts, o.OnDead = 2, relay.Skip
	pub := &scripted{Publisher: r.broker.Publisher(), fault: only("a", 1, refused)}
	r.of("a", "a", "b", "a")
	_, stop := r.start(pub, o)
	r.eventually(3, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
	r.of("a")
	r.eventually(4, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
	stop()
	require.Equal(t, []string{"a/2", "a/3", "a/4", "b/1"}, sorted(r.stream(r.broker.Publisher())))
	require.Equal(t, []string{"a/1 dead 2"}, r.parked())
}

// TestDiscarded: a discarded event is never on the stream, nor on the next one.
func TestDiscarded(t *testing.T) {
	r := newRig(t)
	o := quick
	o.MaxAttempts = 1
	pub := &scripted{Publisher: r.broker.Publisher(), fault: only("a", 2, refused)}
	r.of("a", "a", "b", "a")
	_, stop := r.start(pub, o)
	r.eventually(1, `SELECT count(*) FROM outlog_parked WHERE state = 'dead'`)
	r.exec(`INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at)
		SELECT consumer, event_id, position, attempts, 'discarded', 'by hand', 0 FROM outlog_parked WHERE state = 'dead'`)
	r.exec(`DELETE FROM outlog_parked WHERE state = 'dead'`)
	r.eventually(3, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
	stop()
	require.Equal(t, []string{"a/1", "b/1", "a/3"}, r.stream(r.broker.Publisher()))
	require.Equal(t, []string{"2"}, r.list(`SELECT position FROM outbox_status WHERE state = 'skipped'`))
	require.NoError(t, r.broker.Publisher().Recreate(t.Context(), 1))
	r.relay(r.broker.Publisher(), o)
	require.Equal(t, []string{"a/1", "a/3", "b/1"}, sorted(r.stream(r.broker.Publisher())))
}

// TestOutageIsNobodysAttempt: an hour without the broker, or with a broker that
// answers everything but publishes, uses no attempts, drains in order, and is
// one line in the log at each end.
func TestOutageIsNobodysAttempt(t *testing.T) {
	for name, begin := range map[string]func(*memory, *scripted){
		"no answer":              func(s *memory, _ *scripted) { s.setDown(errTimeout) },
		"no answer to publishes": func(_ *memory, p *scripted) { p.set(timesOut) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newLog(t)
			synctest.Test(t, func(t *testing.T) {
				s, log := &memory{}, &lines{}
				pub := &scripted{Publisher: s}
				re, err := relay.New(r.db, r.log, pub, relay.Options{Logger: log.logger()})
				require.NoError(t, err)
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan error, 1)
				go func() { done <- re.Run(ctx) }()
				r.of("a", "b")
				time.Sleep(2 * time.Second)
				require.Equal(t, 2, s.stored())
				begin(s, pub)
				for range 60 {
					r.of("a", "b", "a", "c")
					time.Sleep(time.Minute)
				}
				require.Equal(t, 2, s.stored())
				require.NotZero(t, re.Status().OutageSince)
				s.setDown(nil)
				pub.set(nil)
				time.Sleep(10 * time.Minute)
				cancel()
				require.NoError(t, <-done)
				require.Len(t, r.stream(s), 242)
				require.Empty(t, r.list(`SELECT * FROM outlog_attempts`))
				require.Empty(t, r.parked())
				require.Zero(t, re.Status().OutageSince)
				require.Equal(t, 1, log.with("held up\""))
				require.Equal(t, 1, log.with("goes on"))
				require.Equal(t, 1, log.with("held_up_for=1h0m"))
				if name == "no answer" {
					require.Equal(t, r.list(`SELECT event_id FROM outbox ORDER BY position`),
						r.list(`SELECT event_id FROM outbox_status ORDER BY stream_seq`))
				}
			})
		})
	}
}

// TestRefusalDuringOutage: that the broker still refuses proves nothing.
func TestRefusalDuringOutage(t *testing.T) {
	r := newRig(t)
	log := &lines{}
	o := quick
	o.MaxAttempts, o.Logger = 1000, log.logger()
	pub := &scripted{Publisher: r.broker.Publisher(), fault: func(m *relay.Message) error {
		if m.Record.AggregateID == "a" {
			return refused(m)
		}
		return errTimeout
	}}
	r.of("a", "b")
	re, stop := r.start(pub, o)
	require.Eventually(t, func() bool { return re.Status().Refused > 5 }, 10*time.Second, time.Millisecond)
	pub.set(nil)
	r.eventually(2, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
	stop()
	require.Equal(t, 1, log.with("held up\""))
	require.Equal(t, 1, log.with("goes on"))
}

// TestStuckEvent: the broker never answers for one event. With nothing else to
// send that is an outage; while others are stored right before and right after,
// it is the event.
func TestStuckEvent(t *testing.T) {
	r := newRig(t)
	o := quick
	o.MaxAttempts = 3
	pub := &scripted{Publisher: r.broker.Publisher(), fault: only("a", 1, timesOut)}
	r.of("a", "a")
	re, stop := r.start(pub, o)
	require.Eventually(t, func() bool { pub.mu.Lock(); defer pub.mu.Unlock(); return pub.sent > 20 }, 10*time.Second, time.Millisecond)
	require.Empty(t, r.parked(), "nothing else to send: nothing is proved")
	require.NotZero(t, re.Status().OutageSince)
	good := 0
	require.Eventually(t, func() bool {
		r.of("b")
		good++
		return r.parked() != nil && r.parked()[0] == "a/1 dead 3"
	}, 20*time.Second, time.Millisecond)
	r.eventually(good, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
	require.Zero(t, re.Status().OutageSince)
	require.Equal(t, []string{"a/1 dead 3", "a/2 blocked 0"}, r.parked())
	pub.set(nil)
	r.exec(redriveAll)
	r.eventually(0, `SELECT count(*) FROM outlog_parked`)
	stop()
	got := r.stream(r.broker.Publisher())
	require.Equal(t, []string{"a/1", "a/2"}, got[len(got)-2:])
}

// TestCrashAfterEveryPublish fails after each acknowledgement, before anything
// is noted, parked events included: all progress is what reconcile finds.
func TestCrashAfterEveryPublish(t *testing.T) {
	r := newRig(t)
	o := quick
	o.WindowRows = 3
	o.Failpoint = failpoint.At(failpoint.RelayAfterPublish, 0, failpoint.Fail(errors.New("crash")))
	pub := &scripted{Publisher: r.broker.Publisher(), fault: only("a", 2, refused)}
	r.of("a", "a", "b", "a", "c", "b", "a")
	o.MaxAttempts = 1
	re, stop := r.start(pub, o)
	require.Eventually(t, func() bool { pub.mu.Lock(); defer pub.mu.Unlock(); return pub.sent > 3 }, 10*time.Second, time.Millisecond)
	stop()
	// The failpoint hides refusals too, so park it by hand.
	r.exec(`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at)
		SELECT 'relay', event_id, position, aggregate_type, aggregate_id, 'dead', 0 FROM outbox WHERE position = 2`)
	re, stop = r.start(pub, o)
	require.Eventually(t, func() bool { return re.Status().Position == 7 }, 10*time.Second, time.Millisecond)
	require.Equal(t, []string{"a/2 dead 0", "a/3 blocked 0", "a/4 blocked 0"}, r.parked())
	pub.set(nil)
	r.exec(redriveAll)
	r.eventually(0, `SELECT count(*) FROM outlog_parked`)
	stop()
	require.Equal(t, []string{"a/1", "b/1", "c/1", "b/2", "a/2", "a/3", "a/4"}, r.stream(r.broker.Publisher()))
	require.Less(t, re.Status().StreamSeq, uint64(8), "the stream was never rebuilt")
}

// TestStreamLosesTailWithParkedEvents cuts a stream with late and still parked
// events at every place, and deletes it.
func TestStreamLosesTailWithParkedEvents(t *testing.T) {
	for keep := -1; keep <= 9; keep++ {
		t.Run(fmt.Sprint(keep), func(t *testing.T) {
			r := newLog(t)
			s := &memory{}
			pub := &scripted{Publisher: s}
			pub.set(func(m *relay.Message) error {
				if e := only("a", 1, refused)(m); e != nil {
					return e
				}
				return only("b", 1, refused)(m)
			})
			r.of("a", "b", "c", "a", "c", "a", "b", "c", "c")
			o := slow
			r.relay(pub, o)
			pub.set(only("b", 1, refused))
			r.exec(`UPDATE outlog_parked SET next_attempt_at = 0 WHERE aggregate_id = 'a' AND state = 'retrying'`)
			_, stop := r.start(pub, o)
			r.eventually(2, `SELECT count(*) FROM outlog_parked`)
			r.of("c", "a")
			r.eventually(0, pendingEvents)
			stop()
			r.exec(notDue)
			require.Equal(t, []string{"c/1", "c/2", "c/3", "c/4", "a/1", "a/2", "a/3", "c/5", "a/4"}, r.stream(pub))
			if keep < 0 {
				s.exists, s.msgs = false, nil
			} else {
				s.cut(keep)
			}
			re, stop := r.start(pub, o)
			r.of("c")
			r.eventually(10, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
			stop()
			got := r.stream(pub)
			require.Len(t, got, 10)
			require.Equal(t, keep < 1, re.Status().StreamSeq > 10_000, "only a stream that has lost everything is rebuilt")
			require.Equal(t, []string{"b/1 retrying 1", "b/2 blocked 0"}, r.parked())

			// Once more, with everything due before the cursor is back where it was.
			s.cut(keep / 2)
			pub.set(nil)
			r.exec(`UPDATE outlog_parked SET next_attempt_at = 0`)
			o.WindowRows = 1
			_, stop = r.start(pub, o)
			r.of("c")
			r.eventually(13, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
			stop()
			require.Len(t, r.stream(pub), 13)
		})
	}
}

// TestRandomFaults runs a relay through refusals, time-outs that stored and that
// did not, lost tails, lost streams, failed writes and restarts, then puts all
// right: each event is on the stream once, in order of its aggregate.
// OUTLOG_TEST_SEED repeats one history.
func TestRandomFaults(t *testing.T) {
	seeds := []uint64{}
	if s := os.Getenv("OUTLOG_TEST_SEED"); s != "" {
		seed, err := strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
		seeds = append(seeds, seed)
	}
	for len(seeds) == 0 || len(seeds) < 40 && os.Getenv("OUTLOG_TEST_SEED") == "" {
		seeds = append(seeds, rand.Uint64())
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomFaults(t, seed) })
	}
}

func randomFaults(t *testing.T, seed uint64) {
	r := newLog(t)
	random := rand.New(rand.NewPCG(seed, 0)) // of the test's goroutine
	ofRelay := rand.New(rand.NewPCG(seed, 1))
	s := &memory{}
	pub := &scripted{Publisher: &lossy{s, ofRelay}}
	o := quick
	o.MaxAttempts, o.WindowRows = 3, 1+random.IntN(12)
	o.Failpoint = func(point string) error {
		if point != failpoint.RelayAfterPublish {
			return nil
		}
		if ofRelay.IntN(10) == 0 {
			return errors.New("crash")
		}
		return nil
	}
	faults := []func(*relay.Message) error{refused, timesOut, refused, func(*relay.Message) error { return relay.ErrConflict }}
	for range 3 + random.IntN(4) {
		bad := map[string]func(*relay.Message) error{}
		for range random.IntN(4) {
			bad[fmt.Sprintf("%c/%d", 'a'+rune(random.IntN(6)), 1+random.IntN(12))] = faults[random.IntN(len(faults))]
		}
		pub.set(func(m *relay.Message) error {
			if f := bad[fmt.Sprintf("%s/%d", m.Record.AggregateID, m.Record.AggregateVersion)]; f != nil {
				return f(m)
			}
			return nil
		})
		_, stop := r.start(pub, o)
		for range 1 + random.IntN(8) {
			for range 1 + random.IntN(6) {
				r.of(string('a' + rune(random.IntN(6))))
			}
			time.Sleep(time.Duration(random.IntN(2000)) * time.Microsecond) // lets the relay get somewhere; nothing rests on how far
		}
		stop()
		switch random.IntN(4) {
		case 0:
			s.cut(random.IntN(len(s.msgs) + 1))
		case 1:
			s.exists, s.msgs = random.IntN(2) == 0, nil
		}
	}
	pub.set(nil)
	o.Failpoint = nil
	o.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	_, stop := r.start(s, o)
	r.exec(redriveAll)
	r.of("z") // published after it has looked at the stream
	r.eventually(r.appended, `SELECT count(*) FROM outbox_status WHERE state = 'published'`)
	r.eventually(0, `SELECT count(*) FROM outlog_parked`)
	stop()
	require.Len(t, r.stream(s), r.appended)
}

// lossy stores some windows, or a part of them, and says that it did not.
type lossy struct {
	*memory
	random *rand.Rand
}

func (l *lossy) Append(ctx context.Context, base uint64, msgs []relay.Message) (int, error) {
	if l.random.IntN(6) != 0 {
		return l.memory.Append(ctx, base, msgs)
	}
	_, err := l.memory.Append(ctx, base, msgs[:l.random.IntN(len(msgs)+1)])
	return 0, errOr(err, errTimeout)
}

// TestFencedOwnerParksNothing: an owner that another has replaced finds that the
// broker refuses an event, and must not write that down.
func TestFencedOwnerParksNothing(t *testing.T) {
	r := newRig(t)
	r.of("a", "b")
	re, err := relay.New(r.db, r.log, &scripted{Publisher: r.broker.Publisher(), fault: func(m *relay.Message) error {
		r.exec(`UPDATE outlog_relay SET token = token + 1`)
		return refused(m)
	}}, quick)
	require.NoError(t, err)
	require.ErrorIs(t, re.Run(t.Context()), relay.ErrFenced)
	require.Empty(t, r.parked())
	require.Empty(t, r.list(`SELECT * FROM outlog_attempts`))
}
