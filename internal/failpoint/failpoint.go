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
	NodeAfterLock         = "node.after-lock"         // the database is owned, and not opened
	StoreAfterCopy        = "store.after-copy"        // a copy of the database is written, and not synced
	StoreAfterMigration   = "store.after-migration"   // the schema is new, and nobody uses it
	BrokerAfterQuarantine = "broker.after-quarantine" // the stream's store was moved away
	BrokerAfterMark       = "broker.after-mark"       // the marker of a start is on the disk, the server is not started
	BrokerAfterStart      = "broker.after-start"      // the server has started, the marker is still there
	RelayAfterRecreate    = "relay.after-recreate"    // the stream was made anew, the cursor is the old one
	StoreBeforeCommit     = "store.before-commit"     // all callbacks of a group ran, nothing is committed
	StoreAfterCommit      = "store.after-commit"      // committed, no caller has been told
	RelayBeforePublish    = "relay.before-publish"    // a window is on the disk, and none of it on the stream
	RelayAfterPublish     = "relay.after-publish"     // the broker has acknowledged, the cursor has not moved
	RelayBeforeCursor     = "relay.before-cursor"     // the cursor has moved in memory, and is not stored
	RelayBeforePark       = "relay.before-park"       // the broker refuses an event, which is not parked yet
	ConsumerAfterHandler  = "consumer.after-handler"  // a batch's handlers ran, nothing is committed
	ConsumerAfterPark     = "consumer.after-park"     // a failed event's row is written, and not committed
	ConsumerAfterCommit   = "consumer.after-commit"   // committed, nothing is acknowledged to the stream
	ConsumerAfterEffect   = "consumer.after-effect"   // an external effect has happened, its result is not stored
	ConsumerAfterMark     = "consumer.after-mark"     // a suspect's marker is committed, its handler has not run
	ConsumerAfterClear    = "consumer.after-clear"    // a reset has undone its effects, nothing is committed
)

// Points lists all points: of a start, then as an event passes them.
var Points = []string{
	NodeAfterLock, StoreAfterCopy, StoreAfterMigration, BrokerAfterQuarantine, BrokerAfterMark, BrokerAfterStart, RelayAfterRecreate,
	StoreBeforeCommit, StoreAfterCommit, RelayBeforePublish, RelayAfterPublish, RelayBeforeCursor, RelayBeforePark,
	ConsumerAfterHandler, ConsumerAfterPark, ConsumerAfterCommit, ConsumerAfterEffect, ConsumerAfterMark, ConsumerAfterClear,
}

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
