package broker

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/relay"
)

func fromStart(context.Context) (uint64, error) { return 0, nil }

// fetch returns at least n deliveries.
func fetch(t testing.TB, s *Source, n int) []consumer.Delivery {
	t.Helper()
	var out []consumer.Delivery
	for len(out) < n {
		got, err := s.Fetch(deadline(t), n-len(out))
		require.NoError(t, err)
		require.NotEmpty(t, got)
		out = append(out, got...)
	}
	return out
}

// fetchAgain is fetch for a consumer whose caller backs off: it passes over
// errors.
func fetchAgain(t testing.TB, s *Source, n int) []consumer.Delivery {
	t.Helper()
	var out []consumer.Delivery
	ctx := deadline(t)
	for len(out) < n {
		got, err := s.Fetch(ctx, n-len(out))
		require.NoError(t, ctx.Err(), "last error: %v", err)
		out = append(out, got...)
	}
	return out
}

func requireOrder(t testing.TB, got []consumer.Delivery, firstSeq uint64, firstPosition int64) {
	t.Helper()
	for i, d := range got {
		require.Equal(t, firstSeq+uint64(i), d.Seq)
		want := message(firstPosition + int64(i))
		want.Record.Payload = nil
		require.Equal(t, want.LogID, d.LogID)
		require.Equal(t, want.Record, d.Record)
	}
}

func TestFetchDeliversInOrderWithoutPayload(t *testing.T) {
	b, p, _ := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 1000))
	require.NoError(t, err)
	s := b.Source("inventory", fromStart)
	defer s.Close()
	requireOrder(t, fetch(t, s, 1000), 1, 1)
	_, err = s.Fetch(t.Context(), 0)
	require.ErrorIs(t, err, ErrInvalidOption)
}

func TestFetchWaitsForTheFirstOnly(t *testing.T) {
	b, p, _ := up(t, quick(t))
	s := b.Source("inventory", fromStart)
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Fetch(ctx, 10)
	require.Error(t, err)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.Fetch(short, 10)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	got := make(chan []consumer.Delivery)
	go func() {
		d, _ := s.Fetch(context.Background(), 100)
		got <- d
	}()
	_, err = p.Append(t.Context(), 0, messages(1, 1))
	require.NoError(t, err)
	requireOrder(t, <-got, 1, 1)
}

func TestSourceStartsWhereItIsTold(t *testing.T) {
	b, p, _ := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 100))
	require.NoError(t, err)
	asked := 0
	start := func(context.Context) (uint64, error) { asked++; return 51, nil }
	s := b.Source("a consumer.with *odd> name", start)
	requireOrder(t, fetch(t, s, 50), 51, 51)
	s.Close()
	s = b.Source("a consumer.with *odd> name", start)
	defer s.Close()
	fetch(t, s, 1)
	require.Equal(t, 1, asked, "a durable that exists knows where it is")

	wrong := errors.New("no such position")
	broken := b.Source("broken", func(context.Context) (uint64, error) { return 0, wrong })
	_, err = broken.Fetch(t.Context(), 1)
	require.ErrorIs(t, err, wrong)
}

func TestUnackedIsDeliveredAgainAckedIsNot(t *testing.T) {
	b, p, stop := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 20))
	require.NoError(t, err)
	s := b.Source("inventory", fromStart)
	got := fetch(t, s, 20)
	require.NoError(t, got[9].Ack(), "acknowledges the ten before it too")
	l, err := b.consumerLink()
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		c, err := l.js.Consumer(t.Context(), b.stream, "inventory")
		return err == nil && c.CachedInfo().AckFloor.Stream == 10
	}, 5*time.Second, time.Millisecond)
	requireAgain(t, s, 11, 20) // the ack wait is over
	restart(t, b)
	requireAgain(t, s, 11, 20)
	stop()

	b, _, _ = up(t, b.opts)
	s = b.Source("inventory", fromStart)
	defer s.Close()
	requireAgain(t, s, 11, 20)
}

// requireAgain fetches until every sequence from … to has come, and requires
// that no other comes.
func requireAgain(t testing.TB, s *Source, from, to uint64) {
	t.Helper()
	seen := map[uint64]bool{}
	for uint64(len(seen)) < to-from+1 {
		for _, d := range fetchAgain(t, s, 1) {
			require.True(t, d.Seq >= from && d.Seq <= to, "sequence %d", d.Seq)
			seen[d.Seq] = true
		}
	}
}

func TestSourceFollowsRebuiltStream(t *testing.T) {
	b, p, _ := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 20))
	require.NoError(t, err)
	from := uint64(0)
	s := b.Source("inventory", func(context.Context) (uint64, error) { return from, nil })
	defer s.Close()
	fetch(t, s, 20)
	from = 1005
	require.NoError(t, p.Recreate(t.Context(), 1000))
	_, err = p.Append(t.Context(), 999, messages(1, 20))
	require.NoError(t, err)
	var got []consumer.Delivery
	for len(got) < 15 {
		for _, d := range fetchAgain(t, s, 1) {
			require.GreaterOrEqual(t, d.Seq, uint64(1000), "nothing of the old stream is left")
			if d.Seq >= from { // see Broker.Source about the earlier ones
				got = append(got, d)
			}
		}
	}
	requireOrder(t, got, 1005, 6)
}

func TestFetchFailsWhileBrokerIsDown(t *testing.T) {
	b, p, stop := up(t, quick(t))
	s := b.Source("inventory", fromStart)
	_, err := p.Append(t.Context(), 0, messages(1, 1))
	require.NoError(t, err)
	fetch(t, s, 1)[0].Ack()
	failed := make(chan error, 1)
	go func() {
		for {
			if _, err := s.Fetch(context.Background(), 1); err != nil {
				failed <- err
				return
			}
		}
	}()
	stop()
	select {
	case err := <-failed:
		require.Error(t, err)
	case <-time.After(5 * time.Second):
		require.FailNow(t, "Fetch hangs")
	}
	_, err = s.Fetch(t.Context(), 1)
	require.ErrorIs(t, err, ErrDown)
	s.Close()
	s.Close()
	_, err = s.Fetch(t.Context(), 1)
	require.ErrorIs(t, err, ErrClosed)
}

func TestFetchWithoutStream(t *testing.T) {
	b, _ := run(t, quick(t))
	require.NoError(t, b.WaitUp(deadline(t)))
	s := b.Source("inventory", fromStart)
	_, err := s.Fetch(t.Context(), 1)
	require.ErrorIs(t, err, ErrNoStream)
	require.ErrorIs(t, b.Scan(t.Context(), nil), ErrNoStream)
}

func TestCloseEndsFetch(t *testing.T) {
	b, _, _ := up(t, quick(t))
	s := b.Source("inventory", fromStart)
	ended := make(chan error, 1)
	go func() {
		_, err := s.Fetch(context.Background(), 1)
		ended <- err
	}()
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.session != nil
	}, 5*time.Second, time.Millisecond)
	s.Close()
	require.ErrorIs(t, <-ended, ErrClosed)
	require.Empty(t, b.sources)
}

func TestForeignMessagesAreDeliveredAsSuch(t *testing.T) {
	b, p, _ := up(t, quick(t))
	s := b.Source("inventory", fromStart)
	defer s.Close()
	require.NoError(t, b.PublishRaw(t.Context(), "outlog.stray", map[string][]string{hdrLog: {"testlog"}}, []byte("x")))
	_, err := p.Append(t.Context(), 1, messages(1, 1))
	require.NoError(t, err)
	got := fetch(t, s, 2)
	require.Empty(t, got[0].LogID)
	require.EqualValues(t, 1, got[0].Seq)
	require.Equal(t, "testlog", got[1].LogID)
}

func TestScanSeesTheWholeStream(t *testing.T) {
	b, p, _ := up(t, quick(t))
	require.NoError(t, b.Scan(t.Context(), func(uint64, relay.Message) error { return errors.New("empty") }))
	const n = 10_000
	for base := 0; base < n; base += 1000 {
		_, err := p.Append(t.Context(), uint64(base), messages(int64(base)+1, 1000))
		require.NoError(t, err)
	}
	next := uint64(1)
	require.NoError(t, b.Scan(t.Context(), func(seq uint64, m relay.Message) error {
		require.Equal(t, next, seq)
		require.EqualValues(t, seq, m.Record.Position)
		next++
		return nil
	}))
	require.EqualValues(t, n+1, next)
	wrong := fmt.Errorf("enough")
	require.ErrorIs(t, b.Scan(t.Context(), func(seq uint64, _ relay.Message) error {
		if seq == 100 {
			return wrong
		}
		return nil
	}), wrong)
	ctx, cancel := context.WithCancel(t.Context())
	require.ErrorIs(t, b.Scan(ctx, func(uint64, relay.Message) error { cancel(); return nil }), context.Canceled)
}
