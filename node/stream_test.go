package node_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/node"
	"outlog/relay"
)

// verifyStream compares the stream with the log without relay or consumers.
func verifyStream(t *testing.T, dir string) (r node.StreamResult) {
	t.Helper()
	onStream(t, dir, func(ctx context.Context, n *node.Node) {
		var err error
		r, err = n.VerifyStream(ctx)
		require.NoError(t, err)
	})
	return r
}

// filled makes a directory with five events, applied and published.
func filled(t *testing.T) string {
	dir := t.TempDir()
	n, stop := start(t, node.Options{Dir: dir}, recorder("a", "Placed"))
	for i := range 5 {
		appendOne(t, n, "1", "Placed", i)
	}
	requireStreamAgrees(t, n)
	stop()
	return dir
}

// republish makes the stream anew from its changed messages.
func republish(change func([]relay.Message) []relay.Message) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		onStream(t, dir, func(ctx context.Context, n *node.Node) {
			var all []relay.Message
			require.NoError(t, n.Broker().Scan(ctx, func(_ uint64, m relay.Message) error {
				all = append(all, m)
				return nil
			}))
			p := n.Broker().Publisher()
			require.NoError(t, p.Recreate(ctx, 1))
			all = change(all)
			stored, err := p.Append(ctx, 0, all)
			require.NoError(t, err)
			require.Equal(t, len(all), stored)
		})
	}
}

// TestVerifyStreamNamesFaults: what differs between stream and log is told
// apart, and named with its place.
func TestVerifyStreamNamesFaults(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(t *testing.T, dir string)
		want []node.StreamFault // without event ids and details
		text string             // of the result
		// The next start looks at the end of the stream only, and mends what is
		// wrong there.
		remains bool
	}{
		{"nothing", func(*testing.T, string) {}, nil, "5 events at their sequences, from 1 to 5", false},
		{"no stream", func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(filepath.Join(dir, "jetstream"))) },
			[]node.StreamFault{{Kind: node.FaultTail, FirstSeq: 1, LastSeq: 5, FirstPosition: 1, LastPosition: 5}},
			"5 tail: there is no stream: it ends at sequence 0, the log has published through 5: the events at positions 1 to 5", false},
		{"lost tail", republish(func(m []relay.Message) []relay.Message { return m[:3] }),
			[]node.StreamFault{{Kind: node.FaultTail, FirstSeq: 4, LastSeq: 5, FirstPosition: 4, LastPosition: 5}},
			"2 tail: the stream ends at sequence 3, the log has published through 5: the events at positions 4 to 5", false},
		{"lost log", func(t *testing.T, dir string) {
			older := keep(t, dir)
			publishMore(t, dir, 7)
			replaceDatabase(t, dir, older)
		}, []node.StreamFault{fault(node.FaultGhost, 6, 6), fault(node.FaultGhost, 7, 7), fault(node.FaultGhost, 8, 8), fault(node.FaultGhost, 9, 9), fault(node.FaultGhost, 10, 10)},
			"7 ghost: sequence 6 holds event", false},
		{"a foreign message", func(t *testing.T, dir string) {
			onStream(t, dir, func(ctx context.Context, n *node.Node) {
				require.NoError(t, n.Broker().PublishRaw(ctx, "outlog.order.Placed", nil, []byte("stray")))
			})
		}, []node.StreamFault{fault(node.FaultStray, 6, 0)}, "1 stray: sequence 6 holds a message that no relay of this log wrote", false},
		{"a message of another log", republish(func(m []relay.Message) []relay.Message { m[1].LogID = "another"; return m }),
			[]node.StreamFault{fault(node.FaultStray, 2, 0)}, "1 stray: sequence 2", true},
		{"another event in a place", republish(func(m []relay.Message) []relay.Message { m[2].Record.EventID = "another"; return m }),
			[]node.StreamFault{fault(node.FaultGhost, 3, 3)}, "1 ghost: sequence 3", true},
		{"two in the wrong order", republish(func(m []relay.Message) []relay.Message { m[1], m[2] = m[2], m[1]; return m }),
			[]node.StreamFault{fault(node.FaultOrder, 2, 3), fault(node.FaultOrder, 3, 2)},
			"2 order: sequence 2 holds the event at position 3, the log published the one at position 2 there", true},
		{"one twice, at the end", republish(func(m []relay.Message) []relay.Message { return append(m, m[3]) }),
			[]node.StreamFault{fault(node.FaultOrder, 6, 4)}, "1 order: sequence 6 holds the event at position 4, behind the one at position 5", false},
		{"one missing in the middle", republish(func(m []relay.Message) []relay.Message { return append(m[:2], m[3:]...) }), []node.StreamFault{
			fault(node.FaultOrder, 3, 4), fault(node.FaultOrder, 4, 5), {Kind: node.FaultTail, FirstSeq: 5, LastSeq: 5, FirstPosition: 5, LastPosition: 5}},
			"1 tail, 2 order: sequence 3", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := filled(t)
			tc.do(t, dir)
			r := verifyStream(t, dir)
			require.Equal(t, tc.want == nil, r.OK)
			require.Contains(t, r.Detail, tc.text)
			require.Equal(t, tc.want, places(r.Faults))
			if !tc.remains {
				requireRepaired(t, dir, tc.want != nil)
			}
		})
	}
}

// fault is one of a single message.
func fault(kind node.FaultKind, seq uint64, position int64) node.StreamFault {
	return node.StreamFault{Kind: kind, FirstSeq: seq, LastSeq: seq, FirstPosition: position, LastPosition: position}
}

// places are faults without event ids and details.
func places(faults []node.StreamFault) (out []node.StreamFault) {
	for _, f := range faults {
		f.EventID, f.Detail = "", ""
		out = append(out, f)
	}
	return out
}

// TestVerifyStreamBeforeTheFirstStart: where nothing is published, nothing is
// missing.
func TestVerifyStreamBeforeTheFirstStart(t *testing.T) {
	dir := t.TempDir()
	appendWithout(t, dir, 1)
	r := verifyStream(t, dir)
	require.True(t, r.OK, r.Detail)
	require.Equal(t, "nothing is published, and there is no stream", r.Detail)
}
