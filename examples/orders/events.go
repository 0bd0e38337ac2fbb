package orders

import "outlog/outbox"

// AggregateType is the aggregate type of orders; the aggregate id is the
// order's id.
const AggregateType = "order"

// Event types.
const (
	TypeOrderCreated   = "OrderCreated"
	TypeOrderCancelled = "OrderCancelled"
)

// Line is one line of an order.
type Line struct {
	SKU            string `json:"sku"`
	Qty            int64  `json:"qty"`              // from 1
	UnitPriceCents int64  `json:"unit_price_cents"` // from 0
}

// OrderCreated is the payload of the event of that name.
type OrderCreated struct {
	OrderID    string `json:"order_id"`
	CustomerID string `json:"customer_id"`
	Lines      []Line `json:"lines"`
	TotalCents int64  `json:"total_cents"`
}

// OrderCancelled is the payload of the event of that name.
type OrderCancelled struct {
	OrderID    string `json:"order_id"`
	CustomerID string `json:"customer_id"`
}

func aggregate(orderID string) outbox.Aggregate {
	return outbox.Aggregate{Type: AggregateType, ID: orderID}
}
