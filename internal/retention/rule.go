package retention

import (
	"context"
	"errors"
	"fmt"
	"time"

	"outlog/outbox"
)

// Rule says which events are not wanted any more. An event goes when any of
// the three says so, and never before an older one.
type Rule struct {
	OlderThan time.Duration // 0: age does not matter
	MaxBytes  int64         // of the log, as Size counts; 0: size does not matter
	Through   int64         // position; 0: none
}

// ErrNoRule is returned for a Rule that lets nothing go.
var ErrNoRule = errors.New("nothing says what to prune: name an age, a size or a position")

func (r Rule) check() error {
	if r.OlderThan < 0 || r.MaxBytes < 0 || r.Through < 0 {
		return fmt.Errorf("%w; it is not negative", ErrNoRule)
	}
	if r == (Rule{}) {
		return ErrNoRule
	}
	return nil
}

// eventBytes is what an event takes beside payload and headers, about: its
// other columns, its indexes, its inbox rows.
const eventBytes = 256

// wrongClock is how far in the future an event's time must lie to say nothing
// about its age.
const wrongClock = time.Hour

// expired returns the leading events of a page that the rule lets go. size is
// that of the whole log, page included.
//
// The log's order is the order of the commits. So an event whose time lies in
// the future, because a wrong clock wrote it, is at least as old as the next
// one with a believable time: it goes when that one does, and does not keep
// everything behind it for years.
func (r Rule) expired(ctx context.Context, log *outbox.Log, page []outbox.Extent, size int64, now time.Time) ([]outbox.Extent, error) {
	cutoff := now.Add(-r.OlderThan)
	n := 0
	for i, e := range page {
		size -= e.Bytes + eventBytes
		switch {
		case e.Position <= r.Through, r.MaxBytes > 0 && size+e.Bytes+eventBytes > r.MaxBytes:
			n = i + 1
		case r.OlderThan == 0:
			return page[:n], nil
		case e.CreatedAt.After(now.Add(wrongClock)):
			continue
		case e.CreatedAt.Before(cutoff):
			n = i + 1
		default:
			return page[:n], nil
		}
	}
	if n == len(page) || r.OlderThan == 0 {
		return page[:n], nil
	}
	at, found, err := log.NextBefore(ctx, page[len(page)-1].Position, now.Add(wrongClock))
	if err == nil && found && at.Before(cutoff) {
		n = len(page)
	}
	return page[:n], err
}

// sizer adds up the log, and then only what is new in it.
type sizer struct {
	log           *outbox.Log
	known         bool
	from, through int64 // the events counted: those after from, up to through
	bytes         int64
}

// sizePage is how many events are added up at a time.
const sizePage = 10_000

// size returns the bytes of the log: payloads, headers, and 256 for each event.
func (s *sizer) size(ctx context.Context) (int64, error) {
	horizon, err := s.log.Horizon(ctx)
	if err != nil {
		return 0, err
	}
	if !s.known || s.from != horizon { // somebody else has pruned
		*s = sizer{log: s.log, known: true, from: horizon, through: horizon}
	}
	for {
		page, err := s.log.Extents(ctx, s.through, sizePage)
		if err != nil || len(page) == 0 {
			return s.bytes, err
		}
		for _, e := range page {
			s.bytes += e.Bytes + eventBytes
		}
		s.through = page[len(page)-1].Position
	}
}

// pruned takes events off the sum.
func (s *sizer) pruned(events []outbox.Extent) {
	for _, e := range events {
		s.bytes -= e.Bytes + eventBytes
	}
	s.from = events[len(events)-1].Position
	s.through = max(s.through, s.from)
}

// Size adds up the log: payloads, headers, and 256 bytes for each event. Cost:
// it reads every event's row, about 1 µs each.
func Size(ctx context.Context, log *outbox.Log) (int64, error) {
	return (&sizer{log: log}).size(ctx)
}
