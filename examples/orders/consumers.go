package orders

import (
	"fmt"

	"outlog/consumer"
)

// Names of the consumers.
const (
	Inventory     = "inventory"
	Notifications = "notifications"
)

// Consumers returns what follows from the orders: the consumers inventory and
// notifications.
func Consumers() []consumer.Options {
	return []consumer.Options{
		{Name: Inventory, Start: consumer.Beginning, Clear: clearInventory, Routes: []consumer.Route{
			consumer.Apply(TypeOrderCreated, reserve),
			consumer.Apply(TypeOrderCancelled, release),
		}},
		{Name: Notifications, Start: consumer.Beginning, Clear: clearNotifications, Routes: []consumer.Route{
			consumer.Apply(TypeOrderCreated, notifyCreated),
			consumer.Apply(TypeOrderCancelled, notifyCancelled),
		}},
	}
}

// checkOrder refuses an event whose payload is about another order than its
// aggregate: order is kept per aggregate, so its effects could overtake others.
func checkOrder[T any](e consumer.Event[T], payloadID string) error {
	if e.AggregateType != AggregateType || e.AggregateID != payloadID {
		return fmt.Errorf("event %s of %s %s has order_id %q in its payload", e.ID, e.AggregateType, e.AggregateID, payloadID)
	}
	return nil
}
