package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"outlog/broker"
	"outlog/examples/orders"
	"outlog/internal/admin"
	"outlog/node"
	"outlog/relay"
	"outlog/store"
)

// serviceConsumers are the consumers of the order service.
var serviceConsumers = []string{orders.Inventory, orders.Notifications}

// awaitQuiet waits until relay and consumers are at the head of the log. After
// the limit it returns all the same: the audit says what is missing.
func awaitQuiet(ctx context.Context, dir dataDir, limit time.Duration) error {
	db, err := dir.openReader(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	for {
		s, err := admin.ReadStatus(ctx, db)
		if err != nil {
			return err
		}
		behind := s.Relay.LagEvents
		for _, c := range s.Consumers {
			behind += c.LagEvents + c.Parked
		}
		if behind == 0 && len(s.Consumers) == len(serviceConsumers) {
			return nil
		}
		select {
		case <-deadline.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// loggedEvent is an event of the log as the audit needs it.
type loggedEvent struct {
	id       string
	position int64
	order    string
	version  int64
}

// facts is what the files say after the service has stopped.
type facts struct {
	log       map[string]loggedEvent           // by event id
	byVersion map[string]map[int64]loggedEvent // by order id and version
	orders    map[string]bool                  // by order id
	applied   map[string]map[string]int64      // by consumer and event id: when
	parked    map[string]map[string]bool       // by consumer and event id
	notices   map[string]int                   // notifications by event id
	reserved  map[string]map[string]stock      // by order id and SKU
}

// stock is a reservation.
type stock struct {
	qty     int64
	eventID string
}

// promises counts those that were broken.
type promises struct {
	Lost       int `json:"lost"`         // events of accepted orders that a consumer has not applied, or that are not on the stream
	Duplicated int `json:"duplicated"`   // effects applied more than once, events more than once on the stream
	OutOfOrder int `json:"out_of_order"` // version k+1 of an order before k
	Ghosts     int `json:"ghosts"`       // applied or published, and not in the log
}

// applied is how far a consumer has come.
type applied struct {
	Applied int `json:"applied"`
}

// verdict is what an outside check of a directory has found.
type verdict struct {
	promises
	events    int // in the log
	consumers map[string]applied
	checks    []store.Result
}

// kept reports whether nothing is broken.
func (v *verdict) kept() bool { return v.promises == promises{} && newVerifyDocument(v.checks).OK }

// audit judges the directory by what the clients were told: list are the orders
// that must be there, and gone the events that must not, because an older copy
// of the database was put back.
func audit(ctx context.Context, dir dataDir, list []order, gone []string) (v verdict, err error) {
	db, err := dir.openReader(ctx)
	if err != nil {
		return v, err
	}
	defer db.Close()
	f, err := readFacts(ctx, db)
	if err != nil {
		return v, fmt.Errorf("read what the service left: %w", err)
	}
	v.judge(f, list, gone)
	if v.checks, err = verifyDatabase(ctx, dir); err != nil {
		return v, err
	}
	err = withStream(ctx, dir, func(n *node.Node) error {
		stream, err := streamResult(ctx, n)
		if err != nil {
			return err
		}
		v.checks = append(v.checks, stream.Result)
		return v.judgeStream(ctx, f, n.Broker())
	})
	if err != nil {
		return v, fmt.Errorf("read the stream: %w", err)
	}
	return v, nil
}

// judge compares the database with what the clients were told.
func (v *verdict) judge(f *facts, list []order, gone []string) {
	v.events = len(f.log)
	v.consumers = map[string]applied{}
	for _, name := range serviceConsumers {
		v.consumers[name] = applied{len(f.applied[name])}
	}
	known := map[string]bool{}
	for i := range list {
		known[list[i].id] = true
		v.judgeOrder(f, &list[i])
	}
	for _, id := range gone {
		if e, ok := f.log[id]; ok {
			known[e.order] = true
			v.Ghosts++
		}
	}
	for id := range f.orders { // one that nobody was told of: a request counted twice
		if !known[id] {
			v.Duplicated++
		}
	}
	for _, n := range f.notices {
		v.Duplicated += n - 1
	}
	for _, applied := range f.applied {
		v.Ghosts += countGhosts(f, applied)
	}
	v.Ghosts += countGhosts(f, f.notices)
	v.OutOfOrder += f.outOfOrder()
}

func countGhosts[V any](f *facts, byEvent map[string]V) (n int) {
	for id := range byEvent {
		if _, ok := f.log[id]; !ok {
			n++
		}
	}
	return n
}

// judgeOrder compares the effects of one order with what was asked for.
func (v *verdict) judgeOrder(f *facts, o *order) {
	events := f.byVersion[o.id]
	created := events[1]
	lost := created.id != o.eventID || !f.appliedByAll(created.id) || f.notices[created.id] == 0
	want := map[string]int64{}
	if !o.cancel {
		for _, l := range o.body.Lines {
			want[l.SKU] += l.Qty
		}
	} else if cancelled := events[2]; !f.appliedByAll(cancelled.id) || f.notices[cancelled.id] == 0 || len(f.reserved[o.id]) > 0 {
		v.Lost++
	}
	for sku, qty := range want {
		switch have := f.reserved[o.id][sku].qty; {
		case have < qty:
			lost = true
		case have > qty:
			v.Duplicated++
		}
	}
	for _, r := range f.reserved[o.id] {
		if _, ok := f.log[r.eventID]; !ok {
			v.Ghosts++
		}
	}
	if lost {
		v.Lost++
	}
}

// appliedByAll reports whether every consumer has applied an event.
func (f *facts) appliedByAll(eventID string) bool {
	for _, name := range serviceConsumers {
		if _, ok := f.applied[name][eventID]; !ok || f.parked[name][eventID] {
			return false
		}
	}
	return true
}

// outOfOrder counts effects that happened before one of an earlier version.
func (f *facts) outOfOrder() (n int) {
	for _, applied := range f.applied {
		for _, e := range f.log {
			at, done := applied[e.id]
			if e.version == 1 || !done {
				continue
			}
			before, ok := applied[f.byVersion[e.order][e.version-1].id]
			if !ok || at < before {
				n++
			}
		}
	}
	return n
}

// streamHoldsAll is a number of orders' events that surely fits into the limits
// of the stream, so that all must be there.
const streamHoldsAll = 1_000_000

// scanner reads a stream; it is the broker.
type scanner interface {
	Scan(ctx context.Context, fn func(seq uint64, m relay.Message) error) error
}

// judgeStream compares the stream with the log: every event once, per order in
// the order of versions, and nothing else.
func (v *verdict) judgeStream(ctx context.Context, f *facts, stream scanner) error {
	seen := map[string]bool{}
	version := map[string]int64{} // the highest so far, by order
	err := stream.Scan(ctx, func(_ uint64, m relay.Message) error {
		e, ok := f.log[m.Record.EventID]
		switch {
		case !ok || e.position != m.Record.Position:
			v.Ghosts++
			return nil
		case seen[e.id]:
			v.Duplicated++
		case e.version < version[e.order]:
			v.OutOfOrder++
		}
		seen[e.id] = true
		version[e.order] = max(version[e.order], e.version)
		return nil
	})
	if errors.Is(err, broker.ErrNoStream) { // nothing was published
		err = nil
	}
	if len(f.log) <= streamHoldsAll {
		v.Lost += len(f.log) - len(seen)
	}
	return err
}

// readFacts reads everything in one snapshot.
func readFacts(ctx context.Context, db *store.DB) (*facts, error) {
	tx, err := db.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	f := &facts{
		log: map[string]loggedEvent{}, byVersion: map[string]map[int64]loggedEvent{}, orders: map[string]bool{},
		applied: map[string]map[string]int64{}, parked: map[string]map[string]bool{},
		notices: map[string]int{}, reserved: map[string]map[string]stock{},
	}
	for _, read := range []struct {
		query string
		row   func(scan func(...any) error) error
	}{
		{`SELECT event_id, position, aggregate_id, aggregate_version FROM outbox`, func(scan func(...any) error) error {
			var e loggedEvent
			err := scan(&e.id, &e.position, &e.order, &e.version)
			f.log[e.id] = e
			put(f.byVersion, e.order, e.version, e)
			return err
		}},
		{`SELECT id FROM orders`, func(scan func(...any) error) error {
			var id string
			err := scan(&id)
			f.orders[id] = true
			return err
		}},
		{`SELECT consumer, event_id, applied_at FROM outlog_inbox`, func(scan func(...any) error) error {
			var consumer, id string
			var at int64
			err := scan(&consumer, &id, &at)
			put(f.applied, consumer, id, at)
			return err
		}},
		{`SELECT consumer, event_id FROM outlog_parked`, func(scan func(...any) error) error {
			var consumer, id string
			err := scan(&consumer, &id)
			put(f.parked, consumer, id, true)
			return err
		}},
		{`SELECT event_id, count(*) FROM notifications GROUP BY event_id`, func(scan func(...any) error) error {
			var id string
			var n int
			err := scan(&id, &n)
			f.notices[id] = n
			return err
		}},
		{`SELECT order_id, sku, qty, event_id FROM reservations`, func(scan func(...any) error) error {
			var order, sku string
			var s stock
			err := scan(&order, &sku, &s.qty, &s.eventID)
			put(f.reserved, order, sku, s)
			return err
		}},
	} {
		if err := eachRow(ctx, tx, read.query, read.row); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func eachRow(ctx context.Context, tx store.Querier, query string, row func(scan func(...any) error) error) error {
	rows, err := tx.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

func put[K1, K2 comparable, V any](m map[K1]map[K2]V, outer K1, inner K2, v V) {
	if m[outer] == nil {
		m[outer] = map[K2]V{}
	}
	m[outer][inner] = v
}
