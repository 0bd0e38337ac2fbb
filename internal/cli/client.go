package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"outlog/examples/orders"
)

// order is an order that a client places, and what it was told.
type order struct {
	body    orders.Order
	key     string // Idempotency-Key
	cancel  bool   // it is cancelled once it is accepted
	id      string // order_id, "" until accepted
	eventID string // of its OrderCreated
}

// newOrder makes the i-th order of a seed, whoever places it and when.
func newOrder(seed uint64, i int) order {
	r := rand.New(rand.NewPCG(seed, uint64(i)))
	o := order{key: fmt.Sprintf("demo-%d-%d", seed, i), cancel: r.IntN(10) == 0}
	o.body.CustomerID = fmt.Sprintf("customer-%d", r.IntN(500))
	for range 1 + r.IntN(3) {
		o.body.Lines = append(o.body.Lines, orders.Line{SKU: fmt.Sprintf("SKU-%02d", r.IntN(40)), Qty: 1 + r.Int64N(5), UnitPriceCents: 100 + r.Int64N(9900)})
	}
	return o
}

// client speaks HTTP with a serve process that comes and goes.
type client struct {
	server *child
	http   *http.Client
}

// clients is how many send requests at once.
const clients = 16

func newClient(server *child) *client {
	return &client{server, &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: clients}}}
}

// answer is what a request was answered in the end.
type answer struct {
	orders.Receipt
	run int // of serve, from 1
}

// refusal is an answer that no repetition changes.
type refusal struct {
	status int
	detail string
}

func (r *refusal) Error() string { return fmt.Sprintf("answered %d: %s", r.status, r.detail) }

// place sends an order until it is answered. The key makes sure that it is
// placed once, however often it was sent.
func (c *client) place(ctx context.Context, o *order) (answer, error) {
	return c.send(ctx, "/orders", o.key, o.body, http.StatusCreated)
}

// cancelOrder cancels an accepted order.
func (c *client) cancelOrder(ctx context.Context, o *order) (answer, error) {
	return c.send(ctx, "/orders/"+o.id+"/cancel", o.key+"-cancel", struct{}{}, http.StatusOK)
}

// sendAgain is the pause before a request is sent again to a server that is up
// and did not answer.
const sendAgain = 10 * time.Millisecond

// send posts a document, with the same key each time, until it is answered by
// other than a server error. Errors: *refusal, ctx's.
func (c *client) send(ctx context.Context, path, key string, document any, want int) (answer, error) {
	body, err := json.Marshal(document)
	if err != nil {
		return answer{}, err
	}
	for {
		p, err := c.server.up(ctx)
		if err != nil {
			return answer{}, err
		}
		status, text, err := c.post(ctx, p.base+path, key, body)
		switch {
		case err == nil && status == want:
			a := answer{run: p.run}
			if err := json.Unmarshal(text, &a.Receipt); err != nil {
				return a, fmt.Errorf("answer %q: %w", text, err)
			}
			return a, nil
		case err == nil && status < http.StatusInternalServerError:
			return answer{}, &refusal{status, problemDetail(text)}
		}
		select {
		case <-ctx.Done():
			return answer{}, ctx.Err()
		case <-time.After(sendAgain):
		}
	}
}

func (c *client) post(ctx context.Context, url, key string, body []byte) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, text, err
}
