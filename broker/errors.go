package broker

import "errors"

var (
	// ErrInvalidOption is returned by New when an option is out of range; it
	// wraps the field, the value and the range. The caller should fix the
	// configuration.
	ErrInvalidOption = errors.New("invalid broker option")
	// ErrDown is returned when the embedded server is not up; State says why.
	// The caller should back off and call again.
	ErrDown = errors.New("broker is down")
	// ErrNoStream is returned by a Source or a Scan when the stream does not
	// exist (yet, or while it is rebuilt). The caller should back off: the relay
	// creates it.
	ErrNoStream = errors.New("the stream does not exist")
	// ErrStoreDir is found in State.Err when the store directory cannot be used,
	// for example because a regular file has its name. Run tries again until
	// somebody puts it right.
	ErrStoreDir = errors.New("the broker's store directory cannot be used")
	// ErrStuck is returned by Run when the server neither started nor stopped
	// within its time limit. A goroutine inside it cannot be killed and may eat
	// memory without bound, so the caller must end the process; the next start
	// quarantines the store if it was the start that hung.
	ErrStuck = errors.New("the embedded server hangs")
	// ErrRunning is returned by Run when the broker runs already.
	ErrRunning = errors.New("the broker runs already")
	// ErrClosed is returned by a Source after its Close.
	ErrClosed = errors.New("the source is closed")
)
