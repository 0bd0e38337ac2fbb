package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"outlog/examples/orders"
)

// demoOrder is an order that the demonstration places, and what it was told.
type demoOrder struct {
	body    orders.Order
	key     string // Idempotency-Key
	cancel  bool   // it is cancelled once it is accepted
	id      string // order_id, "" until accepted
	eventID string // of its OrderCreated
}

// newDemoOrder makes the i-th order of a seed, whoever places it and when.
func newDemoOrder(seed uint64, i int) demoOrder {
	r := rand.New(rand.NewPCG(seed, uint64(i)))
	o := demoOrder{key: fmt.Sprintf("demo-%d-%d", seed, i), cancel: r.IntN(10) == 0}
	o.body.CustomerID = fmt.Sprintf("customer-%d", r.IntN(500))
	for range 1 + r.IntN(3) {
		o.body.Lines = append(o.body.Lines, orders.Line{SKU: fmt.Sprintf("SKU-%02d", r.IntN(40)), Qty: 1 + r.Int64N(5), UnitPriceCents: 100 + r.Int64N(9900)})
	}
	return o
}

// demoLoad places all orders from several clients at once, and kills the
// server when certain counts of accepted orders are reached.
type demoLoad struct {
	server *demoServer
	client *http.Client
	list   []demoOrder
	killAt []int64 // counts of accepted orders, rising

	next       atomic.Int64
	accepted   atomic.Int64
	reached    chan struct{}   // receives when the next count of killAt is reached
	recoveries []time.Duration // from the kill to ready again
}

func newDemoLoad(seed uint64, count, kills int, server *demoServer) *demoLoad {
	l := &demoLoad{
		server:  server,
		client:  &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: demoClients}},
		list:    make([]demoOrder, count),
		reached: make(chan struct{}, kills),
	}
	for i := range l.list {
		l.list[i] = newDemoOrder(seed, i)
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
	var clients, killer sync.WaitGroup
	for range min(demoClients, len(l.list)) {
		clients.Go(func() {
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
	clients.Wait()
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
		if err := l.place(ctx, o); err != nil {
			return fmt.Errorf("order %d: %w", i, err)
		}
		p.add()
		if slices.Contains(l.killAt, l.accepted.Add(1)) {
			l.reached <- struct{}{}
		}
		if o.cancel {
			if err := l.cancelOrder(ctx, o); err != nil {
				return fmt.Errorf("cancel order %d: %w", i, err)
			}
		}
	}
}

// place sends an order until it is answered. The key makes sure that it is
// placed once, however often it was sent.
func (l *demoLoad) place(ctx context.Context, o *demoOrder) error {
	answer, err := l.send(ctx, "/orders", o.key, o.body, http.StatusCreated)
	if err != nil {
		return err
	}
	var r orders.Receipt
	if err := json.Unmarshal(answer, &r); err != nil {
		return fmt.Errorf("answer %q: %w", answer, err)
	}
	o.id, o.eventID = r.OrderID, r.EventID
	return nil
}

// cancelOrder cancels an accepted order.
func (l *demoLoad) cancelOrder(ctx context.Context, o *demoOrder) error {
	_, err := l.send(ctx, "/orders/"+o.id+"/cancel", o.key+"-cancel", struct{}{}, http.StatusOK)
	return err
}

// demoRetry is the pause before a request is sent again to a server that is up
// and did not answer.
const demoRetry = 10 * time.Millisecond

// send posts a document, with the same key each time, until it is answered by
// other than a server error.
func (l *demoLoad) send(ctx context.Context, path, key string, document any, want int) ([]byte, error) {
	body, err := json.Marshal(document)
	if err != nil {
		return nil, err
	}
	for {
		base, err := l.server.url(ctx)
		if err != nil {
			return nil, err
		}
		status, answer, err := l.post(ctx, base+path, key, body)
		switch {
		case err == nil && status == want:
			return answer, nil
		case err == nil && status < http.StatusInternalServerError:
			return nil, fmt.Errorf("answered %d: %s", status, problemDetail(answer))
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(demoRetry):
		}
	}
}

func (l *demoLoad) post(ctx context.Context, url, key string, body []byte) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := l.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, answer, err
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
