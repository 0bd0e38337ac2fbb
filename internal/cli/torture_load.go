package cli

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// record is an order of the load and every answer about it, which is what the
// outside check believes.
type record struct {
	order
	placed    []receipt // more than one: the key was sent again
	cancelled []receipt
}

// receipt is what a client was told, by which run of serve, and when.
type receipt struct {
	answer
	at time.Time
}

// tortureLoad places orders until it is told to stop.
type tortureLoad struct {
	*client
	seed     uint64
	next     atomic.Int64
	accepted atomic.Int64

	mu      sync.Mutex
	records []*record
}

const (
	// thinking is how long a client waits between two orders: about 500 orders
	// a second leave the machine room to recover at full speed.
	thinking = 30 * time.Millisecond
	// again and the 10 % of cancelled orders mix the load.
	again = 8 // one in so many orders is sent once more under its key
)

// run places orders until stop is closed, then finishes those under way.
func (l *tortureLoad) run(ctx context.Context, stop <-chan struct{}) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var placing sync.WaitGroup
	for range clients {
		placing.Go(func() {
			if err := l.placeAll(ctx, stop); err != nil {
				cancel(err)
			}
		})
	}
	placing.Wait()
	return context.Cause(ctx)
}

func (l *tortureLoad) placeAll(ctx context.Context, stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		case <-ctx.Done():
			return nil
		case <-time.After(thinking):
		}
		i := int(l.next.Add(1) - 1)
		r := &record{order: newOrder(l.seed, i)}
		l.mu.Lock()
		l.records = append(l.records, r)
		l.mu.Unlock()
		if err := l.deal(ctx, r, rand.New(rand.NewPCG(l.seed^1, uint64(i)))); err != nil && ctx.Err() == nil {
			return fmt.Errorf("order %d: %w", i, err)
		}
	}
}

// deal places an order, perhaps again, and perhaps cancels it. It alone writes
// the record.
func (l *tortureLoad) deal(ctx context.Context, r *record, random *rand.Rand) error {
	times := 1
	if random.IntN(again) == 0 {
		times = 2
	}
	for range times {
		a, err := l.place(ctx, &r.order)
		if err != nil {
			return err
		}
		r.placed = append(r.placed, receipt{a, time.Now()})
		r.id = a.OrderID
		l.accepted.Add(1)
	}
	if !r.cancel {
		return nil
	}
	a, err := l.cancelOrder(ctx, &r.order)
	if refused, ok := errors.AsType[*refusal](err); ok && refused.status == http.StatusNotFound {
		return nil // an older copy does not have it; if it should, the check says so
	}
	if err == nil {
		r.cancelled = append(r.cancelled, receipt{a, time.Now()})
	}
	return err
}

// restore is an older copy of the database that was put back.
type restore struct {
	run    int             // of serve, the last before it
	copied time.Time       // when making the copy began
	holds  map[string]bool // event ids in the copy
}

// expectation is what must be in the directory in the end.
type expectation struct {
	orders    []order
	cancelled int      // of them
	gone      []string // event ids of what was accepted and must not be there
	twice     int      // keys for which two orders must be there
}

// expected works out what the answers to the clients and the restores amount to.
func (l *tortureLoad) expected(restores []restore) (e expectation) {
	gone := map[string]bool{}
	survives := func(r receipt) bool {
		ok := r.survives(restores)
		gone[r.EventID] = gone[r.EventID] || !ok
		return ok
	}
	for _, r := range l.records {
		o, cancel := r.order, false
		o.id, o.cancel = "", false
		for _, p := range r.placed {
			if !survives(p) {
				continue
			}
			if o.id != "" && o.id != p.OrderID {
				e.twice++
			}
			o.id, o.eventID = p.OrderID, p.EventID
		}
		for _, c := range r.cancelled {
			cancel = survives(c) && c.OrderID == o.id
		}
		if o.id == "" {
			continue
		}
		if o.cancel = cancel; cancel {
			e.cancelled++
		}
		e.orders = append(e.orders, o)
	}
	for id, is := range gone {
		if is {
			e.gone = append(e.gone, id)
		}
	}
	return e
}

// survives reports whether what a client was told still holds after the
// restores: it was told before the copy was begun, or the copy has it.
func (r receipt) survives(restores []restore) bool {
	for _, s := range restores {
		if r.run <= s.run && !r.at.Before(s.copied) && !s.holds[r.EventID] {
			return false
		}
	}
	return true
}
