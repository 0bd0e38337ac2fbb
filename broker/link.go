package broker

import (
	"context"
	"net"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// link is one connection to the embedded server. It survives restarts of the
// server: its dialer asks for the one that runs now.
type link struct {
	conn *nats.Conn
	js   jetstream.JetStream
}

// dialer connects to the server that runs now. The client library's own
// in-process option pins one server for ever.
type dialer struct{ broker *Broker }

// Dial never waits: the client library holds its lock meanwhile.
func (d dialer) Dial(string, string) (net.Conn, error) {
	d.broker.mu.Lock()
	s := d.broker.current
	d.broker.mu.Unlock()
	if s == nil {
		return nil, ErrDown
	}
	return s.InProcessConn()
}

// inFlight is the most publishes that wait for their acknowledgement; an Append
// of more messages waits for the first ones.
const inFlight = 8192

func (b *Broker) newLink(name string) (*link, error) {
	conn, err := nats.Connect("nats://outlog.invalid",
		nats.Name(name),
		nats.SetCustomDialer(dialer{b}),
		nats.SkipHostLookup(),
		nats.IgnoreDiscoveredServers(),
		nats.MaxReconnects(-1),
		// A publish while the server is down fails at once. Buffered, it would
		// arrive after its time-out, when the relay thinks otherwise.
		nats.ReconnectBufSize(-1),
		// The broker cuts the wait short as soon as the server is back.
		nats.ReconnectWait(100*time.Millisecond),
		nats.ReconnectJitter(10*time.Millisecond, 0),
		nats.Timeout(b.opts.PublishTimeout),
		nats.FlusherTimeout(b.opts.PublishTimeout),
		nats.DisconnectErrHandler(func(*nats.Conn, error) {
			b.suspect(suspicion{reason: "a connection was lost"})
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			b.log.Debug("connection", "name", name, "error", err)
		}),
	)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(conn,
		jetstream.WithPublishAsyncTimeout(b.opts.PublishTimeout),
		jetstream.WithPublishAsyncMaxPending(inFlight),
		jetstream.WithDefaultTimeout(b.opts.PublishTimeout))
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &link{conn, js}, nil
}

// connect makes the two links at the first start, and wakes them at the others.
// One connection for both the relay and the consumers would cost a third of the
// throughput.
func (b *Broker) connect() error {
	b.mu.Lock()
	relay, consumer := b.relay, b.consumer
	b.mu.Unlock()
	var err error
	if relay == nil {
		if relay, err = b.newLink("outlog relay"); err != nil {
			return err
		}
	}
	if consumer == nil {
		if consumer, err = b.newLink("outlog consumers"); err != nil {
			relay.conn.Close()
			return err
		}
	}
	b.mu.Lock()
	b.relay, b.consumer = relay, consumer
	b.mu.Unlock()
	for _, l := range []*link{relay, consumer} {
		if err := l.wake(b.opts.PublishTimeout); err != nil {
			return err
		}
	}
	return nil
}

// wake returns when the connection reaches the server that runs now. After a
// restart it may not have noticed yet that the old one is gone.
func (l *link) wake(limit time.Duration) error {
	status := l.conn.StatusChanged()
	defer l.conn.RemoveStatusListener(status)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		switch {
		case l.conn.IsClosed():
			return nats.ErrConnectionClosed
		case l.conn.IsReconnecting():
			if err := l.conn.ForceReconnect(); err != nil {
				return err
			}
		case l.conn.FlushTimeout(limit) == nil:
			return nil
		}
		select {
		case <-status:
		case <-timer.C:
			return nats.ErrTimeout
		}
	}
}

func (b *Broker) closeLinks() {
	b.mu.Lock()
	links := []*link{b.relay, b.consumer}
	b.relay, b.consumer = nil, nil
	sources := b.sources
	b.sources = map[*Source]struct{}{}
	b.mu.Unlock()
	for s := range sources {
		s.hangUp()
	}
	for _, l := range links {
		if l != nil {
			l.conn.Close()
		}
	}
}

// relayLink returns the relay's connection, or ErrDown.
func (b *Broker) relayLink() (*link, error) { return b.pick(func() *link { return b.relay }) }

// consumerLink returns the consumers' connection, or ErrDown.
func (b *Broker) consumerLink() (*link, error) { return b.pick(func() *link { return b.consumer }) }

// request returns a connection, and a context for requests on it that ends with
// ctx or with the server: the client library lets a request that was sent to a
// dead server wait for its time-out. end releases the context.
func (b *Broker) request(ctx context.Context, which func(*Broker) (*link, error)) (l *link, req context.Context, end func(), err error) {
	down, err := b.up()
	if err != nil {
		return nil, nil, nil, err
	}
	if l, err = which(b); err != nil {
		return nil, nil, nil, err
	}
	req, cancel := context.WithTimeout(ctx, b.opts.PublishTimeout)
	go func() {
		select {
		case <-down:
			cancel()
		case <-req.Done():
		}
	}()
	return l, req, cancel, nil
}

func (b *Broker) pick(which func() *link) (*link, error) {
	if _, err := b.up(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if l := which(); l != nil {
		return l, nil
	}
	return nil, ErrDown
}
