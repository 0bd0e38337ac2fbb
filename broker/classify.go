package broker

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"outlog/relay"
)

// Error codes of the server, from its errors.json.
const (
	codeWrongLastSequence       jetstream.ErrorCode = 10071
	codeWrongLastSequenceQuorum jetstream.ErrorCode = 10164 // the same, on a replicated stream
	codeMessageTooLarge         jetstream.ErrorCode = 10054
	codeHeaderTooLarge          jetstream.ErrorCode = 10097
	codeStoreFailed             jetstream.ErrorCode = 10077
	codeNoResources             jetstream.ErrorCode = 10023
	codeNoStorage               jetstream.ErrorCode = 10047
)

// outage wraps err as relay.ErrOutage.
func outage(what string, err error) error {
	return fmt.Errorf("%s: %w: %w", what, relay.ErrOutage, err)
}

// classify turns the first failure of an append into the class that the relay
// acts on. Only what is known to be the message's own fault is a refusal:
// everything that is not understood is an outage, which counts as nobody's
// attempt.
func (p *publisher) classify(position int64, err error) error {
	var api *jetstream.APIError
	var misplaced *misplacedError
	switch {
	case errors.As(err, &api):
		return p.classifyCode(position, api)
	case errors.As(err, &misplaced):
		return fmt.Errorf("append: %w: %w", relay.ErrConflict, err)
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject), errors.Is(err, nats.ErrBadHeaderMsg):
		return &relay.RefusedError{Position: position, Reason: err.Error()}
	case errors.Is(err, jetstream.ErrAsyncPublishTimeout), errors.Is(err, jetstream.ErrTooManyStalledMsgs):
		p.broker.suspect(suspicion{reason: err.Error(), strike: true})
	}
	return outage("append", err)
}

func (p *publisher) classifyCode(position int64, api *jetstream.APIError) error {
	switch api.ErrorCode {
	case codeWrongLastSequence, codeWrongLastSequenceQuorum:
		return fmt.Errorf("append: %w: %w", relay.ErrConflict, api)
	case codeMessageTooLarge, codeHeaderTooLarge:
		return &relay.RefusedError{Position: position, Code: int(api.ErrorCode), Reason: api.Description}
	case codeStoreFailed, codeNoResources, codeNoStorage:
		p.broker.suspect(suspicion{reason: api.Description})
	}
	return outage("append", api)
}
