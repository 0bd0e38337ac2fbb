package node_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/node"
	"outlog/outbox"
	"outlog/relay"
	"outlog/store"
)

// The tests in this file stop a node, damage what it left on disk in one way,
// and start it again.

// filledEvents is how many events filledBlocks leaves behind: three blocks of
// the server's store.
const filledEvents = 150

// filledBlocks makes a directory whose events are applied and published.
func filledBlocks(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	n, stop := start(t, node.Options{Dir: dir, StreamMaxBytes: 16 << 20}, recorder("a", "Placed"))
	pad := strings.Repeat("x", 64<<10)
	require.NoError(t, n.Update(t.Context(), func(tx *store.Tx) error {
		for i := range filledEvents {
			_, err := n.Append(t.Context(), tx, outbox.Event{AggregateType: "order", AggregateID: fmt.Sprint(i % 3), Type: "Placed",
				Data: map[string]any{"n": i, "pad": pad}})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	waitApplied(t, n, "a", filledEvents)
	requireStreamAgrees(t, n)
	stop()
	require.Len(t, blocks(t, dir), 3)
	return dir
}

func streamFile(t *testing.T, dir, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "jetstream", "jetstream", "*", "streams", "OUTLOG_*", pattern))
	require.NoError(t, err)
	require.Len(t, found, 1, pattern)
	return found[0]
}

// blocks are the stream's files of messages, the oldest first.
func blocks(t *testing.T, dir string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "jetstream", "jetstream", "*", "streams", "OUTLOG_*", "msgs", "*.blk"))
	require.NoError(t, err)
	slices.SortFunc(found, func(a, b string) int { return len(a) - len(b) + strings.Compare(a, b) })
	return found
}

// flip turns one bit of a block over: of the head of a record, where the server
// keeps its length, sequence and time, or anywhere in it.
func flip(t *testing.T, block string, random *rand.Rand) string {
	t.Helper()
	data, err := os.ReadFile(block)
	require.NoError(t, err)
	var records []int
	for at := 0; at+22 <= len(data); {
		records = append(records, at)
		at += int(binary.LittleEndian.Uint32(data[at:]) &^ (1 << 31))
	}
	at := random.IntN(len(data))
	if random.IntN(2) == 0 {
		at = records[random.IntN(len(records))] + random.IntN(22)
	}
	bit := random.IntN(8)
	data[at] ^= 1 << bit
	require.NoError(t, os.WriteFile(block, data, 0o600))
	return fmt.Sprintf("bit %d of byte %d", bit, at)
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

func (l *lines) with(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), text)
}

// TestDamagedStream damages the store of the stream, and expects the next start
// to see it and to mend it.
func TestDamagedStream(t *testing.T) {
	whole := filledBlocks(t)
	type damage struct {
		name   string
		repair bool // stream and log have to be brought together
		do     func(t *testing.T, dir string)
	}
	remove := func(pattern string) func(*testing.T, string) {
		return func(t *testing.T, dir string) { require.NoError(t, os.Remove(streamFile(t, dir, pattern))) }
	}
	spoil := func(pattern string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			name := streamFile(t, dir, pattern)
			data, err := os.ReadFile(name)
			require.NoError(t, err)
			data[len(data)/2] ^= 0x10
			require.NoError(t, os.WriteFile(name, data, 0o600))
		}
	}
	cut := func(block int, keep float64) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			name := blocks(t, dir)[block]
			st, err := os.Stat(name)
			require.NoError(t, err)
			require.NoError(t, os.Truncate(name, int64(keep*float64(st.Size()))))
		}
	}
	list := []damage{
		{"none", false, func(*testing.T, string) {}},
		{"store deleted", true, func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(filepath.Join(dir, "jetstream"))) }},
		{"stream deleted", true, func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(streamFile(t, dir, ""))) }},
		{"meta.inf missing", true, remove("meta.inf")},
		{"meta.sum missing", true, remove("meta.sum")},
		{"meta.inf damaged", true, spoil("meta.inf")},
		{"meta.sum damaged", true, spoil("meta.sum")},
		{"newest block empty", true, cut(2, 0)},
		{"newest block cut", true, cut(2, 0.61)},
		{"newest block gone", true, func(t *testing.T, dir string) { require.NoError(t, os.Remove(blocks(t, dir)[2])) }},
		{"old block empty", true, cut(1, 0)},
		{"old block cut", true, cut(1, 0.37)},
		{"old block gone", true, func(t *testing.T, dir string) { require.NoError(t, os.Remove(blocks(t, dir)[1])) }},
		// The oldest messages may go at any time: their limits take them.
		{"first block gone", false, func(t *testing.T, dir string) { require.NoError(t, os.Remove(blocks(t, dir)[0])) }},
		{"first block cut", true, cut(0, 0.5)},
		{"all blocks gone", true, func(t *testing.T, dir string) {
			for _, b := range blocks(t, dir) {
				require.NoError(t, os.Remove(b))
			}
		}},
	}
	for block, name := range []string{"oldest", "old", "newest"} {
		for seed := range uint64(4) {
			list = append(list, damage{fmt.Sprintf("bit in the %s block, seed %d", name, seed), true, func(t *testing.T, dir string) {
				t.Log(flip(t, blocks(t, dir)[block], rand.New(rand.NewPCG(seed, uint64(block)))))
			}})
		}
	}
	for _, d := range list {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "data")
			require.NoError(t, os.CopyFS(dir, os.DirFS(whole)))
			d.do(t, dir)
			if d.name == "old block gone" { // what is left of the stream is sound
				r := verifyStream(t, dir)
				require.Len(t, r.Faults, 1, r.Detail)
				f := r.Faults[0]
				require.Equal(t, node.FaultHole, f.Kind)
				require.Equal(t, []int64{int64(f.FirstSeq), int64(f.LastSeq)}, []int64{f.FirstPosition, f.LastPosition}, r.Detail)
				require.EqualValues(t, f.LastSeq-f.FirstSeq+1, r.Found[node.FaultHole])
			}
			requireRepaired(t, dir, d.repair)
			requireRepaired(t, dir, false) // it lasts
		})
	}
}

// requireRepaired starts a node on what is left, appends one event, and
// requires that the stream agrees with the log, that each of the log's events
// is applied once and in order, and that a repair was counted and logged once.
func requireRepaired(t *testing.T, dir string, repair bool) {
	t.Helper()
	log := &lines{}
	n, stop := start(t, node.Options{Dir: dir, StreamMaxBytes: 16 << 20, Logger: slog.New(slog.NewTextHandler(log, nil))}, recorder("a", "Placed"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, n.Broker().WaitUp(ctx))
	last := appendOne(t, n, "new", "Placed", 0)
	waitApplied(t, n, "a", last.Position)
	requireStreamAgrees(t, n)
	want, err := n.Log().Read(t.Context(), 0, outbox.Page{})
	require.NoError(t, err)
	got := effectIDs(t, n, "a")
	require.Len(t, got, len(want))
	for i, e := range want {
		require.Equal(t, e.EventID, got[i])
	}
	repairs := n.Status().Relay.Reconciled
	require.Equal(t, repair, repairs > 0, log.buf.String())
	require.LessOrEqual(t, repairs, int64(1))
	require.EqualValues(t, repairs, log.with("stream and log brought together"))
	requireWholeSince(t, n)
	stop()
}

// requireWholeSince requires that no message is missing behind the first.
func requireWholeSince(t *testing.T, n *node.Node) {
	t.Helper()
	var first, last, count uint64
	require.NoError(t, n.Broker().Scan(t.Context(), func(seq uint64, _ relay.Message) error {
		if first == 0 {
			first = seq
		}
		last, count = seq, count+1
		return nil
	}))
	require.Equal(t, last-first+1, count)
}
