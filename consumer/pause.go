package consumer

import (
	"log/slog"
	"sync"
	"time"

	"outlog/internal/attempt"
	"outlog/outbox"
)

// A consumer pauses itself when going on would do harm: after a handler's
// Outage, and when the events of many aggregates fail in a row, which no event
// is to blame for. Each pause is longer than the one before; a success ends
// the spell.

const (
	pauseMin = 100 * time.Millisecond
	pauseMax = time.Minute
	// stormAfter is how many aggregates must fail in a row, none succeeding
	// between, to make it a storm. Between two pauses as many are tried again,
	// so that a few hundred poison events do not hold up what is behind them.
	stormAfter = 20
	stormMax   = 10 * time.Second
)

// pauser is safe for concurrent use.
type pauser struct {
	log  *slog.Logger
	name string

	mu     sync.Mutex
	until  time.Time
	since  time.Time // when the spell began, zero if there is none
	times  int       // pauses in it
	reason string
	failed map[outbox.Aggregate]struct{} // in a row
}

// left is how long the consumer still has to pause.
func (p *pauser) left() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Until(p.until)
}

// outage begins or prolongs a pause.
func (p *pauser) outage(f *failure) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begin("outage: "+attempt.FirstLine(f.text), pauseMax)
}

func (p *pauser) begin(reason string, top time.Duration) {
	if time.Until(p.until) > 0 {
		return // the same spell, reported by a handler that ran beside the first
	}
	p.times++
	d := pauseMin + attempt.Jitter(pauseMin, top-pauseMin, p.times)
	p.until = time.Now().Add(d)
	p.reason = reason
	if p.since.IsZero() {
		p.since = time.Now()
		p.log.Warn("consumer pauses by itself", "consumer", p.name, "reason", reason, "first_pause", d.Round(time.Millisecond))
	}
}

// failure notes a failed event; many aggregates in a row begin a pause.
func (p *pauser) failure(a outbox.Aggregate) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed == nil {
		p.failed = map[outbox.Aggregate]struct{}{}
	}
	p.failed[a] = struct{}{}
	if len(p.failed) >= stormAfter {
		clear(p.failed)
		p.begin("events of many aggregates fail in a row", stormMax)
	}
}

// success ends the spell, unless it is of an effect that began before the
// pause did: that says nothing about whoever asked for it.
func (p *pauser) success() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.failed)
	if time.Until(p.until) > 0 {
		return
	}
	p.times = 0
	if !p.since.IsZero() {
		p.log.Info("consumer goes on", "consumer", p.name, "paused_for", time.Since(p.since).Round(time.Millisecond))
		p.since, p.reason = time.Time{}, ""
	}
}

// spell says since when and why the consumer pauses by itself.
func (p *pauser) spell() (since time.Time, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.since, p.reason
}
