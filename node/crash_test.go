package node_test

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/internal/failpoint"
	"outlog/node"
	"outlog/outbox"
	"outlog/store"
)

// The crash tests run this test binary again as a child that appends without
// end, let it die, and look at what it left behind from a fresh node.

const childDir, childFailpoint = "OUTLOG_TEST_DIR", "OUTLOG_TEST_FAILPOINT"

func TestMain(m *testing.M) {
	if path := os.Getenv(powerOutsider); path != "" {
		os.Exit(powerOutside(path))
	}
	if mode := os.Getenv(powerMode); mode != "" {
		os.Exit(powerChild(os.Getenv(childDir), mode))
	}
	if dir := os.Getenv(childDir); dir != "" {
		os.Exit(child(dir, os.Getenv(childFailpoint)))
	}
	os.Exit(m.Run())
}

// child appends events of eight aggregates from four goroutines, and writes a
// line to stdout for each append that returned. In a cell of the table of
// failpoints it then catches up; see failpoint_test.go.
func child(dir, spec string) int {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // ends by itself whatever happens
	defer cancel()
	o, consumers, err := childOptions(dir, spec)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	n, err := node.Open(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return startFailed
	}
	for _, c := range consumers {
		if err := n.Handle(c); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 3
		}
	}
	go func() { _ = n.Run(ctx) }()
	appending, stop := context.WithCancel(ctx)
	defer stop()
	caughtUp := make(chan int, 1)
	if spec != "" {
		go func() { caughtUp <- finishCell(ctx, n, spec, stop) }()
	}
	var out sync.Mutex
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := 0; appending.Err() == nil; i++ {
				var a []outbox.Appended
				err := n.Update(ctx, func(tx *store.Tx) (err error) {
					a, err = n.Append(ctx, tx, outbox.Event{AggregateType: "order", AggregateID: fmt.Sprint(g, i%2), Type: "Placed", Data: placed{i}})
					return err
				})
				if err != nil {
					continue
				}
				out.Lock()
				fmt.Println(a[0].ID)
				out.Unlock()
			}
		})
	}
	wg.Wait()
	if spec != "" {
		return <-caughtUp
	}
	return 0
}

// runChild starts a child on dir, kills it after so many acknowledged appends
// (0: it dies by itself), and returns the ids it acknowledged.
func runChild(t *testing.T, dir, spec string, killAfter int) (acked []string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childDir+"="+dir, childFailpoint+"="+spec)
	cmd.Stderr = t.Output()
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if len(lines.Text()) != 26 {
			continue // cut off by the kill
		}
		acked = append(acked, lines.Text())
		if len(acked) == killAfter {
			require.NoError(t, cmd.Process.Kill())
		}
	}
	err = cmd.Wait()
	require.Error(t, err, "the child must have been killed")
	if code := cmd.ProcessState.ExitCode(); code != -1 && code != failpoint.ExitStatus {
		t.Fatalf("the child ended with status %d", code)
	}
	return acked
}

// requireIntact runs a node on what the children left, until it has caught up,
// and proves the promises G1 to G5 for everything that was acknowledged.
func requireIntact(t *testing.T, dir string, acked []string) {
	t.Helper()
	n, stop := start(t, node.Options{Dir: dir}, recorder("a", "Placed"), recorder("b", "Placed"))
	defer stop()
	head, err := n.Log().Head(t.Context())
	require.NoError(t, err)
	rows, err := n.Log().Read(t.Context(), 0, outbox.Page{})
	require.NoError(t, err)
	inLog := map[string]bool{}
	var want []string
	for _, r := range rows {
		inLog[r.EventID] = true
		want = append(want, r.EventID)
	}
	for _, id := range acked {
		require.True(t, inLog[id], "acknowledged event %s is lost", id)
	}
	for _, name := range []string{"a", "b"} {
		waitApplied(t, n, name, head)
		require.Equal(t, want, effectIDs(t, n, name), "each event once, in log order, and nothing else")
	}
	requireStreamAgrees(t, n)
}

func effectIDs(t testing.TB, n *node.Node, name string) (ids []string) {
	t.Helper()
	rows, err := n.Store().Reader().QueryContext(context.Background(), `SELECT event_id FROM effects WHERE consumer = ? ORDER BY n`, name)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var id string
		require.NoError(t, rows.Scan(&id))
		ids = append(ids, id)
	}
	require.NoError(t, rows.Err())
	return ids
}

// requireStreamAgrees waits until the relay has published and stored its
// cursor, and compares the whole stream with the log.
func requireStreamAgrees(t testing.TB, n *node.Node) {
	t.Helper()
	require.Eventually(t, func() bool {
		var pending int
		err := n.Store().Reader().QueryRow(`SELECT count(*) FROM outbox_status WHERE state = 'pending'`).Scan(&pending)
		return err == nil && pending == 0
	}, 20*time.Second, 5*time.Millisecond)
	r, err := n.VerifyStream(t.Context())
	require.NoError(t, err)
	require.True(t, r.OK, r.Detail)
}

// prepareDir makes a directory with the table that effects go to.
func prepareDir(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "data")
	_, stop := start(t, node.Options{Dir: dir})
	stop()
	return dir
}

// testSeed returns a seed and logs how to repeat it.
func testSeed(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("OUTLOG_TEST_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("OUTLOG_TEST_SEED=%d", seed)
	return seed
}

// TestRandomKill kills the process under load at random moments.
// OUTLOG_TEST_SEED repeats a run.
func TestRandomKill(t *testing.T) {
	random := rand.New(rand.NewPCG(testSeed(t), 0))
	dir := prepareDir(t)
	var acked []string
	for range 5 {
		acked = append(acked, runChild(t, dir, "", 1+random.IntN(1500))...)
	}
	requireIntact(t, dir, acked)
}

// TestStreamDeletedBetweenRuns: the broker's store is disposable.
func TestStreamDeletedBetweenRuns(t *testing.T) {
	dir := prepareDir(t)
	acked := runChild(t, dir, "", 300)
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "jetstream")))
	acked = append(acked, runChild(t, dir, "", 300)...)
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "jetstream")))
	requireIntact(t, dir, acked)
}

// TestStrayMessagesAreNeverApplied puts onto the stream of a running node what
// the log does not hold: a message of nobody, and one that bears the log's own
// headers with a wrong ULID.
func TestStrayMessagesAreNeverApplied(t *testing.T) {
	n, _ := start(t, node.Options{}, recorder("a", "Placed"))
	first := appendOne(t, n, "x", "Placed", 1)
	waitApplied(t, n, "a", first.Position)
	require.Eventually(t, func() bool { return n.Status().Relay.Position == first.Position }, 10*time.Second, time.Millisecond)
	ghost := map[string][]string{"ce-specversion": {"1.0"}, "ce-id": {strings.Repeat("0", 26)}, "ce-type": {"Placed"}, "ce-source": {"outlog/" + n.Log().ID() + "/order"},
		"ce-subject": {"x"}, "ce-time": {"2026-01-01T00:00:00.000000Z"}, "outlog-log": {n.Log().ID()}, "outlog-position": {fmt.Sprint(first.Position + 1)}, "outlog-version": {"2"}}
	require.NoError(t, n.Broker().PublishRaw(t.Context(), "outlog.order.Placed", nil, []byte(`{"n":666}`)))
	require.NoError(t, n.Broker().PublishRaw(t.Context(), "outlog.order.Placed", ghost, []byte(`{"n":666}`)))
	last := appendOne(t, n, "x", "Placed", 2)
	waitApplied(t, n, "a", last.Position)
	require.Equal(t, []string{"x/1", "x/2"}, effects(t, n, "a"))
	requireStreamAgrees(t, n)
	require.Positive(t, n.Status().Relay.Reconciled)
	var ghosts int
	require.NoError(t, n.Store().Reader().QueryRow(`SELECT count(*) FROM outlog_inbox WHERE event_id = ?`, strings.Repeat("0", 26)).Scan(&ghosts))
	require.Zero(t, ghosts)
}
