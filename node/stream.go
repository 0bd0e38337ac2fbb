package node

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"outlog/relay"
	"outlog/store"
)

// streamCheck is the name of the check that compares the stream with the log.
const streamCheck = "events on the stream"

// VerifyStream compares the stream with the log: each event that the relay has
// published and that the stream's limits still hold is there, at its sequence;
// and the stream holds nothing else. Events published while it runs are left
// out. It reads headers only, about 5 µs an event.
func (n *Node) VerifyStream(ctx context.Context) (store.Result, error) {
	r := store.Result{Name: streamCheck}
	if n.broker == nil {
		r.OK, r.Detail = true, "the node has no broker"
		return r, nil
	}
	// In this order: the stream is never behind what the relay had stored before.
	var stored uint64
	if err := n.db.Reader().QueryRowContext(ctx, `SELECT stream_seq FROM outlog_relay WHERE name = 'main'`).Scan(&stored); err != nil {
		return r, err
	}
	tail, err := n.broker.Tail(ctx)
	if err != nil {
		return r, err
	}
	if tail.LastSeq < stored {
		r.Detail = fmt.Sprintf("the stream ends at sequence %d, the log has published through %d", tail.LastSeq, stored)
		return r, nil
	}
	expected, err := n.published(ctx, tail)
	if err != nil {
		return r, err
	}
	defer expected.close()
	var checked int64
	err = n.broker.Scan(ctx, func(seq uint64, m relay.Message) error {
		// Nobody knows any more at which sequence a pruned event was.
		if seq > tail.LastSeq || m.LogID == n.log.ID() && m.Record.Position <= expected.pruned {
			return nil
		}
		want, ok, err := expected.next()
		switch {
		case err != nil:
			return err
		case !ok && seq <= expected.through:
			return mismatch("the stream holds %q at sequence %d, the log has nothing there", m.Record.EventID, seq)
		case !ok: // published after the cursor was stored
			return n.inLog(ctx, seq, m)
		case want.seq != seq:
			return mismatch("the event at position %d is not on the stream at sequence %d", want.position, want.seq)
		case m.LogID != n.log.ID() || m.Record.EventID != want.eventID:
			return mismatch("the stream holds %q at sequence %d, the log published %q", m.Record.EventID, seq, want.eventID)
		}
		checked++
		return nil
	})
	if err == nil {
		if want, ok, e := expected.next(); e != nil {
			err = e
		} else if ok {
			err = mismatch("the event at position %d is not on the stream at sequence %d", want.position, want.seq)
		}
	}
	if m, is := errors.AsType[*mismatchError](err); is {
		r.Detail = m.Error()
		return r, nil
	}
	r.OK, r.Detail = err == nil, fmt.Sprintf("%d events at their sequences, from %d to %d", checked, tail.FirstSeq, tail.LastSeq)
	return r, err
}

type mismatchError struct{ error }

func mismatch(format string, args ...any) error {
	return &mismatchError{fmt.Errorf(format, args...)}
}

// inLog makes sure that a message is an event of the log at its position, or
// one that was pruned.
func (n *Node) inLog(ctx context.Context, seq uint64, m relay.Message) error {
	var known bool
	err := n.db.Reader().QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM outbox WHERE position = ?1 AND event_id = ?2)
		OR ?1 <= (SELECT pruned_through FROM outlog_meta)`, m.Record.Position, m.Record.EventID).Scan(&known)
	if err == nil && (!known || m.LogID != n.log.ID()) {
		err = mismatch("the stream holds %q at sequence %d, which the log does not have: the log has lost it, or another writer was here", m.Record.EventID, seq)
	}
	return err
}

// published iterates over the events that should be on the stream: those in
// publications from the stream's first sequence on, in the order of sequences;
// one that was parked at the relay comes later than its position.
type published struct {
	tx      *sql.Tx
	rows    *sql.Rows
	through uint64 // the relay's stored sequence
	pruned  int64  // events up to this position are not among them
	seq     uint64 // of the next row within the current publication
	end     uint64
}

type publishedEvent struct {
	position int64
	eventID  string
	seq      uint64
}

func (n *Node) published(ctx context.Context, tail relay.Tail) (*published, error) {
	tx, err := n.db.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	p := &published{tx: tx}
	if err = tx.QueryRowContext(ctx, `SELECT stream_seq, pruned_through FROM outlog_relay, outlog_meta WHERE name = 'main'`).
		Scan(&p.through, &p.pruned); err == nil {
		p.rows, err = tx.QueryContext(ctx, `SELECT o.position, o.event_id,
				p.last_stream_seq - (row_number() OVER (PARTITION BY p.first_position ORDER BY o.position DESC) - 1)
			FROM outlog_publications p JOIN outbox o ON o.position BETWEEN p.first_position AND p.last_position
			WHERE p.last_stream_seq >= ?1 AND p.first_stream_seq <= ?2 ORDER BY p.first_stream_seq, o.position`, tail.FirstSeq, tail.LastSeq)
	}
	if err != nil {
		return nil, errors.Join(err, tx.Rollback())
	}
	p.seq, p.end = tail.FirstSeq, min(tail.LastSeq, p.through)
	return p, nil
}

// next returns the next event that should be on the stream.
func (p *published) next() (e publishedEvent, ok bool, err error) {
	for p.rows.Next() {
		if err := p.rows.Scan(&e.position, &e.eventID, &e.seq); err != nil {
			return e, false, err
		}
		if e.seq >= p.seq && e.seq <= p.end {
			return e, true, nil
		}
	}
	return e, false, p.rows.Err()
}

func (p *published) close() {
	_ = p.rows.Close()
	_ = p.tx.Rollback()
}
