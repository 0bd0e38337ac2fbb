package broker

import (
	"errors"
	"sync"

	"github.com/nats-io/nats.go/jetstream"

	"outlog/consumer"
)

// session is one open pull request of a Source, on one server. It ends with the
// server, with the durable, or with the source, and is never repaired: the next
// Fetch opens another one.
type session struct {
	messages chan jetstream.Msg
	consume  jetstream.ConsumeContext
	down     <-chan struct{} // closed when the server goes down
	failed   chan struct{}   // closed after err is set
	done     chan struct{}   // closed by stop

	fail sync.Once
	err  error
	end  sync.Once
}

// deliver hands a message to Fetch. It blocks while the buffer is full; the
// client library asks for no more meanwhile.
func (s *session) deliver(m jetstream.Msg) {
	select {
	case s.messages <- m:
	case <-s.done:
	}
}

// onError ends the session at errors that the client library does not heal by
// itself. Missing heartbeats are among them: the library would go on asking a
// durable that may be gone.
func (s *session) onError(_ jetstream.ConsumeContext, err error) {
	if errors.Is(err, jetstream.ErrConsumerLeadershipChanged) {
		return
	}
	s.fail.Do(func() {
		s.err = err
		close(s.failed)
	})
}

func (s *session) stop() {
	s.end.Do(func() {
		close(s.done)
		s.consume.Stop()
	})
}

// batch returns first and what is in the buffer behind it, at most max.
func (s *session) batch(first jetstream.Msg, max int) []consumer.Delivery {
	n := min(max, len(s.messages)+1)
	out := make([]consumer.Delivery, 0, n)
	out = append(out, delivery(first))
	for len(out) < n {
		select {
		case m := <-s.messages:
			out = append(out, delivery(m))
		default:
			return out
		}
	}
	return out
}

func delivery(m jetstream.Msg) consumer.Delivery {
	d := consumer.Delivery{Ack: m.Ack}
	if meta, err := m.Metadata(); err == nil {
		d.Seq = meta.Sequence.Stream
	}
	decoded := decode(m.Headers(), nil)
	d.LogID, d.Record = decoded.LogID, decoded.Record
	return d
}
