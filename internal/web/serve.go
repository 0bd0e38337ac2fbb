package web

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"
)

// Limits of a server. There is none for writing an answer: an answer may be a
// long stream, and a client that reads slowly holds nothing but its connection.
const (
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 30 * time.Second // headers and body
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 32 << 10
)

// Serve answers requests on ln with handler until ctx ends, then takes no new
// ones and lets those in flight finish for up to drain; the rest are cut off,
// their contexts cancelled, and the error says so. It closes ln. It returns nil
// after a stop in which everything finished in time.
func Serve(ctx context.Context, ln net.Listener, handler http.Handler, drain time.Duration) error {
	requests, cancelRequests := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelRequests()
	unused := newConns()
	srv := &http.Server{
		ConnState:         unused.note,
		Handler:           handler,
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       readTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		BaseContext:       func(net.Listener) context.Context { return requests },
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve HTTP on %s: %w", ln.Addr(), errors.Join(err, srv.Close()))
	case <-ctx.Done():
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	unused.close() // Shutdown would wait for them as for requests
	err := srv.Shutdown(bounded)
	<-served
	if err != nil {
		return fmt.Errorf("requests still running after %v were cut off: %w", drain, errors.Join(err, srv.Close()))
	}
	return nil
}

// conns are connections on which no request has begun: a browser opens them in
// advance, a probe never uses them.
type conns struct {
	mu     sync.Mutex
	set    map[net.Conn]struct{}
	closed bool
}

func newConns() *conns { return &conns{set: map[net.Conn]struct{}{}} }

func (c *conns) note(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case state != http.StateNew:
		delete(c.set, conn)
	case c.closed:
		_ = conn.Close()
	default:
		c.set[conn] = struct{}{}
	}
}

func (c *conns) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for conn := range c.set {
		_ = conn.Close()
	}
}
