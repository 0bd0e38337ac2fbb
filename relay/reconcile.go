package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"outlog/outbox"
)

// observed is all that reconcile looks at.
type observed struct {
	logID  string
	cursor Cursor
	tail   Tail
	// last is the message at tail.LastSeq, nil when the stream does not hold it.
	last *Message
	// beyond holds the messages after the cursor, up to a page, when the stream
	// is ahead; nil for one that the stream does not hold.
	beyond []*Message
	// next holds the events after the cursor that belong on the stream, up to as
	// many as beyond; those parked or discarded are not among them.
	next []entry
	// parked holds the positions of those of beyond that are parked at the
	// relay, by event id: they were sent late.
	parked map[string]int64
	// behind is where the log says the stream's last message belongs, when the
	// stream is behind; nil when it does not know.
	behind *Cursor
	// highest is the highest sequence the relay ever had acknowledged.
	highest uint64
}

type action int

const (
	goOn    action = iota // the stream ends where the cursor says
	advance               // it is ahead by rows of the log: move the cursor forward
	rewind                // it has lost its tail: move the cursor back
	rebuild               // it is not the log's: delete it and publish again
)

// plan is what to do about a stream.
type plan struct {
	action   action
	cursor   Cursor        // the new cursor of all but rebuild
	pubs     []publication // what advance found published
	cleared  []string      // ids of parked events among them
	firstSeq uint64        // of the rebuilt stream
	reason   string
}

// seqMargin separates a rebuilt stream from the one before: a publish that an
// earlier relay still has under way expects a sequence below it and is refused.
const seqMargin = 10_000

// reconcile decides, from what was read alone, how the stream and the log's
// cursor come together again: by sequence first, then by content.
func reconcile(o observed) plan {
	again := func(format string, args ...any) plan {
		first := uint64(1)
		if top := max(o.highest, o.cursor.StreamSeq, o.tail.LastSeq); top > 0 {
			first = top + seqMargin
		}
		return plan{action: rebuild, firstSeq: first, reason: fmt.Sprintf(format, args...)}
	}
	ours := func(m *Message, id string) bool { return m.LogID == o.logID && m.Record.EventID == id }
	switch {
	case !o.tail.Exists:
		return again("there is no stream")
	case o.tail.missing() > 0:
		return again("%d messages are missing between its first, %d, and its last, %d", o.tail.missing(), o.tail.FirstSeq, o.tail.LastSeq)
	case o.tail.LastSeq == o.cursor.StreamSeq:
		if o.last != nil && !ours(o.last, o.cursor.EventID) {
			return again("its message %d is %q, the log published %q", o.tail.LastSeq, o.last.Record.EventID, o.cursor.EventID)
		}
		if o.last == nil && o.tail.FirstSeq <= o.tail.LastSeq {
			return again("its last message %d cannot be read", o.tail.LastSeq)
		}
		p := plan{action: goOn, cursor: o.cursor}
		if o.last != nil {
			p.cursor.EventPosition = o.last.Record.Position
		}
		return p
	case o.tail.LastSeq > o.cursor.StreamSeq:
		return o.ahead(again)
	default:
		switch {
		case o.behind == nil:
			return again("it ends at %d and the log no longer knows what was there", o.tail.LastSeq)
		case o.last != nil && !ours(o.last, o.behind.EventID):
			return again("its message %d is %q, the log published %q", o.tail.LastSeq, o.last.Record.EventID, o.behind.EventID)
		case o.last == nil && o.tail.FirstSeq <= o.tail.LastSeq:
			return again("its last message %d cannot be read", o.tail.LastSeq)
		}
		return plan{action: rewind, cursor: *o.behind, reason: "it has lost its tail"}
	}
}

// ahead plans for a stream that holds more than the cursor knows: events that
// the log holds next, in their order, and parked ones in between.
func (o *observed) ahead(again func(string, ...any) plan) plan {
	p := plan{action: advance, cursor: o.cursor, reason: "it holds rows that were published just before a crash"}
	late := false // the message before was a parked event
	i := 0
	for _, m := range o.beyond {
		seq := p.cursor.StreamSeq + 1
		if m == nil {
			return again("its message %d cannot be read", seq)
		}
		position, parked := o.parked[m.Record.EventID]
		switch {
		case m.LogID != o.logID:
			return again("its message %d is not of this log", seq)
		case i < len(o.next) && m.Record.EventID == o.next[i].EventID:
			e := o.next[i]
			e.joins = e.joins && !late
			i++
			p.pubs = appendPublication(p.pubs, publish(e, seq))
			p.cursor.Position, p.cursor.EventPosition, late = e.Position, e.Position, false
		// It was sent when the cursor had passed it, so nothing before it is left;
		// a power loss may have taken that cursor back.
		case parked && (i == len(o.next) || o.next[i].Position > position):
			p.cursor.Position = max(p.cursor.Position, position)
			p.pubs = append(p.pubs, publish(entry{Record: outbox.Record{Position: position}}, seq))
			p.cleared = append(p.cleared, m.Record.EventID)
			p.cursor.EventPosition, late = position, true
			delete(o.parked, m.Record.EventID) // a second one would be a ghost
		default:
			return again("its message %d, %q, is not what the log holds after position %d", seq, m.Record.EventID, p.cursor.Position)
		}
		p.cursor.EventID, p.cursor.StreamSeq = m.Record.EventID, seq
	}
	return p
}

// observe reads what reconcile needs.
func (r *Relay) observe(ctx context.Context) (o observed, err error) {
	o = observed{logID: r.log.ID(), cursor: r.cursor}
	if o.tail, err = r.pub.Tail(ctx); err != nil {
		return o, err
	}
	if o.highest, err = r.highestSeq(ctx); err != nil || !o.tail.Exists {
		return o, err
	}
	if o.tail.LastSeq >= o.tail.FirstSeq {
		if o.last, err = r.get(ctx, o.tail.LastSeq); err != nil {
			return o, err
		}
	}
	switch last := o.tail.LastSeq; {
	case last > o.cursor.StreamSeq:
		n := min(last-o.cursor.StreamSeq, uint64(r.opts.WindowRows))
		if o.next, err = r.ahead(ctx, o.cursor, int(n)); err != nil {
			return o, err
		}
		for i := range n {
			m, err := r.get(ctx, o.cursor.StreamSeq+1+i)
			if err != nil {
				return o, err
			}
			o.beyond = append(o.beyond, m)
			if m == nil {
				break
			}
		}
		if o.parked, err = r.parkedAmong(ctx, o.beyond); err != nil {
			return o, err
		}
	case last < o.cursor.StreamSeq:
		c, found, err := r.lookBehind(ctx, last)
		if err != nil {
			return o, err
		}
		if found {
			o.behind = &c
		}
	}
	return o, nil
}

// ahead reads the next n events after a cursor that belong on the stream.
func (r *Relay) ahead(ctx context.Context, c Cursor, n int) (next []entry, err error) {
	joins := true
	for len(next) < n {
		page, err := r.log.Read(ctx, c.Position, outbox.Page{Rows: n})
		if err != nil || len(page) == 0 {
			return next, err
		}
		p, err := r.passedIn(ctx, page)
		if err != nil {
			return nil, err
		}
		for _, e := range page {
			if p[e.Position] == finished {
				joins = false
				continue
			}
			next = append(next, entry{e, joins})
			joins = true
		}
		c.Position = page[len(page)-1].Position
	}
	return next[:n], nil
}

// get reads a message; nil when the stream does not hold it.
func (r *Relay) get(ctx context.Context, seq uint64) (*Message, error) {
	m, err := r.pub.Get(ctx, seq)
	if errors.Is(err, ErrNoMessage) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &m, nil
}

// settle brings stream and cursor together. When it returns nil the stream
// ends exactly at the cursor. An owner that was taken over touches nothing: it
// would compare the stream with a cursor of long ago.
func (r *Relay) settle(ctx context.Context) error {
	for {
		if err := r.guard(ctx, r.db.Reader()); err != nil {
			return fmt.Errorf("look at the stream: %w", err)
		}
		o, err := r.observe(ctx)
		if err != nil {
			return fmt.Errorf("look at the stream: %w", err)
		}
		p := reconcile(o)
		switch p.action {
		case goOn:
			r.setCursor(p.cursor)
			return nil
		case advance:
			for i := range p.pubs {
				p.pubs[i].at = r.db.Now().UnixMicro()
			}
			err = r.store(ctx, p.cursor, addPublications(p.pubs), clearParked(p.cleared))
		case rewind:
			err = r.store(ctx, p.cursor, cutAfterSeq(p.cursor))
		case rebuild:
			if p.cursor, err = r.rebuildFrom(ctx, p.firstSeq); err == nil {
				if r.opts.External && o.tail.Msgs > 0 {
					return &ForeignStreamError{Stream: r.opts.Stream, Reason: p.reason, Tail: o.tail, NextSeq: p.firstSeq, After: p.cursor.Position}
				}
				if err = r.pub.Recreate(ctx, p.firstSeq); err == nil {
					err = r.hook("relay.after-recreate")
				}
				if err == nil {
					err = r.store(ctx, p.cursor, cutAfterPosition(p.cursor))
				}
			}
		}
		if err != nil {
			return err
		}
		if !(p.action == rebuild && o.highest == 0 && !o.tail.Exists) { // the first start is not news
			r.opts.Logger.Info("stream and log brought together", "action", p.action.String(), "because", p.reason,
				"from_position", o.cursor.Position, "to_position", p.cursor.Position, "stream_seq", p.cursor.StreamSeq)
			r.update(func(s *Status) { s.Reconciled++ })
		}
		r.doubt()
		r.lookAt = time.Time{}
		r.setCursor(p.cursor)
	}
}

// rebuildFrom returns the cursor before the first event that a new stream
// should hold: the oldest one in the log that MaxAge would keep.
func (r *Relay) rebuildFrom(ctx context.Context, firstSeq uint64) (Cursor, error) {
	c := Cursor{StreamSeq: firstSeq - 1}
	query, args := `SELECT pruned_through FROM outlog_meta`, []any(nil)
	if r.opts.MaxAge > 0 {
		// created_at has no index; this reads oldest first, once per rebuild. From
		// the other end, one event written by a wrong clock would hide all before it.
		// What was never published is not too old, whatever the clock said of it.
		query = `SELECT max(pruned_through, min(?2, coalesce((SELECT position FROM outbox WHERE created_at >= ?1 ORDER BY position LIMIT 1) - 1,
			(SELECT max(position) FROM outbox), pruned_through))) FROM outlog_meta`
		args = append(args, r.db.Now().Add(-r.opts.MaxAge).UnixMicro(), r.cursor.Position)
	}
	err := r.db.Reader().QueryRowContext(ctx, query, args...).Scan(&c.Position)
	c.EventPosition = c.Position
	return c, err
}

func (a action) String() string {
	return [...]string{"go on", "advance", "rewind", "rebuild"}[a]
}

// backoff is a delay with full jitter that doubles from 10 ms up to top.
func backoff(failures int, top time.Duration, random func(int64) int64) time.Duration {
	d := top
	if failures < 20 {
		d = min(top, 10*time.Millisecond<<failures)
	}
	return time.Duration(random(int64(d) + 1))
}
