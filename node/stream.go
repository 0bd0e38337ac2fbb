package node

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"outlog/relay"
	"outlog/store"
)

// streamCheck is the name of the check that compares the stream with the log.
const streamCheck = "events on the stream"

// FaultKind is one way in which a stream can differ from its log.
type FaultKind string

const (
	FaultTail  FaultKind = "tail"  // the end is missing: the log has published more
	FaultHole  FaultKind = "hole"  // sequences between the first and the last are missing
	FaultGhost FaultKind = "ghost" // a message of this log with an event that the log does not have
	FaultStray FaultKind = "stray" // a message that no relay of this log wrote
	FaultOrder FaultKind = "order" // an event of the log in a place that is not its own
)

// StreamFault is a place where stream and log differ.
type StreamFault struct {
	Kind          FaultKind `json:"kind"`
	FirstSeq      uint64    `json:"first_seq"`
	LastSeq       uint64    `json:"last_seq"`
	FirstPosition int64     `json:"first_position,omitempty"` // of the events concerned, as far as they are known
	LastPosition  int64     `json:"last_position,omitempty"`
	EventID       string    `json:"event_id,omitempty"` // that the message bears
	Detail        string    `json:"detail"`
}

// StreamResult is what a comparison of the stream with the log has found.
type StreamResult struct {
	store.Result
	Found  map[FaultKind]uint64 `json:"found,omitempty"`  // messages, or for tail and hole missing sequences
	Faults []StreamFault        `json:"faults,omitempty"` // the first few of each kind, by sequence
}

// maxFaults is how many faults of a kind are described.
const maxFaults = 5

func (r *StreamResult) add(f StreamFault, format string, args ...any) {
	f.Detail = fmt.Sprintf(format, args...)
	if r.Found == nil {
		r.Found = map[FaultKind]uint64{}
	}
	r.Found[f.Kind] += f.LastSeq - f.FirstSeq + 1
	described := 0
	for _, o := range r.Faults {
		if o.Kind == f.Kind {
			described++
		}
	}
	if described < maxFaults {
		r.Faults = append(r.Faults, f)
	}
}

// conclude sets OK and Detail.
func (r *StreamResult) conclude(agree uint64, tail relay.Tail) {
	slices.SortStableFunc(r.Faults, func(a, b StreamFault) int { return cmp.Compare(a.FirstSeq, b.FirstSeq) })
	if r.OK = len(r.Faults) == 0; r.OK && !tail.Exists {
		r.Detail = "nothing is published, and there is no stream"
		return
	}
	if r.OK {
		r.Detail = fmt.Sprintf("%d events at their sequences, from %d to %d", agree, tail.FirstSeq, tail.LastSeq)
		return
	}
	var parts []string
	for _, k := range []FaultKind{FaultTail, FaultHole, FaultGhost, FaultStray, FaultOrder} {
		if n := r.Found[k]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, k))
		}
	}
	r.Detail = fmt.Sprintf("%s: %s", strings.Join(parts, ", "), r.Faults[0].Detail)
}

// VerifyStream compares the stream with the log: each event that the relay has
// published and that the stream's limits still hold is there, at its sequence;
// and the stream holds nothing else. It names what differs. Events published
// while it runs are left out. It reads headers only, about 5 µs an event, and
// holds no snapshot of the database.
func (n *Node) VerifyStream(ctx context.Context) (StreamResult, error) {
	if n.broker == nil {
		return StreamResult{Result: store.Result{Name: streamCheck, OK: true, Detail: "the node has no broker"}}, nil
	}
	for try := 1; ; try++ {
		before := n.relay.Status().Reconciled
		r, err := n.verifyStream(ctx)
		if n.relay.Status().Reconciled == before || try == 3 {
			return r, err
		} // else the stream was another one at the end than at the beginning
	}
}

func (n *Node) verifyStream(ctx context.Context) (r StreamResult, err error) {
	r.Name = streamCheck
	// In this order: the stream is never behind what the relay had stored before.
	expected, err := readPublished(ctx, n.db.Reader())
	if err != nil {
		return r, err
	}
	tail, err := n.broker.Tail(ctx)
	if err != nil {
		return r, err
	}
	expected.from(tail.FirstSeq)
	a := &audit{node: n, result: &r, tail: tail, expected: expected, seq: max(tail.FirstSeq, 1) - 1}
	if tail.Exists {
		err = a.run(ctx)
	}
	if err == nil {
		err = a.end(ctx)
	}
	r.conclude(a.agree, tail)
	return r, err
}

// audit is one pass over the stream.
type audit struct {
	node     *Node
	result   *StreamResult
	tail     relay.Tail // when it began
	expected *published
	seq      uint64 // of the last message seen, or passed over
	highest  int64  // position seen
	agree    uint64 // messages that are where they belong
	holes    []StreamFault
}

func (a *audit) run(ctx context.Context) error {
	err := a.node.broker.Scan(ctx, func(seq uint64, m relay.Message) error {
		if seq > a.tail.LastSeq {
			return nil
		}
		if err := a.passTo(ctx, seq); err != nil {
			return err
		}
		a.seq = seq
		return a.message(ctx, seq, &m)
	})
	if err == nil {
		err = a.passTo(ctx, a.tail.LastSeq+1)
	}
	if err != nil || len(a.holes) == 0 {
		return err
	}
	now, err := a.node.broker.Tail(ctx)
	for _, h := range a.holes {
		if h.LastSeq >= now.FirstSeq { // else it has expired meanwhile
			a.hole(h)
		}
	}
	return err
}

// maxHoles is how many holes are kept to see whether they have expired.
const maxHoles = 1000

// passTo notes the hole before seq, if there is one.
func (a *audit) passTo(ctx context.Context, seq uint64) error {
	first, last, err := a.expected.skipTo(ctx, seq)
	if err != nil || a.seq+1 >= seq {
		return err
	}
	h := StreamFault{Kind: FaultHole, FirstSeq: a.seq + 1, LastSeq: seq - 1, FirstPosition: first, LastPosition: last}
	if len(a.holes) < maxHoles {
		a.holes = append(a.holes, h)
	} else {
		a.hole(h)
	}
	return nil
}

func (a *audit) hole(h StreamFault) {
	a.result.add(h, "sequences %d to %d are missing on the stream%s", h.FirstSeq, h.LastSeq, h.events())
}

// end looks whether the stream ends too early.
func (a *audit) end(ctx context.Context) error {
	if a.tail.LastSeq >= a.expected.through {
		return nil
	}
	f := StreamFault{Kind: FaultTail, FirstSeq: a.tail.LastSeq + 1, LastSeq: a.expected.through}
	var err error
	if f.FirstPosition, f.LastPosition, err = a.expected.skipTo(ctx, a.expected.through+1); err != nil {
		return err
	}
	what := "the stream ends at sequence %d, the log has published through %d%s"
	if !a.tail.Exists {
		what = "there is no stream: it ends at sequence %d, the log has published through %d%s"
	}
	a.result.add(f, what, a.tail.LastSeq, a.expected.through, f.events())
	return nil
}

// events names those that a fault concerns, if they are known.
func (f *StreamFault) events() string {
	if f.FirstPosition == 0 {
		return ""
	}
	return fmt.Sprintf(": the events at positions %d to %d", f.FirstPosition, f.LastPosition)
}

// message judges one.
func (a *audit) message(ctx context.Context, seq uint64, m *relay.Message) error {
	want, published, err := a.expected.at(ctx, seq)
	if err != nil {
		return err
	}
	e := &m.Record
	f := StreamFault{FirstSeq: seq, LastSeq: seq, FirstPosition: e.Position, LastPosition: e.Position, EventID: e.EventID}
	switch {
	case m.LogID != a.node.log.ID():
		f = StreamFault{Kind: FaultStray, FirstSeq: seq, LastSeq: seq, EventID: e.EventID}
		a.result.add(f, "sequence %d holds a message that no relay of this log wrote", seq)
		return nil
	case published && want.eventID == e.EventID && want.position == e.Position:
		a.agree++
		a.highest = max(a.highest, e.Position)
		return nil
	case e.Position <= a.expected.pruned:
		return nil // nobody knows any more at which sequence a pruned event was
	}
	known, late, err := a.node.look(ctx, e.Position, e.EventID)
	switch {
	case err != nil:
		return err
	case !known:
		f.Kind = FaultGhost
		a.result.add(f, "sequence %d holds event %q at position %d, which the log does not have: the log has lost it, or another writer was here", seq, e.EventID, e.Position)
	case published:
		f.Kind = FaultOrder
		a.result.add(f, "sequence %d holds the event at position %d, the log published the one at position %d there", seq, e.Position, want.position)
	case seq <= a.expected.through:
		f.Kind = FaultOrder
		a.result.add(f, "sequence %d holds the event at position %d, the log published nothing there", seq, e.Position)
	case e.Position <= a.highest && !late: // published after the cursor was stored
		f.Kind = FaultOrder
		a.result.add(f, "sequence %d holds the event at position %d, behind the one at position %d", seq, e.Position, a.highest)
	default:
		a.agree++
		a.highest = max(a.highest, e.Position)
	}
	return nil
}

// look reports whether the log has this event at this position, and whether it
// may come late: it is, or was until now, parked at the relay.
func (n *Node) look(ctx context.Context, position int64, eventID string) (known, late bool, err error) {
	err = n.db.Reader().QueryRowContext(ctx, `SELECT
		EXISTS (SELECT 1 FROM outbox WHERE position = ?1 AND event_id = ?2) OR ?1 <= (SELECT pruned_through FROM outlog_meta),
		EXISTS (SELECT 1 FROM outlog_parked WHERE consumer = 'relay' AND event_id = ?2)
		OR EXISTS (SELECT 1 FROM outlog_publications WHERE first_position = ?1)`, position, eventID).Scan(&known, &late)
	return known, late, err
}
