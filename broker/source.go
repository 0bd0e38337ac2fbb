package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/nats-io/nats.go/jetstream"

	"outlog/consumer"
)

// prefetch is how many messages a source asks for ahead of Fetch. They have no
// payload, so they cost about a kilobyte each.
const prefetch = 4096

// maxName bounds a durable's name; the server allows 255 bytes.
const maxName = 200

// Source is a durable consumer on the stream. It keeps a pull request open, so
// that a message is on its way to Fetch as soon as it is stored.
//
// Its acknowledgements say how far the stream may forget; they never say what
// was applied, the log's database does. That is why AckAll, the cheap policy, is
// enough: an acknowledgement that covers a delivery which nobody has applied,
// such as one that a second instance on the same durable holds, loses nothing,
// because the row is still in the log, above the cursor.
type Source struct {
	broker *Broker
	name   string
	start  func(ctx context.Context) (uint64, error)

	mu      sync.Mutex
	session *session // nil: the next Fetch opens one
	closed  bool
}

var _ consumer.Source = (*Source)(nil)

// Source returns the durable consumer called name, which is made by the first
// Fetch, and again whenever the stream was made anew. startSeq says from which
// stream sequence on a new durable delivers, 0 for all; it is not asked when the
// durable exists. Earlier ones may come all the same: the server can give a new
// durable the place of one that has just gone with its stream. Fetch must be called from one goroutine at a time. What it
// holds is released by Close, or when Run returns.
func (b *Broker) Source(name string, startSeq func(ctx context.Context) (uint64, error)) *Source {
	return &Source{broker: b, name: token(name, maxName), start: startSeq}
}

// Fetch blocks until there is at least one delivery, and returns up to max of
// those that are there, in stream order; what is delivered again, because it was
// not acknowledged within AckWait, may come between. It does not wait for more.
// Deliveries carry no payload; those of foreign messages have LogID "". Errors:
// ctx's error, ErrDown, ErrNoStream, ErrClosed, what startSeq returned, and the
// client library's.
func (s *Source) Fetch(ctx context.Context, max int) ([]consumer.Delivery, error) {
	if max < 1 {
		return nil, fmt.Errorf("%w: max is %d, want at least 1", ErrInvalidOption, max)
	}
	ses, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	select {
	case first := <-ses.messages:
		return ses.batch(first, max), nil
	default:
	}
	select {
	case first := <-ses.messages:
		return ses.batch(first, max), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-ses.failed:
		s.drop(ses)
		return nil, fmt.Errorf("consumer %s: %w", s.name, ses.err)
	case <-ses.down:
		s.drop(ses)
		return nil, fmt.Errorf("consumer %s: %w", s.name, ErrDown)
	case <-ses.done: // by Close, or by the end of Run
		return nil, fmt.Errorf("consumer %s: %w", s.name, ErrClosed)
	}
}

// Close ends the source and its pull request. The durable stays.
func (s *Source) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.hangUp()
	s.broker.mu.Lock()
	delete(s.broker.sources, s)
	s.broker.mu.Unlock()
}

// open returns the session, and makes one if there is none.
func (s *Source) open(ctx context.Context) (*session, error) {
	s.mu.Lock()
	ses, closed := s.session, s.closed
	s.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	if ses != nil {
		return ses, nil
	}
	ses, err := s.dial(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		ses.stop()
		return nil, ErrClosed
	}
	s.session = ses
	s.mu.Unlock()
	s.broker.mu.Lock()
	s.broker.sources[s] = struct{}{}
	s.broker.mu.Unlock()
	return ses, nil
}

// hangUp ends the session, if there is one.
func (s *Source) hangUp() {
	s.mu.Lock()
	ses := s.session
	s.session = nil
	s.mu.Unlock()
	if ses != nil {
		ses.stop()
	}
}

// renewSources makes every source open a new session: the server may forget to
// tell a pull request that its durable went with the stream.
func (b *Broker) renewSources() {
	b.mu.Lock()
	sources := slices.Collect(maps.Keys(b.sources))
	b.mu.Unlock()
	for _, s := range sources {
		s.mu.Lock()
		if s.session != nil {
			s.session.onError(nil, errRebuilt)
		}
		s.mu.Unlock()
	}
}

var errRebuilt = fmt.Errorf("%w: it was made anew", ErrNoStream)

func (s *Source) drop(ses *session) {
	ses.stop()
	s.mu.Lock()
	if s.session == ses {
		s.session = nil
	}
	s.mu.Unlock()
}

// dial binds to the durable, makes it if need be, and opens the pull request.
func (s *Source) dial(ctx context.Context) (*session, error) {
	down, err := s.broker.up()
	if err != nil {
		return nil, err
	}
	l, err := s.broker.consumerLink()
	if err != nil {
		return nil, err
	}
	durable, err := s.durable(ctx, l)
	if err != nil {
		return nil, s.wrap("open", err)
	}
	ses := &session{
		messages: make(chan jetstream.Msg, prefetch),
		failed:   make(chan struct{}),
		done:     make(chan struct{}),
		down:     down,
	}
	ses.consume, err = durable.Consume(ses.deliver,
		jetstream.PullMaxMessages(prefetch), jetstream.ConsumeErrHandler(ses.onError))
	if err != nil {
		return nil, s.wrap("consume", err)
	}
	return ses, nil
}

func (s *Source) wrap(what string, err error) error {
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		err = ErrNoStream
	}
	return fmt.Errorf("%s consumer %s: %w", what, s.name, err)
}

func (s *Source) durable(ctx context.Context, l *link) (jetstream.Consumer, error) {
	c, err := l.js.Consumer(ctx, s.broker.stream, s.name)
	if err == nil && !s.usable(c.CachedInfo().Config) {
		if err := l.js.DeleteConsumer(ctx, s.broker.stream, s.name); err != nil {
			return nil, err
		}
		err = jetstream.ErrConsumerNotFound
	}
	if !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return c, err
	}
	from, err := s.start(ctx)
	if err != nil {
		return nil, fmt.Errorf("start sequence: %w", err)
	}
	return l.js.CreateConsumer(ctx, s.broker.stream, s.config(from))
}

func (s *Source) config(from uint64) jetstream.ConsumerConfig {
	c := jetstream.ConsumerConfig{
		Durable:       s.name,
		DeliverPolicy: jetstream.DeliverAllPolicy,
		AckPolicy:     jetstream.AckAllPolicy,
		AckWait:       s.broker.opts.AckWait,
		MaxDeliver:    -1, // after a last delivery the server would skip the message without a word
		MaxAckPending: 16 * prefetch,
		HeadersOnly:   true, // the payload comes from the log
	}
	if from > 0 {
		c.DeliverPolicy, c.OptStartSeq = jetstream.DeliverByStartSequencePolicy, from
	}
	return c
}

// usable returns whether a durable that is there does what this one needs.
// Where it started does not matter any more.
func (s *Source) usable(have jetstream.ConsumerConfig) bool {
	want := s.config(0)
	return have.AckPolicy == want.AckPolicy && have.AckWait == want.AckWait &&
		have.MaxDeliver == want.MaxDeliver && have.MaxAckPending == want.MaxAckPending &&
		have.HeadersOnly && have.FilterSubject == "" && len(have.FilterSubjects) == 0
}
