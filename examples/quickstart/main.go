// Quickstart places one order and reserves its stock: the order and its event
// in one transaction, the reservation once per event.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	"outlog/consumer"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// OrderPlaced is the payload of the event of that name.
type OrderPlaced struct {
	SKU string `json:"sku"`
	Qty int    `json:"qty"`
}

func main() {
	if err := run(context.Background(), "quickstart-data", os.Stdout); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, dir string, out io.Writer) error {
	n, err := node.Open(ctx, node.Options{Dir: dir})
	if err != nil {
		return err
	}
	defer n.Close() // what is not yet on the stream, the next start publishes

	// Your tables are in the same file. For real ones see node.Options.Migrations.
	err = n.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `
			CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, sku TEXT, qty INTEGER);
			CREATE TABLE IF NOT EXISTS reserved (sku TEXT PRIMARY KEY, qty INTEGER)`)
		return err
	})
	if err != nil {
		return err
	}
	err = n.Handle(consumer.Options{Name: "stock", Start: consumer.Beginning, Routes: []consumer.Route{
		consumer.Apply("OrderPlaced", reserve),
	}})
	if err != nil {
		return err
	}
	go func() {
		if err := n.Run(ctx); err != nil { // only what no waiting can mend
			log.Fatal(err)
		}
	}()

	// The order and its event: both are stored, or neither.
	id := n.Store().NewID()
	var placed []outbox.Appended
	err = n.Update(ctx, func(tx *store.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES (?, 'tea', 2)`, id); err != nil {
			return err
		}
		placed, err = n.Append(ctx, tx, outbox.Event{AggregateType: "order", AggregateID: id,
			Type: "OrderPlaced", Data: OrderPlaced{SKU: "tea", Qty: 2}})
		return err
	})
	if err != nil {
		return err
	}

	// Nobody has to wait for a consumer. This program does, to show what it did.
	if err := n.WaitApplied(ctx, "stock", placed[0].Position); err != nil {
		return err
	}
	var qty int
	err = n.Store().Reader().QueryRowContext(ctx, `SELECT qty FROM reserved WHERE sku = 'tea'`).Scan(&qty)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "event %d is applied, %d tea reserved\n", placed[0].Position, qty)
	return err
}

// reserve runs in the transaction that records the event as applied: both
// happen, once, or the event is tried again.
func reserve(ctx context.Context, tx *store.Tx, e consumer.Event[OrderPlaced]) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO reserved VALUES (?, ?)
		ON CONFLICT (sku) DO UPDATE SET qty = qty + excluded.qty`, e.Data.SKU, e.Data.Qty)
	return err
}
