package cli

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// demoLoad places all orders from several clients at once, and kills the
// server when certain counts of accepted orders are reached.
type demoLoad struct {
	*client
	list   []order
	killAt []int64 // counts of accepted orders, rising

	next       atomic.Int64
	accepted   atomic.Int64
	reached    chan struct{}   // receives when the next count of killAt is reached
	recoveries []time.Duration // from the kill to ready again
}

func newDemoLoad(seed uint64, count, kills int, server *child) *demoLoad {
	l := &demoLoad{
		client:  newClient(server),
		list:    make([]order, count),
		reached: make(chan struct{}, kills),
	}
	for i := range l.list {
		l.list[i] = newOrder(seed, i)
	}
	r := rand.New(rand.NewPCG(seed, 1<<63))
	last := max(kills, (count-1)*19/20) // not at the end: the load must be on
	for len(l.killAt) < kills {
		if at := 1 + r.Int64N(int64(last)); !slices.Contains(l.killAt, at) {
			l.killAt = append(l.killAt, at)
		}
	}
	slices.Sort(l.killAt)
	return l
}

// run returns when every order is accepted and every kill is done.
func (l *demoLoad) run(ctx context.Context, p progress) error {
	defer p.finish()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case err := <-l.server.crashed:
			cancel(err)
		case <-ctx.Done():
		}
	}()
	var placing, killer sync.WaitGroup
	for range min(clients, len(l.list)) {
		placing.Go(func() {
			if err := l.placeAll(ctx, p); err != nil {
				cancel(err)
			}
		})
	}
	killer.Go(func() {
		if err := l.killAll(ctx); err != nil {
			cancel(err)
		}
	})
	placing.Wait()
	killer.Wait()
	return context.Cause(ctx)
}

// placeAll is one client: it takes order after order.
func (l *demoLoad) placeAll(ctx context.Context, p progress) error {
	for {
		i := l.next.Add(1) - 1
		if i >= int64(len(l.list)) {
			return nil
		}
		o := &l.list[i]
		a, err := l.place(ctx, o)
		if err != nil {
			return fmt.Errorf("order %d: %w", i, err)
		}
		o.id, o.eventID = a.OrderID, a.EventID
		p.add()
		if slices.Contains(l.killAt, l.accepted.Add(1)) {
			l.reached <- struct{}{}
		}
		if o.cancel {
			if _, err := l.cancelOrder(ctx, o); err != nil {
				return fmt.Errorf("cancel order %d: %w", i, err)
			}
		}
	}
}

// killAll kills the server each time a count is reached, and starts it again.
func (l *demoLoad) killAll(ctx context.Context) error {
	for range l.killAt {
		select {
		case <-l.reached:
		case <-ctx.Done():
			return nil
		}
		killed := time.Now()
		l.server.kill()
		if err := l.server.start(ctx); err != nil {
			return fmt.Errorf("start after a kill: %w", err)
		}
		l.recoveries = append(l.recoveries, time.Since(killed))
	}
	return nil
}

// cancelled counts the cancelled orders.
func (l *demoLoad) cancelled() (n int) {
	for i := range l.list {
		if l.list[i].cancel {
			n++
		}
	}
	return n
}
