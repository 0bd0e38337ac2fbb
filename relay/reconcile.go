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
	// next holds the log's rows after the cursor, as many as beyond.
	next []outbox.Record
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
	cursor   Cursor // the new cursor of advance and rewind
	advanced int    // rows that advance passes
	firstSeq uint64 // of the rebuilt stream
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
	case o.tail.LastSeq == o.cursor.StreamSeq:
		if o.last != nil && !ours(o.last, o.cursor.EventID) {
			return again("its message %d is %q, the log published %q", o.tail.LastSeq, o.last.Record.EventID, o.cursor.EventID)
		}
		if o.last == nil && o.tail.FirstSeq <= o.tail.LastSeq {
			return again("its last message %d cannot be read", o.tail.LastSeq)
		}
		return plan{action: goOn, cursor: o.cursor}
	case o.tail.LastSeq > o.cursor.StreamSeq:
		p := plan{action: advance, cursor: o.cursor, reason: "it holds rows that were published just before a crash"}
		for i, m := range o.beyond {
			seq := o.cursor.StreamSeq + uint64(i) + 1
			if m == nil {
				return again("its message %d cannot be read", seq)
			}
			if i >= len(o.next) || !ours(m, o.next[i].EventID) {
				return again("its message %d, %q, is not what the log holds after position %d", seq, m.Record.EventID, p.cursor.Position)
			}
			p.cursor = Cursor{Position: o.next[i].Position, EventID: o.next[i].EventID, StreamSeq: seq}
			p.advanced++
		}
		return p
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
		if o.next, err = r.log.Read(ctx, o.cursor.Position, outbox.Page{Rows: int(n)}); err != nil {
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
// ends exactly at the cursor.
func (r *Relay) settle(ctx context.Context) error {
	for {
		o, err := r.observe(ctx)
		if err != nil {
			return fmt.Errorf("look at the stream: %w", err)
		}
		p := reconcile(o)
		switch p.action {
		case goOn:
			return nil
		case advance:
			pub := publication{o.next[0].Position, p.cursor.Position, o.cursor.StreamSeq + 1, p.cursor.StreamSeq, r.db.Now().UnixMicro()}
			err = r.store(ctx, p.cursor, []publication{pub}, false)
		case rewind:
			err = r.store(ctx, p.cursor, nil, true)
		case rebuild:
			if p.cursor, err = r.rebuildFrom(ctx, p.firstSeq); err == nil {
				if err = r.pub.Recreate(ctx, p.firstSeq); err == nil {
					err = r.store(ctx, p.cursor, nil, true)
				}
			}
		}
		if err != nil {
			return err
		}
		if !(p.action == rebuild && o.highest == 0 && !o.tail.Exists) { // the first start is not news
			r.opts.Logger.Info("stream and log brought together", "action", p.action.String(), "because", p.reason,
				"from_position", o.cursor.Position, "to_position", p.cursor.Position, "stream_seq", p.cursor.StreamSeq)
			r.reconciled.Add(1)
		}
		r.setCursor(p.cursor)
	}
}

// rebuildFrom returns the cursor before the first event that a new stream
// should hold: the oldest one in the log that MaxAge would keep.
func (r *Relay) rebuildFrom(ctx context.Context, firstSeq uint64) (Cursor, error) {
	c := Cursor{StreamSeq: firstSeq - 1}
	query, args := `SELECT pruned_through FROM outlog_meta`, []any(nil)
	if r.opts.MaxAge > 0 {
		// created_at has no index; this reads newest first, once per rebuild, and
		// only as far back as the stream reaches.
		query = `SELECT coalesce((SELECT position FROM outbox WHERE created_at < ? ORDER BY position DESC LIMIT 1),
			(SELECT pruned_through FROM outlog_meta))`
		args = append(args, r.db.Now().Add(-r.opts.MaxAge).UnixMicro())
	}
	err := r.db.Reader().QueryRowContext(ctx, query, args...).Scan(&c.Position)
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
