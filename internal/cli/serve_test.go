package cli_test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// start runs `outlog serve` on dir until the test ends.
func start(t *testing.T, dir string, args ...string) *server {
	s, _, err := startServer(t.TempDir(), os.Environ(), append([]string{"--dir", dir}, args...)...)
	require.NoError(t, err)
	t.Cleanup(func() { s.end(os.Kill) })
	return s
}

func (s *server) address() string { return strings.TrimPrefix(s.base, "http://") }

// TestSecondSignalExitsAtOnce keeps a request open so that the first SIGTERM
// has something to wait for.
func TestSecondSignalExitsAtOnce(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no SIGTERM")
	}
	s := start(t, t.TempDir(), "--drain-timeout", "5m")
	conn, err := net.Dial("tcp", s.address())
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprintf(conn, "POST /orders HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n", s.address())
	require.NoError(t, err)
	began := make([]byte, len("HTTP/1.1 100 Continue"))
	_, err = conn.Read(began)
	require.NoError(t, err)
	require.Equal(t, "HTTP/1.1 100 Continue", string(began), "the handler must be reading")

	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", s.address())
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	}, 10*time.Second, time.Millisecond, "the first signal must end listening")
	require.Contains(t, s.end(syscall.SIGTERM), "exit status 1 ")
}

// startStandby runs `outlog serve --standby` beside an owner of dir, and returns
// when it waits.
func startStandby(t *testing.T, dir string) (cmd *exec.Cmd, stdout *bufio.Reader) {
	cmd = exec.Command("outlog", "serve", "--dir", dir, "--http", "127.0.0.1:0", "--standby")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	logged, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(logged).ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, "standing by")
	return cmd, bufio.NewReader(out)
}

// TestStandbyTakesOver kills the owner of a directory.
func TestStandbyTakesOver(t *testing.T) {
	dir := t.TempDir()
	first := start(t, dir)
	_, stdout := startStandby(t, dir)
	first.end(os.Kill)
	line, err := stdout.ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, `{"event":"ready"`)
}

// TestStandbyStops tells a standby to end before it is the owner.
func TestStandbyStops(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no SIGTERM")
	}
	dir := t.TempDir()
	start(t, dir)
	cmd, _ := startStandby(t, dir)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait())
}
