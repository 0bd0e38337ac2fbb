package consumer

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"time"

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

// failure is a handler that did not succeed with an event.
type failure struct {
	eventID string
	err     error
	stack   string // of a panic or Goexit
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// errGoexit is the failure of a handler that ended its goroutine.
var errGoexit = errors.New("handler ended its goroutine (runtime.Goexit)")

// panicked is the failure of a handler that panicked.
func panicked(p any) error {
	if err, ok := p.(error); ok {
		return fmt.Errorf("handler panicked: %w", err)
	}
	return fmt.Errorf("handler panicked: %v", p)
}

func isOutage(err error) bool {
	_, ok := errors.AsType[*outageError](err)
	return ok
}

// verdict is what a failed attempt leads to.
type verdict struct {
	state string // retrying or dead
	delay time.Duration
}

// judge decides after the n-th failed attempt.
func (o *Options) judge(err error, n int) verdict {
	if _, ok := errors.AsType[*permanentError](err); ok || n >= o.MaxAttempts {
		return verdict{state: "dead"}
	}
	if r, ok := errors.AsType[*retryAfterError](err); ok {
		return verdict{state: "retrying", delay: min(r.delay, maxDelay)}
	}
	return verdict{state: "retrying", delay: jitter(o.BackoffMin, o.BackoffMax, n)}
}

// maxDelay bounds what a handler can ask for.
const maxDelay = 30 * 24 * time.Hour

// isTrouble reports whether a failed batch says nothing about its events.
func isTrouble(err error) bool {
	_, isFailure := errors.AsType[*failure](err)
	return !isFailure || store.IsUnavailable(err)
}

var variable = regexp.MustCompile(`"[^"]*"|'[^']*'|0x[0-9a-fA-F]+|[0-9A-Za-z-]*[0-9][0-9A-Za-z-]*`)

// fingerprint groups errors that differ only in numbers, ids and quoted text:
// 12 hexadecimal digits.
func fingerprint(err string) string {
	sum := sha256.Sum256([]byte(variable.ReplaceAllString(firstLine(err), "*")))
	return hex.EncodeToString(sum[:6])
}
