package node

import (
	"context"
	"fmt"
	"time"
)

// Patience of NotReady: shorter troubles are not worth an alarm.
const (
	stuckAfter = 5 * time.Second
	holdAfter  = time.Second
)

// NotReady says, in sentences, why events do not move as they should: a part
// that is down, held up, paused by itself, or in a handler for too long. No
// sentence means ready. A consumer that a person has paused is ready.
func (n *Node) NotReady(ctx context.Context) (reasons []string) {
	add := func(format string, args ...any) { reasons = append(reasons, fmt.Sprintf(format, args...)) }
	ctx, cancel := context.WithTimeout(ctx, holdAfter)
	defer cancel()
	if err := n.db.Reader().PingContext(ctx); err != nil {
		add("database: %v", err)
	}
	if name, since, held := n.db.Holder(); held && time.Since(since) > holdAfter {
		add("database: the Update callback %s holds up all writers for %v", name, time.Since(since).Round(time.Second))
	}
	s := n.Status()
	if n.broker != nil && !s.BrokerUp {
		add("broker: %s", s.BrokerReason)
	}
	if since := s.Relay.OutageSince; !since.IsZero() && time.Since(since) > stuckAfter {
		add("relay: held up for %v: %s", time.Since(since).Round(time.Second), s.Relay.LastError)
	}
	for _, c := range s.Consumers {
		switch {
		case !c.TroubleSince.IsZero() && time.Since(c.TroubleSince) > stuckAfter:
			add("consumer %s: held up by the database for %v: %s", c.Name, time.Since(c.TroubleSince).Round(time.Second), c.LastError)
		case !c.PausedSince.IsZero():
			add("consumer %s: pauses by itself for %v: %s", c.Name, time.Since(c.PausedSince).Round(time.Second), c.PausedReason)
		case c.HandlingFor > holdAfter:
			add("consumer %s: its handler is at %s for %v", c.Name, c.Handling, c.HandlingFor.Round(time.Second))
		}
	}
	return reasons
}
