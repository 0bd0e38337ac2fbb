package broker

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"outlog/relay"
)

const window = 512

// benchOptions are quick ones with the defaults' intervals.
func benchOptions(b *testing.B) Options {
	o := quick(b)
	o.Logger = slog.New(slog.DiscardHandler)
	o.HealthInterval, o.PublishTimeout, o.AckWait = 0, 0, 0
	return o
}

func benchMessages() []relay.Message {
	msgs := messages(1, window)
	for i := range msgs {
		msgs[i].Record.Payload = make([]byte, 256)
	}
	return msgs
}

func perSecond(b *testing.B, n int) {
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "msg/s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkAppend and BenchmarkRawPublishAsync publish the same messages, b.N of
// them; the second is plain PublishMsgAsync, with headers made beforehand and no
// expected sequence.
func BenchmarkAppend(b *testing.B) {
	_, p, _ := up(b, benchOptions(b))
	msgs := benchMessages()
	b.ResetTimer()
	for base := 0; base < b.N; {
		n, err := p.Append(b.Context(), uint64(base), msgs[:min(window, b.N-base)])
		require.NoError(b, err)
		base += n
	}
	perSecond(b, b.N)
}

func BenchmarkRawPublishAsync(b *testing.B) {
	broker, _, _ := up(b, benchOptions(b))
	l, err := broker.relayLink()
	require.NoError(b, err)
	var raw []*nats.Msg
	for _, m := range benchMessages() {
		subject, h := newEncoder().encode(&m, "")
		raw = append(raw, &nats.Msg{Subject: subject, Header: h, Data: m.Record.Payload})
	}
	futures := make([]jetstream.PubAckFuture, 0, window)
	b.ResetTimer()
	for sent := 0; sent < b.N; sent += len(futures) {
		futures = futures[:0]
		for _, m := range raw[:min(window, b.N-sent)] {
			f, err := l.js.PublishMsgAsync(m)
			require.NoError(b, err)
			futures = append(futures, f)
		}
		for _, f := range futures {
			select {
			case <-f.Ok():
			case err := <-f.Err():
				require.NoError(b, err)
			}
		}
	}
	perSecond(b, b.N)
}

// fill appends n messages.
func fill(b *testing.B, p relay.Publisher, n int) {
	msgs := benchMessages()
	for base := 0; base < n; base += window {
		_, err := p.Append(b.Context(), uint64(base), msgs)
		require.NoError(b, err)
	}
}

func BenchmarkFetch(b *testing.B) {
	broker, p, _ := up(b, benchOptions(b))
	const n = 200 * window
	fill(b, p, n)
	total := 0
	for b.Loop() {
		s := broker.Source(time.Now().Format("150405.000000000"), fromStart)
		for got := 0; got < n; {
			batch, err := s.Fetch(b.Context(), window)
			require.NoError(b, err)
			require.NoError(b, batch[len(batch)-1].Ack())
			got += len(batch)
		}
		s.Close()
		total += n
	}
	perSecond(b, total)
}

func BenchmarkScan(b *testing.B) {
	broker, p, _ := up(b, benchOptions(b))
	const n = 200 * window
	fill(b, p, n)
	total := 0
	for b.Loop() {
		require.NoError(b, broker.Scan(b.Context(), func(uint64, relay.Message) error { total++; return nil }))
	}
	perSecond(b, total)
}

// BenchmarkLatency measures from Append to the return of a Fetch that waits.
func BenchmarkLatency(b *testing.B) {
	broker, p, _ := up(b, benchOptions(b))
	s := broker.Source("latency", fromStart)
	defer s.Close()
	arrived := make(chan time.Time)
	go func() {
		for {
			got, err := s.Fetch(context.Background(), 16)
			if err != nil {
				close(arrived)
				return
			}
			arrived <- time.Now()
			_ = got[len(got)-1].Ack()
		}
	}()
	msgs := benchMessages()[:1]
	base := uint64(0)
	var took []time.Duration
	for b.Loop() {
		began := time.Now()
		_, err := p.Append(b.Context(), base, msgs)
		require.NoError(b, err)
		took = append(took, (<-arrived).Sub(began))
		base++
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
	b.ReportMetric(0, "ns/op")
}
