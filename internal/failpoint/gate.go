package failpoint

import "sync"

// Gate stops whoever reaches it until it is opened.
type Gate struct {
	reached, opened     chan struct{}
	reachOnce, openOnce sync.Once
}

// NewGate returns a closed gate.
func NewGate() *Gate {
	return &Gate{reached: make(chan struct{}), opened: make(chan struct{})}
}

// Wait blocks until the gate is open; for At.
func (g *Gate) Wait() error {
	g.reachOnce.Do(func() { close(g.reached) })
	<-g.opened
	return nil
}

// Reached is closed when somebody has come to the gate.
func (g *Gate) Reached() <-chan struct{} { return g.reached }

// Open lets everybody through, now and later.
func (g *Gate) Open() { g.openOnce.Do(func() { close(g.opened) }) }
