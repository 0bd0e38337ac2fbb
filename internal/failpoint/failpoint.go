// Package failpoint builds hooks that make a process fail at a named point of
// its write path. Tests use them to die, or to stop, exactly where a crash
// would hurt most.
//
// A [Hook] is passed in through an option named Failpoint. There is no other
// way in: nothing here reads the environment or a flag, so no failpoint can be
// reached in a released binary. A crash test runs its own test binary again
// as a child, hands it a [Spec] as an argument, and looks at what the child
// left behind.
package failpoint

import (
	"os"
	"sync/atomic"
)

// Hook is called with the name of the point that was reached. The error it
// returns fails the step that follows the point.
type Hook = func(point string) error

// The points. What has happened when one is reached:
const (
	StoreBeforeCommit    = "store.before-commit"    // all callbacks of a group ran, nothing is committed
	StoreAfterCommit     = "store.after-commit"     // committed, no caller has been told
	RelayAfterPublish    = "relay.after-publish"    // the broker has acknowledged, the cursor is not saved
	ConsumerAfterHandler = "consumer.after-handler" // a batch's handlers ran, nothing is committed
	ConsumerAfterCommit  = "consumer.after-commit"  // committed, nothing is acknowledged to the stream
)

// Points lists all points in the order an event passes them.
var Points = []string{StoreBeforeCommit, StoreAfterCommit, RelayAfterPublish, ConsumerAfterHandler, ConsumerAfterCommit}

// At does something at the n-th time, from 1, that point is reached, and
// nothing at any other time. n = 0: every time.
func At(point string, n int, do func() error) Hook {
	var hits atomic.Int64
	return func(reached string) error {
		if reached != point {
			return nil
		}
		if hit := hits.Add(1); n != 0 && hit != int64(n) {
			return nil
		}
		return do()
	}
}

// All calls hooks in turn, up to the first that returns an error.
func All(hooks ...Hook) Hook {
	return func(point string) error {
		for _, h := range hooks {
			if err := h(point); err != nil {
				return err
			}
		}
		return nil
	}
}

// Fail returns err.
func Fail(err error) func() error { return func() error { return err } }

// Exit ends the process with this status, running no deferred function.
func Exit(status int) func() error {
	return func() error { os.Exit(status); return nil }
}

// Kill ends the process as SIGKILL does. It never returns.
func Kill() func() error {
	return func() error {
		p, err := os.FindProcess(os.Getpid())
		if err == nil {
			err = p.Kill()
		}
		if err != nil {
			panic(err) // a crash test must not go on as if it had crashed
		}
		select {} // the signal is on its way
	}
}
