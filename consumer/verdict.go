package consumer

import (
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"outlog/internal/attempt"
	"outlog/store"
)

// What a handler can say beside "it failed": it wraps its error.

type permanentError struct{ error }

func (e *permanentError) Unwrap() error { return e.error }

// Permanent marks err as one that no further attempt can mend: the event is
// dead at once.
func Permanent(err error) error { return &permanentError{err} }

type retryAfterError struct {
	error
	delay time.Duration
}

func (e *retryAfterError) Unwrap() error { return e.error }

// RetryAfter asks for the next attempt after d, instead of the backoff. It
// counts as an attempt.
func RetryAfter(d time.Duration, err error) error { return &retryAfterError{err, max(d, 0)} }

type outageError struct{ error }

func (e *outageError) Unwrap() error { return e.error }

// Outage says that something the handler needs is down, which is not the
// event's fault: no attempt is counted, and the consumer pauses, longer each
// time, until the handler succeeds again.
func Outage(err error) error { return &outageError{err} }

// failure is a handler that did not succeed with an event. It keeps what the
// handler's error says and not the error: an error is foreign code, which is
// asked once, where its panic is caught.
type failure struct {
	eventID string
	text    string
	stack   string // of a panic or Goexit
	kind    kind
	delay   time.Duration // of kindRetryAfter
}

type kind int

const (
	kindFailed kind = iota
	kindPermanent
	kindRetryAfter
	kindOutage
	kindTrouble // of the database: it says nothing about the event
)

func (f *failure) Error() string { return f.text }

// counts reports whether f is an attempt that failed.
func (f *failure) counts() bool { return f.kind != kindOutage && f.kind != kindTrouble }

func newFailure(eventID string, err error, stack string) (f *failure) {
	f = &failure{eventID: eventID, stack: stack, text: fmt.Sprint(err)} // Sprint survives an Error that panics
	defer func() {
		if p := recover(); p != nil {
			f.kind, f.stack = kindFailed, string(debug.Stack())
		}
	}()
	switch {
	case store.IsUnavailable(err):
		f.kind = kindTrouble
	case is[*outageError](err):
		f.kind = kindOutage
	case is[*permanentError](err):
		f.kind = kindPermanent
	default:
		if r, ok := errors.AsType[*retryAfterError](err); ok {
			f.kind, f.delay = kindRetryAfter, min(r.delay, maxDelay)
		}
	}
	return f
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// errGoexit is the failure of a handler that ended its goroutine.
var errGoexit = errors.New("handler ended its goroutine (runtime.Goexit)")

// panicked is the failure of a handler that panicked.
func panicked(p any) error {
	if err, ok := p.(error); ok {
		return fmt.Errorf("handler panicked: %w", err)
	}
	return fmt.Errorf("handler panicked: %v", p)
}

// verdict is what a failed attempt leads to.
type verdict struct {
	state string // retrying or dead
	delay time.Duration
}

// judge decides after the n-th failed attempt.
func (o *Options) judge(f *failure, n int) verdict {
	switch {
	case f.kind == kindPermanent || n >= o.MaxAttempts:
		return verdict{state: "dead"}
	case f.kind == kindRetryAfter:
		return verdict{state: "retrying", delay: f.delay}
	}
	return verdict{state: "retrying", delay: attempt.Jitter(o.BackoffMin, o.BackoffMax, n)}
}

// maxDelay bounds what a handler can ask for.
const maxDelay = 30 * 24 * time.Hour

// blamed returns the failure that ended a batch, nil when the batch says
// nothing about its events.
func blamed(err error) *failure {
	f, ok := errors.AsType[*failure](err)
	if !ok || f.kind == kindTrouble || store.IsUnavailable(err) {
		return nil
	}
	return f
}
