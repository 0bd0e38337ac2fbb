package admin

import (
	"errors"
	"fmt"
)

var (
	// ErrNotFound is returned for an event that was never parked; the caller
	// should look at the list of dead letters.
	ErrNotFound = errors.New("no such dead letter")
	// ErrSelector is returned for a selector that does not say what it means;
	// the caller should give exactly one of an event, a fingerprint, a consumer
	// and all.
	ErrSelector = errors.New("select one event, one fingerprint, one consumer, or all")
	// ErrNoReason is returned for a discard without a reason, or with one that
	// is too long.
	ErrNoReason = fmt.Errorf("a reason of 1 to %d bytes is required", MaxReasonBytes)
	// ErrInUse is returned for the removal of a consumer that its owner runs;
	// the caller should stop that program first, or take the consumer out of it.
	ErrInUse = errors.New("consumer is in use")
)
