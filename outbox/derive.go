package outbox

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"time"

	"github.com/oklog/ulid/v2"
)

// A consumer that appends events must not append them twice when its input is
// applied again, for example after a reset. So their ids are not random but
// derived from the input: the same consumer, input and ordinal give the same
// id, and Append finds it in the log.

// input is the event that a consumer is applying.
type input struct {
	consumer string
	eventID  string
	at       time.Time
	ordinal  uint64 // of the next event appended
}

type inputKey struct{}

// WithInput returns a context under which Append gives events without ID an id
// derived from the event that consumer is applying. It serves one run of a
// handler and one goroutine.
func WithInput(ctx context.Context, consumer string, r *Record) context.Context {
	return context.WithValue(ctx, inputKey{}, &input{consumer: consumer, eventID: r.EventID, at: r.CreatedAt})
}

// inputOf returns what a consumer is applying under ctx, nil if nothing.
func inputOf(ctx context.Context) *input {
	in, _ := ctx.Value(inputKey{}).(*input)
	return in
}

// derivedID returns the next derived id.
func (in *input) derivedID() string {
	h := sha256.New()
	h.Write([]byte(in.consumer + "\x00" + in.eventID + "\x00"))
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], in.ordinal)
	h.Write(n[:])
	in.ordinal++
	var u ulid.ULID
	_ = u.SetTime(ulid.Timestamp(in.at)) // fails after the year 10889
	_ = u.SetEntropy(h.Sum(nil)[:10])
	return u.String()
}
