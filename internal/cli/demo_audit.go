package cli

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"outlog/examples/orders"
	"outlog/internal/admin"
	"outlog/node"
	"outlog/relay"
	"outlog/store"
)

// demoConsumers are the consumers of the order service.
var demoConsumers = []string{orders.Inventory, orders.Notifications}

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
		if behind == 0 && len(s.Consumers) == len(demoConsumers) {
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

// demoEvent is an event of the log as the audit needs it.
type demoEvent struct {
	id       string
	position int64
	order    string
	version  int64
}

// demoFacts is what the files say after the service has stopped.
type demoFacts struct {
	log       map[string]demoEvent            // by event id
	byVersion map[string]map[int64]demoEvent  // by order id and version
	orders    map[string]bool                 // by order id
	applied   map[string]map[string]int64     // by consumer and event id: when
	parked    map[string]map[string]bool      // by consumer and event id
	notices   map[string]int                  // notifications by event id
	reserved  map[string]map[string]demoStock // by order id and SKU
}

// demoStock is a reservation.
type demoStock struct {
	qty     int64
	eventID string
}

// audit judges the directory by what the clients were told.
func (d *demoDocument) audit(ctx context.Context, dir dataDir, list []demoOrder) error {
	db, err := dir.openReader(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	f, err := readDemoFacts(ctx, db)
	if err != nil {
		return fmt.Errorf("read what the service left: %w", err)
	}
	d.judge(f, list)
	if d.checks, err = verifyDatabase(ctx, dir); err != nil {
		return err
	}
	err = withStream(ctx, dir, func(n *node.Node) error {
		stream, err := streamResult(ctx, n)
		if err != nil {
			return err
		}
		if d.checks = append(d.checks, stream); !stream.OK {
			return nil
		}
		return n.Broker().Scan(ctx, func(_ uint64, m relay.Message) error {
			if e, ok := f.log[m.Record.EventID]; !ok || e.position != m.Record.Position {
				d.Ghosts++
			}
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("read the stream: %w", err)
	}
	d.OK = d.Lost+d.Duplicated+d.OutOfOrder+d.Ghosts == 0 && d.cleanStop == nil && newVerifyDocument(d.checks).OK
	return nil
}

// judge counts broken promises.
func (d *demoDocument) judge(f *demoFacts, list []demoOrder) {
	d.Events = len(f.log)
	d.Consumers = map[string]demoApplied{}
	for _, name := range demoConsumers {
		d.Consumers[name] = demoApplied{len(f.applied[name])}
	}
	known := map[string]bool{}
	for i := range list {
		o := &list[i]
		known[o.id] = true
		d.judgeOrder(f, o)
	}
	for id := range f.orders { // one that nobody was told of: a request counted twice
		if !known[id] {
			d.Duplicated++
		}
	}
	for _, n := range f.notices {
		d.Duplicated += n - 1
	}
	for _, applied := range f.applied {
		d.Ghosts += countGhosts(f, applied)
	}
	d.Ghosts += countGhosts(f, f.notices)
	d.OutOfOrder = f.outOfOrder()
}

func countGhosts[V any](f *demoFacts, byEvent map[string]V) (n int) {
	for id := range byEvent {
		if _, ok := f.log[id]; !ok {
			n++
		}
	}
	return n
}

// judgeOrder compares the effects of one order with what was asked for.
func (d *demoDocument) judgeOrder(f *demoFacts, o *demoOrder) {
	events := f.byVersion[o.id]
	created := events[1]
	lost := created.id != o.eventID || !f.appliedByAll(created.id) || f.notices[created.id] == 0
	want := map[string]int64{}
	if !o.cancel {
		for _, l := range o.body.Lines {
			want[l.SKU] += l.Qty
		}
	} else if cancelled := events[2]; !f.appliedByAll(cancelled.id) || f.notices[cancelled.id] == 0 || len(f.reserved[o.id]) > 0 {
		d.Lost++
	}
	for sku, qty := range want {
		switch have := f.reserved[o.id][sku].qty; {
		case have < qty:
			lost = true
		case have > qty:
			d.Duplicated++
		}
	}
	for _, r := range f.reserved[o.id] {
		if _, ok := f.log[r.eventID]; !ok {
			d.Ghosts++
		}
	}
	if lost {
		d.Lost++
	}
}

// appliedByAll reports whether every consumer has applied an event.
func (f *demoFacts) appliedByAll(eventID string) bool {
	for _, name := range demoConsumers {
		if _, ok := f.applied[name][eventID]; !ok || f.parked[name][eventID] {
			return false
		}
	}
	return true
}

// outOfOrder counts effects that happened before one of an earlier version.
func (f *demoFacts) outOfOrder() (n int) {
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

// readDemoFacts reads everything in one snapshot.
func readDemoFacts(ctx context.Context, db *store.DB) (*demoFacts, error) {
	tx, err := db.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	f := &demoFacts{
		log: map[string]demoEvent{}, byVersion: map[string]map[int64]demoEvent{}, orders: map[string]bool{},
		applied: map[string]map[string]int64{}, parked: map[string]map[string]bool{},
		notices: map[string]int{}, reserved: map[string]map[string]demoStock{},
	}
	for _, read := range []struct {
		query string
		row   func(scan func(...any) error) error
	}{
		{`SELECT event_id, position, aggregate_id, aggregate_version FROM outbox`, func(scan func(...any) error) error {
			var e demoEvent
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
			var s demoStock
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

func eachRow(ctx context.Context, tx *sql.Tx, query string, row func(scan func(...any) error) error) error {
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
