package consumer

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"outlog/outbox"
	"outlog/store"
)

// Event is an event with its payload decoded to T.
type Event[T any] struct {
	ID               string // ULID
	Position         int64  // in the log
	AggregateType    string
	AggregateID      string
	AggregateVersion int64 // from 1
	Type             string
	SchemaVersion    int
	Headers          map[string]string
	CreatedAt        time.Time // UTC
	Attempt          int       // from 1
	Data             T
}

// Route says what a consumer does with events of one type.
type Route struct {
	eventType string
	// One of the two is set.
	apply func(ctx context.Context, tx *store.Tx, r *outbox.Record, attempt int) error
	do    func(ctx context.Context, r *outbox.Record, attempt int) error
}

// Type is the event type the route is for.
func (r Route) Type() string { return r.eventType }

// Apply routes events of a type to a handler whose effect is in the database.
// The handler runs in the transaction that also records the event as applied:
// both happen or neither, so the effect happens once. The handler must keep to
// tx, and must not wait for anything outside it: all writers wait meanwhile.
//
// An error undoes what the handler did and parks the event; later events of
// the same aggregate wait behind it, other aggregates go on; see Permanent,
// RetryAfter and Outage. The payload is decoded as JSON; one that does not
// decode is dead at once. Events that the handler appends get ids derived from
// e, so that applying e again appends nothing new.
func Apply[T any](eventType string, handler func(ctx context.Context, tx *store.Tx, e Event[T]) error) Route {
	return Route{eventType: eventType, apply: func(ctx context.Context, tx *store.Tx, r *outbox.Record, attempt int) error {
		e, err := decode[T](r, attempt)
		if err != nil {
			return Permanent(err)
		}
		return handler(ctx, tx, e)
	}}
}

func decode[T any](r *outbox.Record, attempt int) (Event[T], error) {
	e := Event[T]{ID: r.EventID, Position: r.Position, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		AggregateVersion: r.AggregateVersion, Type: r.Type, SchemaVersion: r.SchemaVersion, CreatedAt: r.CreatedAt, Attempt: attempt}
	var err error
	if e.Headers, err = r.Headers(); err != nil {
		return e, err
	}
	if raw, ok := any(&e.Data).(*[]byte); ok { // bytes are taken as they are
		*raw = bytes.Clone(r.Payload) // others read the record too
		return e, nil
	}
	if err := json.Unmarshal(r.Payload, &e.Data); err != nil {
		return e, fmt.Errorf("decode payload of %s %s: %w", r.Type, r.EventID, err)
	}
	return e, nil
}
