package relay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/outbox"
)

func message(log, id string) *Message {
	return &Message{LogID: log, Record: outbox.Record{EventID: id}}
}

func row(position int64, id string) outbox.Record {
	return outbox.Record{Position: position, EventID: id}
}

// TestReconcileTable walks through every way in which stream and cursor can
// stand to each other.
func TestReconcileTable(t *testing.T) {
	at := Cursor{Position: 7, EventID: "G", StreamSeq: 5}
	tail := func(first, last uint64) Tail { return Tail{Exists: true, FirstSeq: first, LastSeq: last} }
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
		{"equal, other event", observed{cursor: at, tail: tail(1, 5), last: message("L", "X"), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"equal, other log", observed{cursor: at, tail: tail(1, 5), last: message("M", "G"), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"equal, foreign", observed{cursor: at, tail: tail(1, 5), last: message("", ""), highest: 5}, plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"gone", observed{cursor: at, highest: 9}, plan{action: rebuild, firstSeq: 9 + seqMargin}},
		{"ahead by log rows", observed{cursor: at, tail: tail(1, 7), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "I")}, next: []outbox.Record{row(8, "H"), row(11, "I")}},
			plan{action: advance, cursor: Cursor{11, "I", 7}, advanced: 2}},
		{"ahead by a ghost", observed{cursor: at, tail: tail(1, 7), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "?")}, next: []outbox.Record{row(8, "H"), row(11, "I")}},
			plan{action: rebuild, firstSeq: 7 + seqMargin}},
		{"ahead of the whole log", observed{cursor: at, tail: tail(1, 7), highest: 5,
			beyond: []*Message{message("L", "H"), message("L", "I")}, next: []outbox.Record{row(8, "H")}},
			plan{action: rebuild, firstSeq: 7 + seqMargin}},
		{"ahead by a foreign message", observed{cursor: at, tail: tail(1, 6), highest: 5,
			beyond: []*Message{message("", "")}, next: []outbox.Record{row(8, "H")}},
			plan{action: rebuild, firstSeq: 6 + seqMargin}},
		{"ahead with a hole", observed{cursor: at, tail: tail(1, 6), highest: 5, beyond: []*Message{nil}, next: []outbox.Record{row(8, "H")}},
			plan{action: rebuild, firstSeq: 6 + seqMargin}},
		{"behind", observed{cursor: at, tail: tail(1, 3), highest: 5, last: message("L", "C"), behind: &Cursor{3, "C", 3}},
			plan{action: rewind, cursor: Cursor{3, "C", 3}}},
		{"behind, expired", observed{cursor: at, tail: tail(4, 3), highest: 5, behind: &Cursor{3, "C", 3}},
			plan{action: rewind, cursor: Cursor{3, "C", 3}}},
		{"behind, unreadable", observed{cursor: at, tail: tail(1, 3), highest: 5, behind: &Cursor{3, "C", 3}},
			plan{action: rebuild, firstSeq: 5 + seqMargin}},
		{"behind, other event", observed{cursor: at, tail: tail(1, 3), highest: 5, last: message("L", "X"), behind: &Cursor{3, "C", 3}},
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
