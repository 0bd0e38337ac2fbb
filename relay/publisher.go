package relay

import (
	"context"
	"errors"
	"fmt"

	"outlog/outbox"
)

// Message is one log row on its way to, or read back from, the stream.
type Message struct {
	// LogID is the id of the log that the row belongs to. A message read back
	// with an empty LogID was not written by an outlog relay: it is foreign.
	LogID string
	// Prev is the position of the outlog message before this one on the stream,
	// 0 for the first.
	Prev int64
	// Record is the log row. Messages read back by Get may lack Payload.
	Record outbox.Record
}

// Tail is where a stream ends.
type Tail struct {
	Exists   bool   // false: there is no such stream, the rest is zero
	FirstSeq uint64 // first sequence still held; LastSeq+1 when empty
	LastSeq  uint64 // last sequence ever given out; survives expiry
	// Msgs is how many messages it holds. Nothing but its limits removes any,
	// and those the oldest: fewer than the span of sequences is damage.
	Msgs uint64
}

// missing is how many messages are not there between the first and the last.
func (t Tail) missing() uint64 {
	span := t.LastSeq + 1 - t.FirstSeq
	return span - min(span, t.Msgs)
}

// Publisher is the stream as the relay sees it. Its methods are called from
// one goroutine at a time.
//
// Every error wraps ErrOutage (the broker did not answer: nothing is known),
// ErrConflict (the stream does not end where the relay thought), ErrNoMessage,
// or is a *RefusedError (this very message is not accepted).
type Publisher interface {
	// Tail returns where the stream ends.
	Tail(ctx context.Context) (Tail, error)
	// Get returns the message at seq, or ErrNoMessage if the stream does not
	// hold it (expired, purged, a hole).
	Get(ctx context.Context, seq uint64) (Message, error)
	// Append stores msgs[i] as sequence base+1+i, all in order: if one is not
	// stored, none behind it is. It waits for all acknowledgements, returns
	// how many leading messages were acknowledged, and the first failure.
	// A time-out proves nothing about the messages behind stored.
	Append(ctx context.Context, base uint64, msgs []Message) (stored int, err error)
	// Recreate deletes the stream with all it holds and makes an empty one
	// whose next sequence is firstSeq.
	Recreate(ctx context.Context, firstSeq uint64) error
}

var (
	// ErrOutage is returned when the broker cannot be reached or does not
	// answer; the caller should back off and reconcile. It counts as nobody's
	// attempt.
	ErrOutage = errors.New("broker unavailable")
	// ErrConflict is returned when the stream's last sequence is not the
	// expected one; the caller should reconcile.
	ErrConflict = errors.New("stream ends elsewhere")
	// ErrNoMessage is returned by Get when the stream does not hold the
	// sequence; the caller decides by the tail whether that is expiry or a hole.
	ErrNoMessage = errors.New("no message at this sequence")
	// ErrFenced is returned when another owner has taken the database; the
	// caller must stop.
	ErrFenced = errors.New("another owner has taken over")
)

// RefusedError says that the broker refuses one particular message.
type RefusedError struct {
	Position int64  // of the refused row
	Code     int    // the broker's error code, 0 if refused before sending
	Reason   string // the broker's words
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("message at position %d refused (code %d): %s", e.Position, e.Code, e.Reason)
}

// ForeignStreamError says that a stream that is not the relay's to delete would
// have to be deleted, and what would be done.
type ForeignStreamError struct {
	Stream  string // its name
	Reason  string // why stream and log cannot come together otherwise
	Tail    Tail   // what the stream holds, and would lose
	NextSeq uint64 // the first sequence of the new stream
	After   int64  // the position after which the log would be published again
}

func (e *ForeignStreamError) Error() string {
	return fmt.Sprintf("the external stream %s does not agree with the log: %s; its %d messages are not deleted without being told to: "+
		"`outlog reconcile --dry-run` shows the plan", e.Stream, e.Reason, e.Tail.Msgs)
}
