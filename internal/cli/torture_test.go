package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/examples/orders"
)

// TestExpectedAfterRestore works out what must be there after older copies of
// the database were put back.
func TestExpectedAfterRestore(t *testing.T) {
	at := func(second int) time.Time { return time.Unix(int64(second), 0) }
	told := func(event, order string, run, second int) receipt {
		return receipt{answer{orders.Receipt{OrderID: order, EventID: event}, run}, at(second)}
	}
	rec := func(placed []receipt, cancelled ...receipt) *record {
		return &record{placed: placed, cancelled: cancelled}
	}
	// Run 1 ends with a restore of a copy that was begun at second 10.
	restores := []restore{{run: 1, copied: at(10), holds: map[string]bool{"in the copy": true}}}
	for name, c := range map[string]struct {
		record *record
		want   string // of the order that is expected: its id and event id
		cancel bool
		gone   []string
		twice  int
	}{
		"before the copy":      {record: rec([]receipt{told("e", "o", 1, 9)}), want: "o e"},
		"while it was made":    {record: rec([]receipt{told("in the copy", "o", 1, 11)}), want: "o in the copy"},
		"after the copy":       {record: rec([]receipt{told("e", "o", 1, 11)}), gone: []string{"e"}},
		"after the restore":    {record: rec([]receipt{told("e", "o", 2, 12)}), want: "o e"},
		"again, after it":      {record: rec([]receipt{told("e", "o", 1, 11), told("f", "p", 2, 12)}), want: "p f", gone: []string{"e"}},
		"two orders for a key": {record: rec([]receipt{told("e", "o", 1, 8), told("f", "p", 1, 9)}), want: "p f", twice: 1},
		"cancelled":            {record: rec([]receipt{told("e", "o", 1, 8)}, told("c", "o", 1, 9)), want: "o e", cancel: true},
		"cancellation undone":  {record: rec([]receipt{told("e", "o", 1, 9)}, told("c", "o", 1, 11)), want: "o e", gone: []string{"c"}},
	} {
		t.Run(name, func(t *testing.T) {
			e := (&tortureLoad{records: []*record{c.record}}).expected(restores)
			var got []string
			for _, o := range e.orders {
				got = append(got, o.id+" "+o.eventID)
				require.Equal(t, c.cancel, o.cancel)
			}
			require.Equal(t, c.want, strings.Join(got, ", "))
			require.ElementsMatch(t, c.gone, e.gone)
			require.Equal(t, c.twice, e.twice)
		})
	}
}

// TestScheduleRepeats: a seed gives the same faults, and each kind has its turn.
func TestScheduleRepeats(t *testing.T) {
	deal := func(seed uint64) (steps []string) {
		s := newSchedule(seed)
		for range 2 * len(faultKinds) {
			step := s.next()
			steps = append(steps, step.kind.name, step.pause.String(), time.Duration(step.random.Int64()).String())
		}
		return steps
	}
	require.Equal(t, deal(7), deal(7))
	require.NotEqual(t, deal(7), deal(8))
	seven := deal(7)
	for _, k := range faultKinds {
		require.Contains(t, seven[:3*len(faultKinds)], k.name)
	}
}
