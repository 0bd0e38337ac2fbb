package consumer_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/failpoint"
	"outlog/store"
)

// TestAckComesAfterCommit: while a batch's handlers have run and nothing is
// committed, nothing is acked.
func TestAckComesAfterCommit(t *testing.T) {
	r := newRig(t, store.Options{})
	src := newScript()
	gate := failpoint.NewGate()
	defer gate.Open()
	o := polling(options("c", failing("c", fine)), time.Minute)
	o.Failpoint = failpoint.At(failpoint.ConsumerAfterHandler, 1, gate.Wait)
	c, _ := r.run(src, o)
	r.eventually("1", `SELECT count(*) FROM outlog_consumers`)
	last := r.append("a")
	src.ch <- []consumer.Delivery{src.delivery(r, 1, last)}
	<-gate.Reached()
	require.Zero(t, src.acked.Load())
	gate.Open()
	require.NoError(t, r.wait(c, last))
	require.Eventually(t, func() bool { return src.acked.Load() == 1 }, 10*time.Second, time.Millisecond)
}

// TestInstanceKilledBetweenEffectAndAck: two instances on one durable. One dies
// with the effect committed and the delivery not acked; the other gets the
// delivery again, acks it, and there is one effect.
func TestInstanceKilledBetweenEffectAndAck(t *testing.T) {
	r := newRig(t, store.Options{})
	first, second := newScript(), newScript()
	o := polling(options("c", failing("c", fine)), time.Minute)
	dying := o
	committed := make(chan struct{}, 10)
	dying.Failpoint = failpoint.At(failpoint.ConsumerAfterCommit, 2, func() error { committed <- struct{}{}; return errors.New("killed") })
	last := r.append("z")
	other, _ := r.run(second, o)
	require.NoError(t, r.wait(other, last)) // it has had its first look
	c, stop := r.run(first, dying)
	last = r.append("y")
	first.ch <- []consumer.Delivery{first.delivery(r, 2, last)}
	require.NoError(t, r.wait(c, last))
	require.Eventually(t, func() bool { return first.acked.Load() == 2 }, 10*time.Second, time.Millisecond)
	last = r.append("a")
	first.ch <- []consumer.Delivery{first.delivery(r, 3, last)}
	<-committed
	stop()
	require.Equal(t, int64(2), first.acked.Load())
	second.ch <- []consumer.Delivery{second.delivery(r, 3, last)}
	require.NoError(t, r.wait(other, last))
	require.Eventually(t, func() bool { return second.acked.Load() == 3 }, 10*time.Second, time.Millisecond)
	require.Equal(t, "z1 y1 a1", r.effects("c"))
	require.Zero(t, other.Status().Strays)
}

// TestStaleBatchIsNotApplied: between reading the log and its transaction the
// consumer was reset by somebody else.
func TestStaleBatchIsNotApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, store.Options{})
		src := newScript()
		c, _ := r.run(src, polling(options("c", failing("c", fine)), time.Minute))
		require.NoError(t, r.wait(c, r.append("a")))
		last := r.append("b")
		require.NoError(t, r.db.Update(t.Context(), func(tx *store.Tx) error {
			src.ch <- []consumer.Delivery{src.delivery(r, 2, last)}
			synctest.Wait() // it has read b, and waits for the writer
			for _, q := range []string{`UPDATE outlog_consumers SET position = 0, generation = generation + 1`, `DELETE FROM outlog_inbox`, `DELETE FROM effects`} {
				if _, err := tx.ExecContext(t.Context(), q); err != nil {
					return err
				}
			}
			return nil
		}))
		require.NoError(t, r.wait(c, last))
		require.Equal(t, "a1 b1", r.effects("c"))
	})
}

// TestAttemptsOutliveARestart: a restart is neither an attempt nor forgiveness.
func TestAttemptsOutliveARestart(t *testing.T) {
	r := newRig(t, store.Options{})
	r.append("a")
	o := options("c", failing("c", func(e consumer.Event[string]) error { return consumer.RetryAfter(time.Hour, errors.New("later")) }))
	for range 3 {
		_, stop := r.run(down{}, o)
		r.eventually("retrying 1", `SELECT state || ' ' || attempts FROM outlog_parked`)
		stop()
	}
	r.eventually("1", `SELECT count(*) FROM outlog_attempts`)
}

// TestConsumerThatAppendsDoesNotRepeatItself: applied again after a reset, it
// appends nothing new; and the reset has to be forced.
func TestConsumerThatAppendsDoesNotRepeatItself(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a", "b")
	o := appending(r)
	c, stop := r.run(down{}, o)
	require.NoError(t, r.wait(c, last))
	r.eventually("4", `SELECT count(*) FROM outbox`)
	require.ErrorContains(t, r.reset("beginning"), consumer.ErrAppends.Error())
	r.exec(`INSERT INTO outlog_requests (consumer, verb, argument, requested_at) VALUES ('c', 'reset', '{"to":"beginning","force":true}', 0)`)
	r.eventually("2", `SELECT generation FROM outlog_consumers`)
	r.eventually("4 4", `SELECT position || ' ' || (SELECT count(*) FROM outbox) FROM outlog_consumers`)
	stop()
	require.Equal(t, "a1 b1", r.effects("c"))
}
