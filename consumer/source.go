package consumer

import (
	"context"

	"outlog/outbox"
)

// Delivery is one message that the stream delivered to a durable consumer.
type Delivery struct {
	// LogID is the log the message says it comes from; "" for a foreign message.
	LogID string
	// Seq is the message's stream sequence.
	Seq uint64
	// Record holds what the headers say; Payload is nil when the source
	// delivers headers only.
	Record outbox.Record
	// Ack tells the stream that this delivery and all before it on the same
	// durable are finished with. It does not wait for the broker.
	Ack func() error
}

// Source is a durable consumer on the stream.
type Source interface {
	// Fetch blocks until there is at least one delivery, and returns up to max
	// of those that are there, in stream order. It returns ctx's error when
	// ctx ends, and any other error when the broker is down; the caller backs
	// off and calls again.
	Fetch(ctx context.Context, max int) ([]Delivery, error)
}
