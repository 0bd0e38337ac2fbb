package orders

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// scene is a database with orders in every state.
type scene struct {
	*rig
	kept, cancelled, parked, fresh Receipt
	parkedCancel                   Receipt
}

// newScene has an order that is applied; one that is cancelled; one whose
// cancellation is parked at both consumers; and one that nobody has seen.
func newScene(t *testing.T) *scene {
	s := &scene{rig: openDamaged(t)}
	s.kept, s.cancelled, s.parked = s.place(book), s.place(book), s.place(book)
	s.cancel(s.cancelled.OrderID)
	s.parkedCancel = s.cancel(s.parked.OrderID)
	for _, name := range []string{Inventory, Notifications} {
		s.consume(name, 100, s.parkedCancel.EventID)
	}
	s.fresh = s.place(Order{CustomerID: "bob", Lines: []Line{{"pen", 1, 100}}})
	require.Empty(t, s.faults())
	return s
}

// prune removes the log up to a position, as outlog does.
func (s *scene) prune(through int64) {
	s.exec(`UPDATE outlog_meta SET pruned_through = ?`, through)
	s.exec(`DELETE FROM outbox WHERE position <= ?`, through)
	s.exec(`DELETE FROM outlog_inbox WHERE position <= ?`, through)
	require.Empty(s.t, s.faults())
}

// TestTamper changes one thing at a time and names the checks that must see it.
func TestTamper(t *testing.T) {
	const orders, notified, stock = "orders and their events", "one notification per event", "reserved stock"
	for _, c := range []struct {
		name   string
		tamper func(s *scene)
		seen   []string
	}{
		{"reservation doubled", func(s *scene) {
			s.exec(`UPDATE reservations SET qty = 2 * qty WHERE order_id = ? AND sku = 'pen'`, s.kept.OrderID)
		}, []string{stock}},
		{"reservation and stock doubled", func(s *scene) {
			s.exec(`UPDATE reservations SET qty = qty + 5 WHERE order_id = ? AND sku = 'pen'`, s.kept.OrderID)
			s.exec(`UPDATE inventory SET reserved = reserved + 5 WHERE sku = 'pen'`)
		}, []string{stock}},
		{"reservation removed", func(s *scene) {
			s.exec(`DELETE FROM reservations WHERE order_id = ? AND sku = 'ink'`, s.kept.OrderID)
		}, []string{stock}},
		{"reservation and stock removed, cancellation parked", func(s *scene) {
			s.exec(`DELETE FROM reservations WHERE order_id = ? AND sku = 'ink'`, s.parked.OrderID)
			s.exec(`UPDATE inventory SET reserved = reserved - 1 WHERE sku = 'ink'`)
		}, []string{stock}},
		{"reservation of a SKU not ordered", func(s *scene) {
			s.exec(`INSERT INTO reservations VALUES (?, 'gum', 1, ?)`, s.kept.OrderID, s.kept.EventID)
			s.exec(`INSERT INTO inventory VALUES ('gum', 0, 1)`)
		}, []string{stock}},
		{"reservation of a cancelled order", func(s *scene) {
			s.exec(`INSERT INTO reservations VALUES (?, 'pen', 5, ?)`, s.cancelled.OrderID, s.cancelled.EventID)
			s.exec(`UPDATE inventory SET reserved = reserved + 5 WHERE sku = 'pen'`)
		}, []string{stock}},
		{"reservation before its event is applied", func(s *scene) {
			s.exec(`INSERT INTO reservations VALUES (?, 'pen', 1, ?)`, s.fresh.OrderID, s.fresh.EventID)
			s.exec(`UPDATE inventory SET reserved = reserved + 1 WHERE sku = 'pen'`)
		}, []string{stock}},
		{"reservation by another event", func(s *scene) {
			s.exec(`UPDATE reservations SET event_id = ? WHERE order_id = ?`, s.fresh.EventID, s.kept.OrderID)
		}, []string{stock}},
		{"reserved stock changed", func(s *scene) { s.exec(`UPDATE inventory SET reserved = reserved + 1 WHERE sku = 'ink'`) }, []string{stock}},
		{"stock row removed", func(s *scene) { s.exec(`DELETE FROM inventory WHERE sku = 'ink'`) }, []string{stock}},
		{"stock of nothing reserved", func(s *scene) { s.exec(`INSERT INTO inventory VALUES ('gum', 0, 1)`) }, []string{stock}},

		{"notification removed", func(s *scene) { s.exec(`DELETE FROM notifications WHERE event_id = ?`, s.kept.EventID) }, []string{notified}},
		{"notification of another kind", func(s *scene) {
			s.exec(`UPDATE notifications SET kind = 'order_cancelled' WHERE event_id = ?`, s.kept.EventID)
		}, []string{notified}},
		{"notification of another order", func(s *scene) {
			s.exec(`UPDATE notifications SET order_id = ? WHERE event_id = ?`, s.fresh.OrderID, s.kept.EventID)
		}, []string{notified}},
		{"notification without an event", func(s *scene) {
			s.exec(`INSERT INTO notifications VALUES ('x', ?, 'order_created', 'ada', '', 1)`, s.kept.OrderID)
		}, []string{notified}},
		{"notification before its event is applied", func(s *scene) {
			s.exec(`INSERT INTO notifications VALUES (?, ?, 'order_created', 'bob', '', 1)`, s.fresh.EventID, s.fresh.OrderID)
		}, []string{notified}},
		{"notification of a parked event", func(s *scene) {
			s.exec(`INSERT INTO notifications VALUES (?, ?, 'order_cancelled', 'ada', '', 1)`, s.parkedCancel.EventID, s.parked.OrderID)
		}, []string{notified}},

		{"event removed", func(s *scene) {
			s.exec(`DROP TRIGGER outbox_no_delete`)
			s.exec(`DELETE FROM outbox WHERE position = ?`, s.kept.Position)
		}, []string{orders, notified, stock}},
		{"first event of two removed", func(s *scene) {
			s.exec(`DROP TRIGGER outbox_no_delete`)
			s.exec(`DELETE FROM outbox WHERE position = ?`, s.cancelled.Position)
		}, []string{orders, notified}},
		{"event not applied yet removed", func(s *scene) {
			s.exec(`DROP TRIGGER outbox_no_delete`)
			s.exec(`DELETE FROM outbox WHERE position = ?`, s.fresh.Position)
		}, []string{orders, notified, stock}},
		{"event without an order", func(s *scene) {
			s.exec(`INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload) VALUES ('order', 'x', 'OrderCreated', '{}')`)
		}, []string{orders, notified}},
		{"order removed", func(s *scene) { s.exec(`DELETE FROM orders WHERE id = ?`, s.kept.OrderID) }, []string{orders, notified, stock}},
		{"order and lines removed", func(s *scene) {
			s.exec(`DELETE FROM order_lines WHERE order_id = ?`, s.fresh.OrderID)
			s.exec(`DELETE FROM orders WHERE id = ?`, s.fresh.OrderID)
		}, []string{orders, notified}},
		{"order without an event", func(s *scene) {
			s.exec(`INSERT INTO orders VALUES ('01ARZ3NDEKTSV4RRFFQ69G5FAV', 'ada', 'created', 1, 0, 1)`)
		}, []string{orders, notified}},
		{"order cancelled by hand", func(s *scene) { s.exec(`UPDATE orders SET status = 'cancelled' WHERE id = ?`, s.kept.OrderID) }, []string{orders, stock}},
		{"order cancelled by hand, version too", func(s *scene) {
			s.exec(`UPDATE orders SET status = 'cancelled', version = 2 WHERE id = ?`, s.fresh.OrderID)
		}, []string{orders, notified}},
		{"order revived by hand", func(s *scene) { s.exec(`UPDATE orders SET status = 'created' WHERE id = ?`, s.cancelled.OrderID) }, []string{orders, stock}},
		{"total changed", func(s *scene) { s.exec(`UPDATE orders SET total_cents = 1 WHERE id = ?`, s.fresh.OrderID) }, []string{orders}},
		{"line changed", func(s *scene) {
			s.exec(`UPDATE order_lines SET qty = 9 WHERE order_id = ? AND line_no = 1`, s.kept.OrderID)
		}, []string{orders, stock}},
		{"lines without an order", func(s *scene) { s.exec(`INSERT INTO order_lines VALUES ('x', 1, 'pen', 1, 1)`) }, []string{orders}},

		{"pruned: nothing wrong", func(s *scene) { s.prune(s.parked.Position) }, nil},
		{"pruned: order removed", func(s *scene) {
			s.prune(s.parked.Position)
			s.exec(`DELETE FROM orders WHERE id = ?`, s.kept.OrderID)
		}, []string{orders, notified, stock}},
		{"pruned: order cancelled by hand", func(s *scene) {
			s.prune(s.parked.Position)
			s.exec(`UPDATE orders SET status = 'cancelled', version = 2 WHERE id = ?`, s.kept.OrderID)
		}, []string{orders, notified, stock}},
		{"pruned: notification removed", func(s *scene) {
			s.prune(s.parked.Position)
			s.exec(`DELETE FROM notifications WHERE event_id = ?`, s.kept.EventID)
		}, []string{notified}},
		{"pruned: notification replaced by a second one", func(s *scene) {
			s.prune(s.parked.Position)
			s.exec(`UPDATE notifications SET order_id = ? WHERE event_id = ?`, s.cancelled.OrderID, s.kept.EventID)
		}, []string{notified}},
		{"pruned: notification of an order with no such event", func(s *scene) {
			s.prune(s.parked.Position)
			s.exec(`UPDATE notifications SET kind = 'order_cancelled' WHERE event_id = ?`, s.kept.EventID)
		}, []string{notified}},
		{"pruned: reservation doubled", func(s *scene) {
			s.prune(s.parked.Position)
			s.exec(`UPDATE reservations SET qty = 2 * qty WHERE order_id = ?`, s.kept.OrderID)
		}, []string{stock}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScene(t)
			c.tamper(s)
			faults := s.faults()
			for _, check := range []string{orders, notified, stock} {
				if !slices.Contains(c.seen, check) {
					require.NotContains(t, faults, check)
					continue
				}
				require.Contains(t, faults, check)
				t.Log(faults[check])
			}
		})
	}
}

// TestChecksBesideConsumers verifies after every single event that a consumer
// applies or parks, and after every write: the checks know at each moment what
// must be there.
func TestChecksBesideConsumers(t *testing.T) {
	r := openDamaged(t)
	step := func() { t.Helper(); require.Empty(t, r.faults()) }
	step() // no order, no consumer
	var placed []Receipt
	for range 4 {
		placed = append(placed, r.place(book))
		step() // no consumer
	}
	r.cancel(placed[1].OrderID)
	r.cancel(placed[2].OrderID)
	for _, name := range []string{Inventory, Notifications} {
		for range 7 {
			r.consume(name, 1, placed[2].EventID) // its cancellation is parked behind it
			step()
		}
	}
	r.cancel(placed[3].OrderID)
	step()
	r.exec(`DELETE FROM outlog_inbox`) // pruned: the cursor is past them
	step()
}

// TestChecksFromAPrunedLog has consumers begin when part of the log is gone:
// what was before is none of their business.
func TestChecksFromAPrunedLog(t *testing.T) {
	s := &scene{rig: openDamaged(t)}
	old, both := s.place(book), s.place(book)
	s.prune(both.Position)
	s.cancel(both.OrderID)
	kept := s.place(book)
	for _, name := range []string{Inventory, Notifications} {
		s.exec(`INSERT INTO outlog_consumers (name, position, start_position, types, created_at, updated_at) VALUES (?, ?2, ?2, '[]', 1, 1)`, name, both.Position)
		require.Empty(t, s.faults())
		s.consume(name, 100)
		require.Empty(t, s.faults())
	}
	require.Equal(t, int64(2), s.ask(`SELECT count(*) FROM reservations WHERE order_id = ?`, kept.OrderID))
	require.Zero(t, s.ask(`SELECT count(*) FROM reservations WHERE order_id = ?`, old.OrderID))
}
