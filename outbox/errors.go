package outbox

import (
	"errors"
	"fmt"
)

var (
	// ErrInvalidEvent is wrapped by every *InvalidEventError.
	ErrInvalidEvent = errors.New("invalid event")
	// ErrVersionConflict is returned when Event.Version is not the aggregate's
	// next version; the caller should read the aggregate again and decide anew.
	ErrVersionConflict = errors.New("aggregate has another version")
	// ErrEventConflict is returned when the log holds another event under the
	// same id; the caller has a bug or reuses ids.
	ErrEventConflict = errors.New("event id is taken by another event")
	// ErrEventTooOld is returned for a supplied id older than the oldest event
	// the log remembers: it can no longer tell whether it has seen it.
	ErrEventTooOld = errors.New("event id is older than the log remembers")
	// ErrNotFound is returned by reads of one event or aggregate.
	ErrNotFound = errors.New("no such event")
)

// InvalidEventError says which field of an Event was refused and why. The
// event was not appended; the caller's transaction goes on.
type InvalidEventError struct {
	Field  string // of Event, as written in Go
	Value  string // shortened
	Reason string // with the limit, if there is one
}

func (e *InvalidEventError) Error() string {
	return fmt.Sprintf("%v: %s %q %s", ErrInvalidEvent, e.Field, e.Value, e.Reason)
}

func (e *InvalidEventError) Unwrap() error { return ErrInvalidEvent }

func refuse(field, value, format string, args ...any) error {
	if len(value) > 64 {
		value = value[:64] + "…"
	}
	return &InvalidEventError{Field: field, Value: value, Reason: fmt.Sprintf(format, args...)}
}
