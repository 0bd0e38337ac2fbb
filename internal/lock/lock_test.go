package lock_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/internal/lock"
)

// childFlag makes the test binary an owner of the database named behind it.
const childFlag = "-own-database"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == childFlag {
		own(os.Args[2])
	}
	os.Exit(m.Run())
}

// own holds the database until its standard input ends, or it is killed.
func own(dbPath string) {
	l, err := lock.Acquire(dbPath)
	if err == nil {
		err = l.SetAddress("127.0.0.1:4711")
	}
	fmt.Println("held", err)
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// startOwner runs own in another process, and returns when it holds the lock.
func startOwner(t *testing.T, dbPath string) *exec.Cmd {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, childFlag, dbPath)
	_, err = cmd.StdinPipe() // ends with this process at the latest
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "held <nil>\n", line)
	return cmd
}

func kill(t *testing.T, cmd *exec.Cmd) {
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
}

func TestSecondOwner(t *testing.T) {
	db := filepath.Join(t.TempDir(), "outlog.db")
	first, err := lock.Acquire(db)
	require.NoError(t, err)
	require.NoError(t, first.SetAddress("127.0.0.1:8080"))

	_, err = lock.Acquire(db)
	held := new(lock.HeldError)
	require.ErrorAs(t, err, &held)
	require.Equal(t, first.Owner(), held.Owner)
	require.Equal(t, os.Getpid(), held.Owner.PID)
	require.ErrorContains(t, err, fmt.Sprintf("in use by another process (pid %d, http://127.0.0.1:8080, since ", os.Getpid()))
	require.ErrorContains(t, err, "--standby")

	require.NoError(t, first.Release())
	require.NoError(t, first.Release())
	require.Error(t, first.SetAddress("127.0.0.1:8080"))
	second, err := lock.Acquire(db)
	require.NoError(t, err)
	require.NoError(t, second.Release())
}

func TestMissingDirectory(t *testing.T) {
	_, err := lock.Acquire(filepath.Join(t.TempDir(), "none", "outlog.db"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestSymlink(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Skip(err) // needs a privilege on Windows
	}
	l, err := lock.Acquire(filepath.Join(link, "outlog.db"))
	require.NoError(t, err)
	_, err = lock.Acquire(filepath.Join(dir, "outlog.db"))
	require.ErrorAs(t, err, new(*lock.HeldError))
	require.NoError(t, l.Release())
}

func TestSuccessorOfKilled(t *testing.T) {
	db := filepath.Join(t.TempDir(), "outlog.db")
	child := startOwner(t, db)
	owner, held, err := lock.Holder(db)
	require.NoError(t, err)
	require.True(t, held)
	require.Equal(t, child.Process.Pid, owner.PID)
	require.Equal(t, "127.0.0.1:4711", owner.Address)
	_, err = lock.Acquire(db)
	require.ErrorAs(t, err, new(*lock.HeldError))

	kill(t, child)
	_, held, err = lock.Holder(db)
	require.NoError(t, err)
	require.False(t, held, "the owner file that the killed process left must not be believed")
	l, err := lock.Acquire(db)
	require.NoError(t, err)
	require.Empty(t, l.Owner().Address)
	require.NoError(t, l.Release())
}

func TestStandby(t *testing.T) {
	db := filepath.Join(t.TempDir(), "outlog.db")
	child := startOwner(t, db)

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := lock.Wait(ctx, db)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	got := make(chan error, 1)
	go func() {
		l, err := lock.Wait(t.Context(), db)
		if err == nil {
			err = l.Release()
		}
		got <- err
	}()
	kill(t, child)
	require.NoError(t, <-got)
}

func TestHolderDoesNotDisturb(t *testing.T) {
	db := filepath.Join(t.TempDir(), "outlog.db")
	_, held, err := lock.Holder(db)
	require.NoError(t, err)
	require.False(t, held)
	entries, err := os.ReadDir(filepath.Dir(db))
	require.NoError(t, err)
	require.Empty(t, entries, "looking must not create files")

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if _, _, err := lock.Holder(db); err != nil {
				t.Error(err)
			}
		}
	}()
	for range 50 {
		l, err := lock.Acquire(db)
		require.NoError(t, err)
		require.NoError(t, l.Release())
	}
	cancel()
	<-done
}

func TestFileModes(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no permission bits")
	}
	db := filepath.Join(t.TempDir(), "outlog.db")
	l, err := lock.Acquire(db)
	require.NoError(t, err)
	for _, suffix := range []string{".lock", ".owner"} {
		st, err := os.Stat(db + suffix)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), st.Mode(), suffix)
	}
	require.NoError(t, l.Release())
	_, err = os.Stat(db + ".owner")
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestWaitWithoutTime takes a free lock although its time is up: a busy machine
// must not make a free database look owned.
func TestWaitWithoutTime(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	l, err := lock.Wait(ctx, filepath.Join(t.TempDir(), "app.db"))
	require.NoError(t, err)
	require.NoError(t, l.Release())
}
