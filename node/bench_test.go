package node_test

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// BenchmarkPipeline appends from 64 callers as fast as they can, at FULL, and
// waits until two consumers have applied everything:
//
//	go test ./node -run - -bench Pipeline -benchtime 100000x
func BenchmarkPipeline(b *testing.B) {
	n, _ := start(b, node.Options{}, recorder("a", "Placed"), recorder("b", "Placed"))
	b.ResetTimer()
	cpu := cpuTime()
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for i := range b.N/64 + 1 {
				appendOne(b, n, n.Store().NewID(), "Placed", i)
			}
		})
	}
	wg.Wait()
	appended := b.Elapsed()
	last := appendOne(b, n, "last", "Placed", 0)
	require.NoError(b, n.WaitApplied(context.Background(), "a", last.Position))
	require.NoError(b, n.WaitApplied(context.Background(), "b", last.Position))
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	b.ReportMetric(float64(b.N)/appended.Seconds(), "appends/s")
	b.ReportMetric(float64((cpuTime()-cpu).Microseconds())/float64(b.N), "cpu-µs/event")
}

// cpuTime is what the process has used of the processors.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkLatency places 1,000 events a second, each at its own time whatever
// the others do, and measures from the return of Update, when the event is on
// disk, to the commit of the consumer's effect:
//
//	go test ./node -run - -bench Latency -benchtime 10000x
func BenchmarkLatency(b *testing.B) {
	const rate = 1000
	var mu sync.Mutex
	committed := map[string]time.Time{}
	applied := map[string]time.Time{}
	var batch []string
	o := consumer.Options{Name: "a", Start: consumer.Beginning, Routes: []consumer.Route{
		consumer.Apply("Placed", func(ctx context.Context, tx *store.Tx, e consumer.Event[placed]) error {
			batch = append(batch, e.ID)
			return record("a")(ctx, tx, e)
		})},
		Failpoint: func(point string) error {
			if point == "consumer.after-commit" {
				now := time.Now()
				mu.Lock()
				defer mu.Unlock()
				for _, id := range batch {
					applied[id] = now
				}
				batch = batch[:0]
			}
			return nil
		}}
	n, _ := start(b, node.Options{}, o)
	waitApplied(b, n, "a", appendOne(b, n, "warm", "Placed", 0).Position)
	b.ResetTimer()
	begin := time.Now()
	var last int64
	var wg sync.WaitGroup
	for i := range b.N {
		time.Sleep(time.Until(begin.Add(time.Duration(i) * time.Second / rate)))
		wg.Go(func() {
			var out []outbox.Appended
			err := n.Update(b.Context(), func(tx *store.Tx) (err error) {
				out, err = n.Append(b.Context(), tx, outbox.Event{AggregateType: "order", AggregateID: fmt.Sprint(i), Type: "Placed", Data: placed{i}})
				return err
			})
			if err != nil {
				b.Error(err)
				return
			}
			now := time.Now()
			mu.Lock()
			defer mu.Unlock()
			committed[out[0].ID] = now
			last = max(last, out[0].Position)
		})
	}
	wg.Wait()
	require.NoError(b, n.WaitApplied(context.Background(), "a", last))
	b.StopTimer()
	mu.Lock()
	defer mu.Unlock()
	h := hdrhistogram.New(1, 60_000_000, 3) // µs
	for id, at := range committed {
		require.Contains(b, applied, id)
		_ = h.RecordValue(max(1, applied[id].Sub(at).Microseconds()))
	}
	for _, q := range []float64{50, 99, 99.9} {
		b.ReportMetric(float64(h.ValueAtQuantile(q))/1000, fmt.Sprintf("p%v-ms", q))
	}
}
