package broker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"outlog/relay"
)

// hdrExpected makes a publish a compare-and-append: the server stores the
// message only if the stream ends at this sequence.
const hdrExpected = "Nats-Expected-Last-Sequence"

// publisher is the stream as the relay sees it.
type publisher struct {
	broker   *Broker
	encode   *encoder
	adjusted bool // the stream has the limits of the options
	futures  []jetstream.PubAckFuture
	// handle spares Get a request for the stream's state; it is good for
	// handleOf's connection.
	handle   jetstream.Stream
	handleOf *link
}

var _ relay.Publisher = (*publisher)(nil)

// Publisher returns the relay's view of the stream. Its methods must be called
// from one goroutine at a time; two publishers may be used at once, and of two
// appends to the same base exactly one wins.
func (b *Broker) Publisher() relay.Publisher {
	return &publisher{broker: b, encode: newEncoder()}
}

// Tail returns where the stream ends, and changes nothing. Errors:
// relay.ErrOutage.
func (b *Broker) Tail(ctx context.Context) (relay.Tail, error) {
	return (&publisher{broker: b, adjusted: true}).Tail(ctx)
}

// Tail returns where the stream ends. It blocks for one request, at most
// PublishTimeout. Errors: relay.ErrOutage.
func (p *publisher) Tail(ctx context.Context) (relay.Tail, error) {
	l, ctx, end, err := p.broker.request(ctx, (*Broker).relayLink)
	if err != nil {
		return relay.Tail{}, outage("tail", err)
	}
	defer end()
	info, err := p.broker.info(ctx, l)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return relay.Tail{}, nil
	}
	if err != nil {
		return relay.Tail{}, outage("tail", err)
	}
	if !p.adjusted {
		if err := p.broker.adjust(ctx, l, info.Config); err != nil {
			return relay.Tail{}, outage("adjust the stream's limits", err)
		}
		p.adjusted = true
	}
	p.broker.expected.Store(true)
	t := relay.Tail{Exists: true, FirstSeq: info.State.FirstSeq, LastSeq: info.State.LastSeq, Msgs: info.State.Msgs}
	if info.State.Msgs == 0 {
		t.FirstSeq = t.LastSeq + 1
	}
	return t, nil
}

// Get returns the message at seq, payload included. A message that no relay
// wrote comes back with LogID "". It blocks for one request. Errors:
// relay.ErrNoMessage, relay.ErrOutage.
func (p *publisher) Get(ctx context.Context, seq uint64) (relay.Message, error) {
	l, ctx, end, err := p.broker.request(ctx, (*Broker).relayLink)
	if err != nil {
		return relay.Message{}, outage("get", err)
	}
	defer end()
	if seq == 0 {
		return relay.Message{}, fmt.Errorf("get sequence 0: %w", relay.ErrNoMessage)
	}
	raw, err := p.get(ctx, l, seq)
	switch {
	case err == nil:
		return decode(raw.Header, raw.Data), nil
	case errors.Is(err, jetstream.ErrMsgNotFound), errors.Is(err, jetstream.ErrStreamNotFound):
		return relay.Message{}, fmt.Errorf("get sequence %d: %w", seq, relay.ErrNoMessage)
	case errors.Is(err, nats.ErrBadHeaderMsg):
		return relay.Message{}, nil // foreign: no relay writes such a header
	}
	return relay.Message{}, outage("get", err)
}

func (p *publisher) get(ctx context.Context, l *link, seq uint64) (*jetstream.RawStreamMsg, error) {
	if p.handleOf != l {
		s, err := l.js.Stream(ctx, p.broker.stream)
		if err != nil {
			return nil, err
		}
		p.handle, p.handleOf = s, l
	}
	return p.handle.GetMsg(ctx, seq)
}

// Append stores msgs[i] as sequence base+1+i, or none from the first failure
// on: each message names the sequence that must be the stream's last. It blocks
// until every message is acknowledged or given up, at most PublishTimeout after
// the last was sent, or until ctx ends. When it returns, acknowledged messages
// survive the death of the process, and a power cut after about a second.
// Errors: those that relay.Publisher names. Cost: that of plain asynchronous
// publishing, and a round trip for the first message, see below.
//
// The chain of expected sequences has one weak place. If another writer's
// message comes in between, the message at that place is refused, but the next
// one expects the very sequence that the intruder took, and is stored. So the
// first message goes ahead alone, which stops a window whose base is out of
// date before it can do harm. An intruder in the middle of a window still lets
// the rest pass behind one missing message; Append returns ErrConflict with the
// prefix before it, and the relay, which compares contents, rebuilds the stream.
func (p *publisher) Append(ctx context.Context, base uint64, msgs []relay.Message) (int, error) {
	if len(msgs) == 0 {
		return 0, nil
	}
	l, err := p.broker.relayLink()
	if err != nil {
		return 0, outage("append", err)
	}
	stored, err := p.window(ctx, l, base, msgs[:1])
	if err == nil && len(msgs) > 1 {
		stored, err = p.window(ctx, l, base+1, msgs[1:])
		stored++
	}
	if stored > 0 {
		p.broker.cleared()
	}
	if err != nil {
		return stored, p.classify(msgs[stored].Record.Position, err)
	}
	return stored, nil
}

// window sends msgs without waiting in between, and waits for the answers.
func (p *publisher) window(ctx context.Context, l *link, base uint64, msgs []relay.Message) (int, error) {
	sendErr := p.send(ctx, l, base, msgs)
	stored, err := p.collect(ctx, base)
	if err == nil {
		err = sendErr // the first message that was not sent is the first failure
	}
	return stored, err
}

// send publishes msgs up to the first that the client refuses, and leaves their
// futures in p.futures. No retries: a publish that is sent twice could be stored
// behind one that came later.
func (p *publisher) send(ctx context.Context, l *link, base uint64, msgs []relay.Message) error {
	p.futures = p.futures[:0]
	opts := []jetstream.PublishOpt{
		jetstream.WithRetryAttempts(0),
		jetstream.WithStallWait(p.broker.opts.PublishTimeout),
	}
	for i := range msgs {
		if err := ctx.Err(); err != nil {
			return err
		}
		subject, header := p.encode.encode(&msgs[i], strconv.FormatUint(base+uint64(i), 10))
		out := &nats.Msg{Subject: subject, Header: header, Data: msgs[i].Record.Payload}
		future, err := l.js.PublishMsgAsync(out, opts...)
		if err != nil {
			return err
		}
		p.futures = append(p.futures, future)
	}
	return nil
}

// collect waits for all futures and returns how many leading ones were
// acknowledged with the sequence they had to get, and the first failure. It
// waits for those behind the failure too: an answer that is still on its way
// would make the relay's next look at the tail too early.
func (p *publisher) collect(ctx context.Context, base uint64) (stored int, err error) {
	behind := 0
	for i, f := range p.futures {
		p.futures[i] = nil
		ack, failure := await(ctx, f)
		switch {
		case err != nil:
			if failure == nil {
				behind++
			}
		case failure != nil:
			err = failure
		case ack.Sequence != base+1+uint64(i):
			err = &misplacedError{want: base + 1 + uint64(i), got: ack.Sequence}
		default:
			stored++
		}
	}
	if behind > 0 {
		err = fmt.Errorf("%w; %d messages behind it were stored, so another writer came in between", err, behind)
	}
	return stored, err
}

func await(ctx context.Context, f jetstream.PubAckFuture) (*jetstream.PubAck, error) {
	select {
	case ack := <-f.Ok():
		return ack, nil
	case err := <-f.Err():
		return nil, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// misplacedError says that a message was stored, but not where it had to be.
// The server checks the expected sequence, so another stream has answered.
type misplacedError struct{ want, got uint64 }

func (e *misplacedError) Error() string {
	return fmt.Sprintf("stored as sequence %d instead of %d", e.got, e.want)
}

// Recreate deletes the stream with all it holds and makes an empty one whose
// next sequence is firstSeq (0 counts as 1). It looks at the new stream before
// it returns, because the server may bring old messages back, and tries again
// a few times. Errors: relay.ErrOutage.
func (p *publisher) Recreate(ctx context.Context, firstSeq uint64) error {
	firstSeq = max(firstSeq, 1)
	l, ctx, end, err := p.broker.request(ctx, (*Broker).relayLink)
	if err != nil {
		return outage("recreate", err)
	}
	defer end()
	select {
	case p.broker.rebuild <- struct{}{}:
		defer func() { <-p.broker.rebuild }()
	case <-ctx.Done():
		return outage("recreate", ctx.Err())
	}
	cleared := false
	for try := range recreateTries {
		if try > 0 && !sleep(ctx, 10*time.Millisecond<<try) {
			break
		}
		var done bool
		done, err = p.broker.recreate(ctx, l, firstSeq, &cleared)
		if done {
			p.broker.renewSources()
			return nil
		}
		// The server refuses a new stream while it still tidies up after the one
		// that was deleted; any other failure is not worth another try.
		if api := (*jetstream.APIError)(nil); err != nil && !errors.As(err, &api) {
			return outage("recreate", err)
		}
	}
	if err == nil {
		err = fmt.Errorf("old messages came back %d times", recreateTries)
	}
	p.broker.suspect(suspicion{reason: "the stream cannot be made anew", strike: true})
	return outage("recreate", err)
}

const recreateTries = 5
