package broker

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/relay"
)

func TestStartThatHangsEndsTheProgramme(t *testing.T) {
	o := quick(t)
	o.StartTimeout = 100 * time.Millisecond
	b, err := New(o)
	require.NoError(t, err)
	_, err = b.dir.prepare()
	require.NoError(t, err)
	release := make(chan struct{})
	defer close(release)
	require.ErrorIs(t, b.startWithin(t.Context(), func() { <-release }), ErrStuck)
	require.FileExists(t, b.dir.marker(), "the next start has to know")
	// A stop during a start waits for the start's own limit.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, b.startWithin(ctx, func() {}))
	require.ErrorIs(t, b.startWithin(ctx, func() { <-release }), ErrStuck)
}

// TestFullDiskHeals fills a small file system until publishes fail, frees it,
// and expects appends to go on by themselves, with everything in its place.
func TestFullDiskHeals(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a tmpfs needs root")
	}
	mount := t.TempDir()
	if err := syscall.Mount("tmpfs", mount, "tmpfs", 0, "size=24m"); err != nil {
		t.Skip("mount: ", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(mount, syscall.MNT_DETACH) })
	filler := filepath.Join(mount, "filler")
	require.NoError(t, os.WriteFile(filler, make([]byte, 16<<20), 0o600))

	o := quick(t)
	o.Dir, o.PublishTimeout = filepath.Join(mount, "jetstream"), 300*time.Millisecond
	b, p, _ := up(t, o)
	payload := bytes.Repeat([]byte("x"), 16<<10)
	base, err := uint64(0), error(nil)
	batch := func() []relay.Message {
		msgs := messages(int64(base)+1, 50)
		for i := range msgs {
			msgs[i].Record.Payload = payload
		}
		return msgs
	}
	for range 100 {
		var n int
		n, err = p.Append(t.Context(), base, batch())
		base += uint64(n)
		if err != nil {
			break
		}
	}
	require.ErrorIs(t, err, relay.ErrOutage)
	require.NotErrorIs(t, err, relay.ErrConflict)

	// The disk stays full for a while; the relay and the supervisor go on trying.
	require.Eventually(t, func() bool {
		if end, err := p.Tail(t.Context()); err == nil && end.Exists {
			_, _ = p.Append(t.Context(), end.LastSeq, messages(int64(end.LastSeq)+1, 1000))
		}
		return b.State().Restarts > maxRefused+1
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, os.Remove(filler))
	require.Eventually(t, func() bool {
		end, err := p.Tail(t.Context())
		if err != nil {
			return false
		}
		if !end.Exists {
			require.FailNow(t, "the stream is lost")
		}
		base = end.LastSeq
		n, err := p.Append(t.Context(), base, batch())
		base += uint64(n)
		return err == nil
	}, 10*time.Second, 10*time.Millisecond, "%+v", b.State())
	require.Zero(t, b.State().Quarantines, "a full disk is not the store's fault")
	require.NoError(t, b.Scan(t.Context(), func(seq uint64, m relay.Message) error {
		require.EqualValues(t, seq, m.Record.Position)
		return nil
	}))
}
