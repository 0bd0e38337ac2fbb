package outbox

import (
	"encoding/json"
	"fmt"
	"time"
)

// Event is what an application appends: an immutable fact about one aggregate.
type Event struct {
	// ID is the event's ULID, 26 characters. Empty: a new one is generated.
	// A supplied id makes the append idempotent: the same id with the same
	// content again returns the first position.
	ID string
	// AggregateType and AggregateID name the entity the event is about, for
	// example "order" and the order's id. Order is kept per aggregate.
	AggregateType string
	AggregateID   string
	// Version is the aggregate's version after this event, counted from 1.
	// 0: the next one. Any other value must be the next one, or Append returns
	// ErrVersionConflict.
	Version int64
	// Type is the event type in the past tense, for example "OrderCreated".
	Type string
	// SchemaVersion is the version of the payload's schema, from 1. 0: 1.
	SchemaVersion int
	// ContentType is the payload's media type. Empty: "application/json".
	ContentType string
	// Payload is the event's body, stored byte for byte.
	Payload []byte
	// Data is marshalled to JSON when Payload is nil.
	Data any
	// Headers are carried beside the payload (correlation_id, causation_id,
	// traceparent, your own).
	Headers map[string]string
}

// Appended says where Append put an event.
type Appended struct {
	ID       string // the event's ULID
	Position int64  // its place in the log, from 1; gaps are normal
	Version  int64  // the aggregate's version after it, from 1
}

// Record is an event as the log holds it.
type Record struct {
	Position         int64 // place in the log
	EventID          string
	AggregateType    string
	AggregateID      string
	AggregateVersion int64
	Type             string
	SchemaVersion    int
	ContentType      string
	Payload          []byte
	// RawHeaders is the headers column as stored: a JSON object of strings. It
	// is decoded on demand, so that a row another program damaged harms only
	// those who read its headers.
	RawHeaders string
	CreatedAt  time.Time // UTC, microseconds
	// Previous is the position of the aggregate's event before this one, 0 for
	// the first. It replaces an index on the aggregate's random id.
	Previous int64
}

// Headers decodes RawHeaders. It returns an error when the column does not
// hold a JSON object of strings.
func (r *Record) Headers() (map[string]string, error) {
	if r.RawHeaders == "" || r.RawHeaders == "{}" {
		return nil, nil
	}
	var h map[string]string
	if err := json.Unmarshal([]byte(r.RawHeaders), &h); err != nil {
		return nil, fmt.Errorf("headers of event %s at position %d: %w", r.EventID, r.Position, err)
	}
	return h, nil
}

// Aggregate is the key that order is kept by.
type Aggregate struct{ Type, ID string }

// Aggregate returns the record's aggregate.
func (r *Record) Aggregate() Aggregate { return Aggregate{r.AggregateType, r.AggregateID} }
