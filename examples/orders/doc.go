// Package orders is an order service on outlog: what a user's own service
// looks like, and what the binary serves.
//
// # Model
//
// Placing an order writes it, its lines and the event OrderCreated in one
// transaction; cancelling it changes the order and appends OrderCancelled, in
// one transaction. Two consumers do the rest, each event once:
//
//	POST /orders ─► orders, order_lines + OrderCreated ──┬─► inventory:     reservations, inventory.reserved
//	POST …/cancel ─► orders.status      + OrderCancelled ┴─► notifications: notifications
//
//	created (version 1) ──cancel──► cancelled (version 2)
//
// # Invariants, each a check that verify runs (checks.go, TestTamper)
//
//  1. An order has exactly its events, in both directions, and its total is
//     that of its lines.
//  2. Each applied event has exactly one notification, and no other has one.
//  3. Reservations are the lines of the orders whose OrderCreated is applied
//     and whose OrderCancelled is not; inventory.reserved is their sum.
//
// # Requests
//
// A request with an Idempotency-Key that was answered before gets that answer
// again, for ever, also when both come at the same time (TestIdempotencyKey).
// What is wrong with a request is said by field, and nothing is written
// (TestRefused). The order exists when the answer is there; stock and
// notifications follow.
//
// Start reading at place.go, then inventory.go.
package orders
