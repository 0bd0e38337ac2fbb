package orders

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
	"unicode"

	"outlog/outbox"
	"outlog/store"
)

// Limits of an order. There is none on the number of lines but the size of the
// event, outbox.MaxEventBytes.
const (
	MaxNameBytes = 128           // customer_id, sku
	MaxQty       = 1_000_000_000 // of a line: keeps every sum over orders far from overflowing
)

// Order is what a customer asks for.
type Order struct {
	CustomerID string `json:"customer_id"`
	Lines      []Line `json:"lines"`
}

// Place writes the order and its OrderCreated in one transaction. With a key,
// the same order again returns the first receipt and writes nothing.
//
// Errors: *InputError, ErrKeyReused, or the store's. Cost: four statements,
// two more with a key.
func (s *Service) Place(ctx context.Context, key string, o Order) (Receipt, error) {
	total, err := o.check()
	if err != nil {
		return Receipt{}, err
	}
	id := s.n.Store().NewID()
	created := OrderCreated{OrderID: id, CustomerID: o.CustomerID, Lines: o.Lines, TotalCents: total}
	payload, err := json.Marshal(created)
	if err != nil {
		return Receipt{}, err
	}
	const headers = "{}"
	if len(payload)+len(headers) > outbox.MaxEventBytes {
		return Receipt{}, &InputError{http.StatusRequestEntityTooLarge, "lines",
			fmt.Sprintf("make an event of %d bytes, the limit is %d: split the order", len(payload), outbox.MaxEventBytes)}
	}
	return s.once(ctx, key, o.request(), func(tx *store.Tx) (Receipt, error) {
		return s.insert(ctx, tx, created, payload)
	})
}

// insert writes one order.
func (s *Service) insert(ctx context.Context, tx *store.Tx, o OrderCreated, payload []byte) (Receipt, error) {
	_, err := tx.ExecContext(ctx, `INSERT INTO orders (id, customer_id, status, version, total_cents, created_at)
		VALUES (?, ?, 'created', 1, ?, ?)`, o.OrderID, o.CustomerID, o.TotalCents, tx.Now().UnixMicro())
	if err != nil {
		return Receipt{}, fmt.Errorf("insert order: %w", err)
	}
	if err := insertLines(ctx, tx, o, payload); err != nil {
		return Receipt{}, fmt.Errorf("insert order lines: %w", err)
	}
	return s.append(ctx, tx, outbox.Event{AggregateType: AggregateType, AggregateID: o.OrderID, Version: 1,
		Type: TypeOrderCreated, Payload: payload})
}

// insertLines writes any number of lines with one statement: they come out of
// the event's payload. A single line goes without the JSON, in a third of the
// time.
func insertLines(ctx context.Context, tx *store.Tx, o OrderCreated, payload []byte) (err error) {
	if len(o.Lines) == 1 {
		l := o.Lines[0]
		_, err = tx.ExecContext(ctx, `INSERT INTO order_lines (order_id, line_no, sku, qty, unit_price_cents) VALUES (?, 1, ?, ?, ?)`,
			o.OrderID, l.SKU, l.Qty, l.UnitPriceCents)
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO order_lines (order_id, line_no, sku, qty, unit_price_cents)
		SELECT ?1, key + 1, value ->> 'sku', value ->> 'qty', value ->> 'unit_price_cents' FROM json_each(?2, '$.lines')`,
		o.OrderID, string(payload))
	return err
}

// append puts one event of an order into the log.
func (s *Service) append(ctx context.Context, tx *store.Tx, e outbox.Event) (Receipt, error) {
	a, err := s.n.Append(ctx, tx, e)
	if err != nil {
		return Receipt{}, err
	}
	return Receipt{OrderID: e.AggregateID, EventID: a[0].ID, Position: a[0].Position}, nil
}

// check returns the order's total, or what is wrong with it.
func (o Order) check() (total int64, err error) {
	if err := checkName("customer_id", o.CustomerID); err != nil {
		return 0, err
	}
	if len(o.Lines) == 0 {
		return 0, refuse("lines", "must have at least one line")
	}
	for i, l := range o.Lines {
		field := func(name string) string { return fmt.Sprintf("lines[%d].%s", i, name) }
		if err := checkName(field("sku"), l.SKU); err != nil {
			return 0, err
		}
		switch {
		case l.Qty < 1:
			return 0, refuse(field("qty"), "must be at least 1")
		case l.Qty > MaxQty:
			return 0, refuse(field("qty"), fmt.Sprintf("must be at most %d", MaxQty))
		case l.UnitPriceCents < 0:
			return 0, refuse(field("unit_price_cents"), "must not be negative")
		case l.UnitPriceCents > (math.MaxInt64-total)/l.Qty:
			return 0, refuse(field("unit_price_cents"), fmt.Sprintf("makes the total exceed %d cents", math.MaxInt64))
		}
		total += l.Qty * l.UnitPriceCents
	}
	return total, nil
}

func checkName(field, value string) error {
	switch {
	case strings.TrimSpace(value) == "":
		return refuse(field, "must not be empty")
	case len(value) > MaxNameBytes:
		return refuse(field, fmt.Sprintf("has %d bytes, the limit is %d", len(value), MaxNameBytes))
	case strings.ContainsFunc(value, func(r rune) bool { return unicode.IsControl(r) || r == unicode.ReplacementChar }):
		return refuse(field, "has a control character, or one that is not valid UTF-8")
	}
	return nil
}
