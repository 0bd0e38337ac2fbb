package orders

import (
	"errors"
	"net/http"
)

var (
	// ErrNotFound is returned for an order that does not exist.
	ErrNotFound = errors.New("no such order")
	// ErrCancelled is returned when the order is cancelled already.
	ErrCancelled = errors.New("the order is cancelled already")
	// ErrKeyReused is returned when an idempotency key comes with another
	// request than the first time; the caller should use a new key.
	ErrKeyReused = errors.New("the idempotency key was used for another request")
)

// InputError says what is wrong with a request. Nothing was written.
type InputError struct {
	Status int    // of an HTTP answer: 400, 413 or 415
	Field  string // "lines[0].qty", a header's name, or "body"
	Reason string // reads on from Field
}

func (e *InputError) Error() string { return e.Field + " " + e.Reason }

func refuse(field, reason string) error {
	return &InputError{Status: http.StatusBadRequest, Field: field, Reason: reason}
}
