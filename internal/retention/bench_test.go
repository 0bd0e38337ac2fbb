package retention_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/internal/retention"
	"outlog/outbox"
	"outlog/store"
)

// BenchmarkAppendWhilePruning measures what an append takes with nothing
// beside it, and while a million expired events are pruned, for 16 callers as
// fast as they can. The two take turns of three seconds, so that both meet the
// same machine. go test ./internal/retention -run '^$' -bench . -benchtime 1x
func BenchmarkAppendWhilePruning(b *testing.B) {
	expired := int64(1_000_000)
	if testing.Short() {
		expired = 100_000
	}
	for b.Loop() {
		r := newRig(b)
		r.append(int(expired), 10*day)
		times := map[string][]time.Duration{}
		spent := map[string]time.Duration{}
		for pruned := int64(0); pruned < expired; {
			for _, what := range []string{"alone", "pruning"} {
				ctx, stop := context.WithTimeout(b.Context(), 3*time.Second)
				var wg sync.WaitGroup
				start := time.Now()
				wg.Go(func() { times[what] = append(times[what], r.load(ctx, 16)...) })
				if what == "pruning" {
					res, err := retention.Prune(ctx, r.db, r.log, older(day))
					if ctx.Err() == nil {
						require.NoError(b, err)
						stop()
					}
					pruned += res.Events
				}
				wg.Wait()
				stop()
				spent[what] += time.Since(start)
			}
		}
		for what, all := range times {
			b.ReportMetric(percentile(all, 50), "ms-p50-"+what)
			b.ReportMetric(percentile(all, 99), "ms-p99-"+what)
			b.ReportMetric(percentile(all, 99.9), "ms-p99.9-"+what)
			b.ReportMetric(float64(len(all))/spent[what].Seconds(), "appends/s-"+what)
		}
		b.ReportMetric(float64(expired)/spent["pruning"].Seconds(), "pruned/s")
	}
}

// load appends from n callers until ctx ends and returns what each append took.
func (r *rig) load(ctx context.Context, n int) (all []time.Duration) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			var mine []time.Duration
			for ctx.Err() == nil {
				start := time.Now()
				err := r.db.Update(context.WithoutCancel(ctx), func(tx *store.Tx) error {
					_, err := r.log.Append(context.WithoutCancel(ctx), tx, outbox.Event{AggregateType: "order", AggregateID: r.db.NewID(), Type: "Placed", Data: "x"})
					return err
				})
				require.NoError(r.t, err)
				mine = append(mine, time.Since(start))
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, mine...)
		})
	}
	wg.Wait()
	return all
}

func percentile(times []time.Duration, p float64) float64 {
	slices.Sort(times)
	return times[min(len(times)-1, int(float64(len(times))*p/100))].Seconds() * 1000
}
