package broker

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"outlog/outbox"
	"outlog/relay"
)

// quick are options for tests: everything that is a wait is short.
func quick(t testing.TB) Options {
	return Options{
		Dir:            filepath.Join(t.TempDir(), "jetstream"),
		LogID:          "testlog",
		AckWait:        200 * time.Millisecond,
		PublishTimeout: 2 * time.Second,
		HealthInterval: 50 * time.Millisecond,
		BackoffMin:     time.Millisecond,
		BackoffMax:     20 * time.Millisecond,
		Logger:         slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

// run starts a broker and returns it with a function that stops it and waits.
// The test fails if Run returns an error.
func run(t testing.TB, o Options) (*Broker, func()) {
	t.Helper()
	b, err := New(o)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			require.NoError(t, err)
		case <-time.After(20 * time.Second):
			require.FailNow(t, "Run does not return")
		}
	}
	t.Cleanup(stop)
	return b, stop
}

// up runs a broker, waits until it is up, and makes an empty stream.
func up(t testing.TB, o Options) (*Broker, relay.Publisher, func()) {
	t.Helper()
	b, stop := run(t, o)
	require.NoError(t, b.WaitUp(deadline(t)))
	p := b.Publisher()
	tail, err := p.Tail(deadline(t))
	require.NoError(t, err)
	if !tail.Exists {
		require.NoError(t, p.Recreate(deadline(t), 1))
	}
	return b, p, stop
}

func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// restart makes the supervisor start another server, and waits for it.
func restart(t testing.TB, b *Broker) {
	t.Helper()
	before := b.State().Restarts
	b.mu.Lock()
	s := b.current
	b.mu.Unlock()
	s.Shutdown()
	s.WaitForShutdown()
	require.Eventually(t, func() bool {
		st := b.State()
		return st.Up && st.Restarts > before
	}, 10*time.Second, time.Millisecond)
}

func message(position int64) relay.Message {
	return relay.Message{
		LogID: "testlog",
		Prev:  position - 1,
		Record: outbox.Record{
			Position:         position,
			EventID:          fmt.Sprintf("01J%023d", position),
			AggregateType:    "order",
			AggregateID:      fmt.Sprintf("o-%d", position),
			AggregateVersion: 1,
			Type:             "OrderCreated",
			SchemaVersion:    1,
			ContentType:      "application/json",
			Payload:          []byte(`{"total":1}`),
			RawHeaders:       `{"correlation_id":"c"}`,
			CreatedAt:        time.UnixMicro(1_700_000_000_000_000 + position).UTC(),
		},
	}
}

// messages returns the messages at positions from … from+n-1.
func messages(from int64, n int) []relay.Message {
	out := make([]relay.Message, n)
	for i := range out {
		out[i] = message(from + int64(i))
	}
	return out
}

func tail(t testing.TB, p relay.Publisher) relay.Tail {
	t.Helper()
	got, err := p.Tail(deadline(t))
	require.NoError(t, err)
	return got
}

func TestOptionsOutOfRangeAreNamed(t *testing.T) {
	for field, change := range map[string]func(*Options){
		"Dir":            func(o *Options) { o.Dir = "" },
		"LogID":          func(o *Options) { o.LogID = "a.b" },
		"MaxAge":         func(o *Options) { o.MaxAge = time.Millisecond },
		"MaxBytes":       func(o *Options) { o.MaxBytes = 1 },
		"MaxMessage":     func(o *Options) { o.MaxMessage = 1 },
		"AckWait":        func(o *Options) { o.AckWait = -1 },
		"PublishTimeout": func(o *Options) { o.PublishTimeout = time.Hour },
		"StartTimeout":   func(o *Options) { o.StartTimeout = -1 },
		"StopTimeout":    func(o *Options) { o.StopTimeout = -1 },
		"HealthInterval": func(o *Options) { o.HealthInterval = time.Hour },
		"BackoffMin":     func(o *Options) { o.BackoffMin = -1 },
		"BackoffMax":     func(o *Options) { o.BackoffMin, o.BackoffMax = 2, 1 },
	} {
		o := quick(t)
		change(&o)
		_, err := New(o)
		require.ErrorIs(t, err, ErrInvalidOption, field)
		require.ErrorContains(t, err, field+" is")
	}
	_, err := New(Options{Dir: "x", LogID: "x"})
	require.NoError(t, err)
}

func TestDownBeforeRunAndAfterIt(t *testing.T) {
	b, err := New(quick(t))
	require.NoError(t, err)
	p, src := b.Publisher(), b.Source("inventory", nil)
	check := func() {
		require.False(t, b.Ready())
		require.NotEmpty(t, b.State().Reason)
		_, err := p.Tail(t.Context())
		require.ErrorIs(t, err, relay.ErrOutage)
		_, err = p.Append(t.Context(), 0, messages(1, 1))
		require.ErrorIs(t, err, relay.ErrOutage)
		require.ErrorIs(t, p.Recreate(t.Context(), 1), relay.ErrOutage)
		_, err = p.Get(t.Context(), 1)
		require.ErrorIs(t, err, relay.ErrOutage)
		_, err = src.Fetch(t.Context(), 1)
		require.ErrorIs(t, err, ErrDown)
		require.ErrorIs(t, b.Scan(t.Context(), nil), ErrDown)
	}
	check()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	require.NoError(t, b.WaitUp(deadline(t)))
	require.ErrorIs(t, b.Run(ctx), ErrRunning)
	cancel()
	require.NoError(t, <-ended)
	check()
}

func TestRestartKeepsDataAndHealsConnections(t *testing.T) {
	b, p, stop := up(t, quick(t))
	n, err := p.Append(t.Context(), 0, messages(1, 100))
	require.NoError(t, err)
	require.Equal(t, 100, n)
	for range 3 {
		restart(t, b)
		require.EqualValues(t, 100, tail(t, p).LastSeq)
	}
	n, err = p.Append(t.Context(), 100, messages(101, 10))
	require.NoError(t, err)
	require.Equal(t, 10, n)
	stop()

	b2, p2, _ := up(t, b.opts)
	require.EqualValues(t, 110, tail(t, p2).LastSeq)
	require.Zero(t, b2.State().Restarts)
}

func TestMarkerSendsStoreIntoQuarantine(t *testing.T) {
	o := quick(t)
	b, p, stop := up(t, o)
	_, err := p.Append(t.Context(), 0, messages(1, 10))
	require.NoError(t, err)
	stop()
	require.NoFileExists(t, b.dir.marker(), "a start that succeeded leaves no marker")

	older := filepath.Join(b.dir.quarantined(), "older")
	require.NoError(t, os.MkdirAll(older, 0o700))
	require.NoError(t, b.dir.mark())
	b, _ = run(t, o)
	require.NoError(t, b.WaitUp(deadline(t)))
	require.Equal(t, 1, b.State().Quarantines)
	require.False(t, tail(t, b.Publisher()).Exists)
	require.NoDirExists(t, older)
	require.DirExists(t, filepath.Join(b.dir.quarantined(), "jetstream"))
	require.NoFileExists(t, b.dir.marker())
}

func TestEmptyStoreIsNotQuarantined(t *testing.T) {
	d := storeDir(filepath.Join(t.TempDir(), "jetstream"))
	moved, err := d.prepare()
	require.NoError(t, err)
	require.False(t, moved)
	moved, err = d.prepare() // the marker is there now
	require.NoError(t, err)
	require.False(t, moved)
	info, err := os.Stat(string(d))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
}

func TestFileInPlaceOfStoreIsReportedAndHeals(t *testing.T) {
	o := quick(t)
	require.NoError(t, os.WriteFile(o.Dir, nil, 0o600))
	b, _ := run(t, o)
	require.Eventually(t, func() bool { return b.State().Restarts > 0 }, 5*time.Second, time.Millisecond)
	st := b.State()
	require.False(t, st.Up)
	require.ErrorIs(t, st.Err, ErrStoreDir)
	require.Contains(t, st.Reason, o.Dir)
	require.NoError(t, os.Remove(o.Dir))
	require.NoError(t, b.WaitUp(deadline(t)))
}

func TestIndexIsRemovedAtStart(t *testing.T) {
	o := quick(t)
	b, p, stop := up(t, o)
	_, err := p.Append(t.Context(), 0, messages(1, 10))
	require.NoError(t, err)
	stop()
	index := filepath.Join(b.dir.messages(b.stream), "index.db")
	require.FileExists(t, index)
	// An index that lies must not be believed.
	require.NoError(t, os.WriteFile(index, []byte("lies"), 0o600))
	_, err = b.dir.prepare()
	require.NoError(t, err)
	require.NoFileExists(t, index)
	require.NoError(t, b.dir.unmark())
	_, p, _ = up(t, o)
	require.EqualValues(t, 10, tail(t, p).LastSeq)
}

func TestDeletedStoreIsNoticed(t *testing.T) {
	b, p, _ := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 10))
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(string(b.dir)))
	require.Eventually(t, func() bool { st := b.State(); return st.Up && st.Restarts > 0 }, 10*time.Second, time.Millisecond)
	require.False(t, tail(t, p).Exists)

	// The same for the stream's own directory.
	require.NoError(t, p.Recreate(t.Context(), 100))
	before := b.State().Restarts
	require.NoError(t, os.RemoveAll(filepath.Dir(b.dir.messages(b.stream))))
	require.Eventually(t, func() bool { st := b.State(); return st.Up && st.Restarts > before }, 10*time.Second, time.Millisecond)
	require.False(t, tail(t, p).Exists)
}

func TestUnansweredPublishesRestartServer(t *testing.T) {
	b, _, _ := up(t, quick(t))
	for range maxStrikes {
		b.suspect(suspicion{reason: "test", strike: true})
	}
	require.Eventually(t, func() bool { st := b.State(); return st.Up && st.Restarts == 1 }, 10*time.Second, time.Millisecond)
}

func TestHealthyServerIsNotRestarted(t *testing.T) {
	o := quick(t)
	o.HealthInterval = 10 * time.Millisecond
	b, p, _ := up(t, o)
	for i := range 20 { // the directory comes and goes
		require.NoError(t, p.Recreate(t.Context(), uint64(i*100+1)))
		_, err := p.Append(t.Context(), uint64(i*100), messages(1, 10))
		require.NoError(t, err)
		b.suspect(suspicion{reason: "test"})
	}
	require.Zero(t, b.State().Restarts)
	require.True(t, b.Ready())
}

func TestNothingIsLeftRunning(t *testing.T) {
	before := runtime.NumGoroutine()
	b, p, stop := up(t, quick(t))
	_, err := p.Append(t.Context(), 0, messages(1, 100))
	require.NoError(t, err)
	s := b.Source("inventory", fromStart)
	fetch(t, s, 100)
	require.NoError(t, b.Scan(t.Context(), func(uint64, relay.Message) error { return nil }))
	restart(t, b)
	fetchAgain(t, s, 1)
	stop()
	// The condition runs on a goroutine of its own.
	if !assert.Eventually(t, func() bool { return runtime.NumGoroutine()-1 <= before }, 5*time.Second, 5*time.Millisecond) {
		buf := make([]byte, 1<<20)
		t.Logf("%s", buf[:runtime.Stack(buf, true)])
	}
}
