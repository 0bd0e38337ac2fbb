package relay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/outbox"
)

// places are the positions of the events that messages carry.
var places = map[string]int64{"C": 3, "D": 4, "G": 7, "H": 8, "I": 11, "K": 13}

func message(log, id string) *Message {
	return &Message{LogID: log, Record: outbox.Record{EventID: id, Position: places[id]}}
}

func row(position int64, id string) entry {
	return entry{Record: outbox.Record{Position: position, EventID: id}, joins: true}
}

// after is a row before which another was passed over.
func after(position int64, id string) entry {
	return entry{Record: outbox.Record{Position: position, EventID: id}}
}

func pub(first, last int64, firstSeq, lastSeq uint64, joins bool) publication {
	return publication{firstPosition: first, lastPosition: last, firstSeq: firstSeq, lastSeq: lastSeq, joins: joins}
}

// TestReconcileTable walks through every way in which stream and cursor can
// stand to each other.
func TestReconcileTable(t *testing.T) {
	at := Cursor{Position: 7, EventID: "G", StreamSeq: 5, EventPosition: 7}
	tail := func(first, last uint64) Tail {
		return Tail{Exists: true, FirstSeq: first, LastSeq: last, Msgs: last + 1 - first}
	}
	damaged := func(first, last, msgs uint64) Tail {
		return Tail{Exists: true, FirstSeq: first, LastSeq: last, Msgs: msgs}
	}
	for _, tc := range []struct {
		name string
		o    observed
		want plan
	}{
		{"first start", observed{}, plan{action: rebuild, firstSeq: 1}},
		{"fresh log, empty stream", observed{tail: tail(1, 0)}, plan{action: goOn}},
		{"equal", observed{cursor: at, tail: tail(1, 5), last: message("L", "G"), highest: 5}, plan{action: goOn, cursor: at}},
		{"equal, expired", observed{cursor: at, tail: tail(6, 5), highest: 5}, plan{action: goOn, cursor: at}},
		{"equal, unreadable", observed{cursor: at, tail: tail(2, 5), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"equal, with a hole", observed{cursor: at, tail: damaged(1, 5, 3), last: message("L", "G"), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"ahead, with a hole before the cursor", observed{cursor: at, tail: damaged(1, 6, 5), highest: 5,
			beyond: []*Message{message("L", "H")}, next: []entry{row(8, "H")}},
			plan{action: rebuild, firstSeq: 6 + seqMargin}},
		{"behind, with a hole", observed{cursor: at, tail: damaged(1, 3, 2), highest: 5, last: message("L", "C"), behind: &Cursor{3, "C", 3, 3}},
			plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"equal, other event", observed{cursor: at, tail: tail(1, 5), last: message("L", "X"), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"equal, other log", observed{cursor: at, tail: tail(1, 5), last: message("M", "G"), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"equal, foreign", observed{cursor: at, tail: tail(1, 5), last: message("", ""), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"gone", observed{cursor: at, highest: 9}, plan{action: rebuild, firstSeq: 9 + seqMargin}},
		{"ahead by log rows", observed{cursor: at, tail: tail(1, 7), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "I")}, next: []entry{row(8, "H"), row(11, "I")}},
			plan{action: advance, cursor: Cursor{11, "I", 7, 11}, pubs: []publication{pub(8, 11, 6, 7, true)}}},
		{"ahead by a ghost", observed{cursor: at, tail: tail(1, 7), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "?")}, next: []entry{row(8, "H"), row(11, "I")}},
			plan{action: rebuild, firstSeq: 7 + seqMargin}},
		{"ahead of the whole log", observed{cursor: at, tail: tail(1, 7), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "I")}, next: []entry{row(8, "H")}},
			plan{action: rebuild, firstSeq: 7 + seqMargin}},
		{"ahead by a foreign message", observed{cursor: at, tail: tail(1, 6), highest: 5,
			beyond: []*Message{message("", "")}, next: []entry{row(8, "H")}},
			plan{action: rebuild, firstSeq: 6 + seqMargin}},
		{"ahead with a hole", observed{cursor: at, tail: tail(1, 6), highest: 5, beyond: []*Message{nil}, next: []entry{row(8, "H")}},
			plan{action: rebuild, firstSeq: 6 + seqMargin}},
		{"equal, what came last was parked before", observed{cursor: Cursor{Position: 7, EventID: "D", StreamSeq: 5}, tail: tail(1, 5), last: message("L", "D"), highest: 5},
			plan{action: goOn, cursor: Cursor{7, "D", 5, 4}}},
		{"ahead, one was passed over", observed{cursor: at, tail: tail(1, 7), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "I")}, next: []entry{row(8, "H"), after(11, "I")}},
			plan{action: advance, cursor: Cursor{11, "I", 7, 11}, pubs: []publication{pub(8, 8, 6, 6, true), pub(11, 11, 7, 7, false)}}},
		{"ahead by a parked one", observed{cursor: at, tail: tail(1, 6), highest: 5,
			beyond: []*Message{message("L", "D")}, next: []entry{row(8, "H")}, parked: map[string]int64{"D": 4}},
			plan{action: advance, cursor: Cursor{7, "D", 6, 4}, pubs: []publication{pub(4, 4, 6, 6, false)}, cleared: []string{"D"}}},
		{"ahead by a parked one in between", observed{cursor: at, tail: tail(1, 9), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "D"), message("L", "I"), message("L", "K")},
			next:   []entry{row(8, "H"), row(11, "I"), row(13, "K")}, parked: map[string]int64{"D": 4}},
			plan{action: advance, cursor: Cursor{13, "K", 9, 13}, cleared: []string{"D"},
				pubs: []publication{pub(8, 8, 6, 6, true), pub(4, 4, 7, 7, false), pub(11, 13, 8, 9, false)}}},
		{"ahead by a parked one that the cursor had passed", observed{cursor: at, tail: tail(1, 8), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "I"), message("L", "K")},
			next:   []entry{row(8, "H"), row(11, "I")}, parked: map[string]int64{"K": 13}},
			plan{action: advance, cursor: Cursor{13, "K", 8, 13}, cleared: []string{"K"},
				pubs: []publication{pub(8, 11, 6, 7, true), pub(13, 13, 8, 8, false)}}},
		{"ahead by a parked one that nothing can have passed", observed{cursor: at, tail: tail(1, 6), highest: 5,
			beyond: []*Message{message("L", "K")}, next: []entry{row(8, "H")}, parked: map[string]int64{"K": 13}},
			plan{action: rebuild, firstSeq: 6 + seqMargin}},
		{"ahead by a parked one twice", observed{cursor: at, tail: tail(1, 7), highest: 5,
			beyond: []*Message{message("L", "D"), message("L", "D")}, next: []entry{row(8, "H")}, parked: map[string]int64{"D": 4}},
			plan{action: rebuild, firstSeq: 7 + seqMargin}},
		{"ahead by a parked one of another log", observed{cursor: at, tail: tail(1, 6), highest: 5,
			beyond: []*Message{message("M", "D")}, next: []entry{row(8, "H")}, parked: map[string]int64{"D": 4}},
			plan{action: rebuild, firstSeq: 6 + seqMargin}},
		{"behind", observed{cursor: at, tail: tail(1, 3), highest: 5, last: message("L", "C"), behind: &Cursor{3, "C", 3, 3}},
			plan{action: rewind, cursor: Cursor{3, "C", 3, 3}}},
		{"behind, expired", observed{cursor: at, tail: tail(4, 3), highest: 5, behind: &Cursor{3, "C", 3, 3}},
			plan{action: rewind, cursor: Cursor{3, "C", 3, 3}}},
		{"behind, unreadable", observed{cursor: at, tail: tail(1, 3), highest: 5, behind: &Cursor{3, "C", 3, 3}},
			plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"behind, other event", observed{cursor: at, tail: tail(1, 3), highest: 5, last: message("L", "X"), behind: &Cursor{3, "C", 3, 3}},
			plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"behind, unknown", observed{cursor: at, tail: tail(1, 3), highest: 5, last: message("L", "C")},
			plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"emptied and recreated by somebody", observed{cursor: at, tail: tail(1, 0), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.o.logID = "L"
			got := reconcile(tc.o)
			if got.action != goOn {
				require.NotEmpty(t, got.reason)
			}
			got.reason = ""
			require.Equal(t, tc.want, got)
		})
	}
}
