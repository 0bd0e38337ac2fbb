package broker

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"outlog/relay"
)

func TestAppendStoresInOrderFromBase(t *testing.T) {
	_, p, _ := up(t, quick(t))
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 1}, tail(t, p))
	n, err := p.Append(t.Context(), 0, messages(1, 512))
	require.NoError(t, err)
	require.Equal(t, 512, n)
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 1, LastSeq: 512, Msgs: 512}, tail(t, p))
	for _, seq := range []uint64{1, 77, 512} {
		m, err := p.Get(t.Context(), seq)
		require.NoError(t, err)
		require.Equal(t, message(int64(seq)), m)
	}
	for _, seq := range []uint64{0, 513} {
		_, err = p.Get(t.Context(), seq)
		require.ErrorIs(t, err, relay.ErrNoMessage)
	}
	n, err = p.Append(t.Context(), 512, nil)
	require.NoError(t, err)
	require.Zero(t, n)
}

func TestAppendAtWrongBaseIsConflict(t *testing.T) {
	_, p, _ := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 10))
	require.NoError(t, err)
	for _, base := range []uint64{0, 5, 9, 11, 100} { // 9: the second message would fit
		n, err := p.Append(t.Context(), base, messages(11, 10))
		require.ErrorIs(t, err, relay.ErrConflict)
		require.Zero(t, n)
	}
	require.EqualValues(t, 10, tail(t, p).LastSeq)
}

func TestTooLargeMessageLeavesExactPrefix(t *testing.T) {
	o := quick(t)
	o.MaxMessage = 64 << 10
	_, p, _ := up(t, o)
	base := uint64(0)
	for name, spoil := range map[string]func(*relay.Message){
		"payload": func(m *relay.Message) { m.Record.Payload = bytes.Repeat([]byte("x"), 64<<10) },
		"header":  func(m *relay.Message) { m.Record.RawHeaders = string(bytes.Repeat([]byte("x"), 64<<10)) },
	} {
		msgs := messages(1, 100)
		spoil(&msgs[37])
		n, err := p.Append(t.Context(), base, msgs)
		var refused *relay.RefusedError
		require.ErrorAs(t, err, &refused, name)
		require.EqualValues(t, 38, refused.Position)
		require.Equal(t, 37, n)
		base += 37
		require.Equal(t, base, tail(t, p).LastSeq)
	}
}

func TestHeaderTooLargeIsRefusedByServer(t *testing.T) {
	_, p, _ := up(t, quick(t))
	msgs := messages(1, 10)
	msgs[4].Record.RawHeaders = string(bytes.Repeat([]byte("x"), 70<<10))
	n, err := p.Append(t.Context(), 0, msgs)
	var refused *relay.RefusedError
	require.ErrorAs(t, err, &refused)
	require.EqualValues(t, 5, refused.Position)
	require.EqualValues(t, codeHeaderTooLarge, refused.Code)
	require.Equal(t, 4, n)
	require.EqualValues(t, 4, tail(t, p).LastSeq)
}

func TestMessageFromElsewhereBreaksWindow(t *testing.T) {
	b, p, _ := up(t, quick(t))
	require.NoError(t, b.PublishRaw(t.Context(), "outlog.stray", nil, nil))
	n, err := p.Append(t.Context(), 0, messages(1, 10))
	require.ErrorIs(t, err, relay.ErrConflict)
	require.Zero(t, n)
	m, err := p.Get(t.Context(), 1)
	require.NoError(t, err)
	require.Empty(t, m.LogID)
}

func TestIntruderInsideWindowIsConflictWithPrefix(t *testing.T) {
	b, p, _ := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 10))
	require.NoError(t, err)
	l, err := b.relayLink()
	require.NoError(t, err)
	inner := p.(*publisher)
	n, err := inner.window(t.Context(), l, 9, messages(10, 5)) // as if position 10's place had just been taken
	require.Zero(t, n)
	require.ErrorContains(t, err, "4 messages behind it were stored")
	require.ErrorIs(t, inner.classify(10, err), relay.ErrConflict)
}

func TestTwoPublishersKeepLogOrder(t *testing.T) {
	b, p, _ := up(t, quick(t))
	const n = 200
	var stored [2]int
	var wait sync.WaitGroup
	for i := range stored {
		wait.Go(func() { stored[i], _ = b.Publisher().Append(context.Background(), 0, messages(1, n)) })
	}
	wait.Wait()
	require.Equal(t, 0, min(stored[0], stored[1]), "the first message is one publisher's")
	require.EqualValues(t, n, tail(t, p).LastSeq)
	require.NoError(t, b.Scan(t.Context(), func(seq uint64, m relay.Message) error {
		require.EqualValues(t, seq, m.Record.Position)
		return nil
	}))
}

func TestAppendAcrossRestartStoresPrefix(t *testing.T) {
	b, p, _ := up(t, quick(t))
	b.mu.Lock()
	s := b.current
	b.mu.Unlock()
	base, failed := uint64(0), false
	for i := 0; !failed; i++ {
		if i == 5 {
			go s.Shutdown()
		}
		n, err := p.Append(t.Context(), base, messages(int64(base)+1, 512))
		base += uint64(n)
		if failed = err != nil; failed {
			require.ErrorIs(t, err, relay.ErrOutage)
		}
	}
	require.Eventually(t, func() bool { st := b.State(); return st.Up && st.Restarts > 0 }, 10*time.Second, time.Millisecond)
	last := tail(t, p).LastSeq
	require.GreaterOrEqual(t, last, base, "what was acknowledged is stored")
	require.NoError(t, b.Scan(t.Context(), func(seq uint64, m relay.Message) error {
		require.EqualValues(t, seq, m.Record.Position)
		return nil
	}))
	n, err := p.Append(t.Context(), last, messages(int64(last)+1, 10))
	require.NoError(t, err)
	require.Equal(t, 10, n)
}

func TestAppendEndsWithContext(t *testing.T) {
	_, p, _ := up(t, quick(t))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	n, err := p.Append(ctx, 0, messages(1, 10))
	require.ErrorIs(t, err, relay.ErrOutage)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, n)
	_, err = p.Tail(ctx)
	require.ErrorIs(t, err, relay.ErrOutage)
}

func TestAppendWithoutStreamIsOutage(t *testing.T) {
	b, _ := run(t, quick(t))
	require.NoError(t, b.WaitUp(deadline(t)))
	p := b.Publisher()
	require.False(t, tail(t, p).Exists)
	_, err := p.Append(t.Context(), 0, messages(1, 3))
	require.ErrorIs(t, err, relay.ErrOutage)
	_, err = p.Get(t.Context(), 1)
	require.ErrorIs(t, err, relay.ErrNoMessage)
}

func TestFailuresByClass(t *testing.T) {
	b, err := New(quick(t))
	require.NoError(t, err)
	p := b.Publisher().(*publisher)
	code := func(c jetstream.ErrorCode) error { return &jetstream.APIError{ErrorCode: c, Description: "words"} }
	for _, err := range []error{code(10071), code(10164), &misplacedError{1, 2}} {
		require.ErrorIs(t, p.classify(7, err), relay.ErrConflict)
	}
	for _, err := range []error{code(10054), code(10097), nats.ErrMaxPayload, nats.ErrBadSubject} {
		var refused *relay.RefusedError
		require.ErrorAs(t, p.classify(7, err), &refused)
		require.EqualValues(t, 7, refused.Position)
		require.NotEmpty(t, refused.Reason)
	}
	for _, err := range []error{
		code(10077), code(10023), code(10047), code(10039), code(10008), code(10109), code(65535),
		jetstream.ErrAsyncPublishTimeout, jetstream.ErrNoStreamResponse, jetstream.ErrTooManyStalledMsgs,
		nats.ErrConnectionClosed, nats.ErrDisconnected, nats.ErrReconnectBufExceeded, context.Canceled,
		fmt.Errorf("anything else"),
	} {
		got := p.classify(7, err)
		require.ErrorIs(t, got, relay.ErrOutage)
		require.NotErrorIs(t, got, relay.ErrConflict)
	}
}

func TestRecreateGoesOnAboveFirstSeq(t *testing.T) {
	b, p, stop := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 10))
	require.NoError(t, err)
	require.NoError(t, p.Recreate(t.Context(), 5000))
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 5000, LastSeq: 4999}, tail(t, p))
	_, err = p.Append(t.Context(), 10, messages(1, 1))
	require.ErrorIs(t, err, relay.ErrConflict, "a stale base must not fit")
	restart(t, b)
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 5000, LastSeq: 4999}, tail(t, p), "an empty stream keeps its place")
	_, err = p.Append(t.Context(), 4999, messages(1, 3))
	require.NoError(t, err)
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 5000, LastSeq: 5002, Msgs: 3}, tail(t, p))
	stop()
	_, p, _ = up(t, b.opts)
	require.EqualValues(t, 5002, tail(t, p).LastSeq)
}

func TestOldMessagesThatComeBackAreDeleted(t *testing.T) {
	o := quick(t)
	b, p, stop := up(t, o)
	_, err := p.Append(t.Context(), 0, messages(1, 50))
	require.NoError(t, err)
	stop()
	meta := filepath.Join(filepath.Dir(b.dir.messages(b.stream)), "meta.inf")
	require.NoError(t, os.WriteFile(meta, []byte("damage"), 0o600))

	b, _ = run(t, o)
	require.NoError(t, b.WaitUp(deadline(t)))
	p = b.Publisher()
	require.False(t, tail(t, p).Exists)
	require.NoError(t, p.Recreate(t.Context(), 1000))
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 1000, LastSeq: 999}, tail(t, p))
	_, err = p.Append(t.Context(), 999, messages(1, 5))
	require.NoError(t, err)
	restart(t, b)
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 1000, LastSeq: 1004, Msgs: 5}, tail(t, p))
	require.Equal(t, 1, b.State().Restarts, "a stream that cannot be read is no reason to restart")
}

func TestPurgedStreamKeepsItsEnd(t *testing.T) {
	b, p, _ := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 20))
	require.NoError(t, err)
	l, err := b.relayLink()
	require.NoError(t, err)
	s, err := l.js.Stream(t.Context(), b.stream)
	require.NoError(t, err)
	require.NoError(t, s.Purge(t.Context()))
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 21, LastSeq: 20}, tail(t, p))
	_, err = p.Get(t.Context(), 20)
	require.ErrorIs(t, err, relay.ErrNoMessage)
	restart(t, b)
	require.Equal(t, relay.Tail{Exists: true, FirstSeq: 21, LastSeq: 20}, tail(t, p))
}

func TestChangedLimitsReachTheStream(t *testing.T) {
	o := quick(t)
	_, _, stop := up(t, o)
	stop()
	o.MaxBytes = 5 << 20
	b, _, _ := up(t, o)
	l, err := b.relayLink()
	require.NoError(t, err)
	info, err := b.info(t.Context(), l)
	require.NoError(t, err)
	require.EqualValues(t, 5<<20, info.Config.MaxBytes)
	require.True(t, info.Config.DenyDelete)
	require.Equal(t, minDuplicates, info.Config.Duplicates)
}
