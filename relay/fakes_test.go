package relay_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/outbox"
	"outlog/relay"
	"outlog/store"
)

// memory is a stream without a broker, for tests that need a thousand of them
// or an hour of its absence.
type memory struct {
	mu     sync.Mutex
	exists bool
	first  uint64
	msgs   []relay.Message
	down   error // what Tail answers, if not nil
}

func (s *memory) last() uint64 { return s.first + uint64(len(s.msgs)) - 1 }

// stored is how many messages it holds, also while a relay runs.
func (s *memory) stored() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.msgs)
}

func (s *memory) Tail(context.Context) (relay.Tail, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down != nil || !s.exists {
		return relay.Tail{}, s.down
	}
	return relay.Tail{Exists: true, FirstSeq: s.first, LastSeq: s.last(), Msgs: uint64(len(s.msgs))}, nil
}

func (s *memory) Get(_ context.Context, seq uint64) (relay.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if seq < s.first || seq > s.last() {
		return relay.Message{}, relay.ErrNoMessage
	}
	return s.msgs[seq-s.first], nil
}

func (s *memory) Append(_ context.Context, base uint64, msgs []relay.Message) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down != nil {
		return 0, s.down
	}
	if base != s.last() {
		return 0, relay.ErrConflict
	}
	s.msgs = append(s.msgs, msgs...)
	return len(msgs), nil
}

func (s *memory) Recreate(_ context.Context, firstSeq uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.exists, s.first, s.msgs = true, firstSeq, nil
	return nil
}

func (s *memory) setDown(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = err
}

// cut loses all but the first n messages.
func (s *memory) cut(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.msgs = s.msgs[:min(n, len(s.msgs))]
}

// scripted stores what comes before the first message with a fault, and
// returns the fault.
type scripted struct {
	relay.Publisher
	mu    sync.Mutex
	fault func(m *relay.Message) error
	sent  int // appends
}

func (p *scripted) Append(ctx context.Context, base uint64, msgs []relay.Message) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent++
	for i := range msgs {
		var fault error
		if p.fault != nil {
			fault = p.fault(&msgs[i])
		}
		if fault == nil {
			continue
		}
		if i == 0 {
			return 0, fault
		}
		n, err := p.Publisher.Append(ctx, base, msgs[:i])
		return n, errOr(err, fault)
	}
	return p.Publisher.Append(ctx, base, msgs)
}

func (p *scripted) set(fault func(m *relay.Message) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = fault
}

var errTimeout = fmt.Errorf("%w: timed out", relay.ErrOutage)

func refused(m *relay.Message) error {
	return &relay.RefusedError{Position: m.Record.Position, Code: 10054, Reason: "message size exceeds maximum allowed"}
}

// only applies a fault to the n-th event of an aggregate.
func only(aggregate string, version int64, fault func(m *relay.Message) error) func(m *relay.Message) error {
	return func(m *relay.Message) error {
		if m.Record.AggregateID == aggregate && m.Record.AggregateVersion == version {
			return fault(m)
		}
		return nil
	}
}

func timesOut(*relay.Message) error { return errTimeout }

// of adds one event to each of these aggregates, in this order.
func (r *rig) of(aggregates ...string) {
	r.t.Helper()
	r.events(nil, aggregates...)
}

// big adds one event that a broker with a small MaxMessage refuses.
func (r *rig) big(aggregate string) {
	r.t.Helper()
	r.events(bytes.Repeat([]byte(" "), 100<<10), aggregate)
}

func (r *rig) events(pad []byte, aggregates ...string) {
	r.t.Helper()
	require.NoError(r.t, r.db.Update(r.t.Context(), func(tx *store.Tx) error {
		for _, a := range aggregates {
			_, err := r.log.Append(r.t.Context(), tx, outbox.Event{AggregateType: "order", AggregateID: a, Type: "Placed", Payload: append([]byte("1"), pad...)})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	r.appended += len(aggregates)
}

// start runs a relay until stop is called.
func (r *rig) start(pub relay.Publisher, o relay.Options) (re *relay.Relay, stop func()) {
	re, err := relay.New(r.db, r.log, pub, o)
	require.NoError(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- re.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(r.t, <-done)
	})
	r.t.Cleanup(stop)
	return re, stop
}

// eventually waits for a number in the database.
func (r *rig) eventually(want int, query string) {
	r.t.Helper()
	got := -1
	require.Eventually(r.t, func() bool {
		return r.db.Reader().QueryRow(query).Scan(&got) == nil && got == want
	}, 10*time.Second, time.Millisecond, query)
}

// list returns the first column of a query.
func (r *rig) list(query string) (out []string) {
	r.t.Helper()
	rows, err := r.db.Reader().Query(query)
	require.NoError(r.t, err)
	defer rows.Close()
	for rows.Next() {
		var s string
		require.NoError(r.t, rows.Scan(&s))
		out = append(out, s)
	}
	require.NoError(r.t, rows.Err())
	return out
}

// parked lists what is parked at the relay: aggregate/version state attempts.
func (r *rig) parked() []string {
	r.t.Helper()
	return r.list(`SELECT o.aggregate_id || '/' || o.aggregate_version || ' ' || k.state || ' ' || k.attempts
		FROM outlog_parked k JOIN outbox o USING (event_id) WHERE k.consumer = 'relay' ORDER BY k.position`)
}

// stream returns what pub holds, as aggregate/version, after it has proved that
// each event is there at most once, in order of versions, at the sequence that
// outbox_status gives, with the position of the one before it; and that exactly
// the published events are there.
func (r *rig) stream(pub relay.Publisher) (out []string) {
	r.t.Helper()
	ctx := context.Background()
	tail, err := pub.Tail(ctx)
	require.NoError(r.t, err)
	versions := map[string]int64{}
	var prev int64
	var ids []string
	for seq := tail.FirstSeq; seq <= tail.LastSeq; seq++ {
		m, err := pub.Get(ctx, seq)
		require.NoError(r.t, err)
		e := m.Record
		require.Greater(r.t, e.AggregateVersion, versions[e.AggregateID], "%s at sequence %d is out of order", e.AggregateID, seq)
		versions[e.AggregateID] = e.AggregateVersion
		if prev != 0 {
			require.Equal(r.t, prev, m.Prev, "sequence %d", seq)
		}
		prev = e.Position
		ids = append(ids, e.EventID)
		out = append(out, fmt.Sprintf("%s/%d", e.AggregateID, e.AggregateVersion))
	}
	require.Equal(r.t, r.list(`SELECT event_id FROM outbox_status WHERE state = 'published' ORDER BY stream_seq`), ids)
	if len(ids) > 0 {
		require.Equal(r.t, []string{fmt.Sprint(tail.FirstSeq, " ", tail.LastSeq)},
			r.list(`SELECT min(stream_seq) || ' ' || max(stream_seq) FROM outbox_status WHERE state = 'published'`))
	}
	return out
}

// lines is a log that can be counted.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *lines) with(text string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Count(l.buf.Bytes(), []byte(text))
}

func sorted(s []string) []string {
	slices.Sort(s)
	return s
}
