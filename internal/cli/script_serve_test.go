package cli_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"github.com/rogpeppe/go-internal/testscript"
)

// server is an `outlog serve` that a test has started.
type server struct {
	cmd    *exec.Cmd
	base   string // http://host:port
	stdout *bufio.Reader
	stderr bytes.Buffer
	waited bool
}

// startServer runs `outlog serve` and returns when it is ready, with the line
// it printed.
func startServer(dir string, env []string, args ...string) (*server, string, error) {
	s := &server{cmd: exec.Command("outlog", append([]string{"serve", "--http", "127.0.0.1:0"}, args...)...)}
	s.cmd.Dir, s.cmd.Env, s.cmd.Stderr = dir, env, &s.stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, "", err
	}
	s.stdout = bufio.NewReader(out)
	line, err := s.stdout.ReadString('\n')
	var ready struct{ Event, HTTP string }
	if err == nil {
		err = json.Unmarshal([]byte(line), &ready)
	}
	if err != nil || ready.Event != "ready" {
		return nil, "", fmt.Errorf("serve is not ready: %q %w\n%s", line, err, s.end(os.Kill))
	}
	s.base = "http://" + ready.HTTP
	return s, line, nil
}

// end sends a signal and waits; it returns what was written to stderr, after a
// line of how the process ended and what else it wrote to stdout.
func (s *server) end(signal os.Signal) string {
	if s.waited {
		return ""
	}
	s.waited = true
	_ = s.cmd.Process.Signal(signal)
	rest, _ := io.ReadAll(s.stdout)
	_ = s.cmd.Wait()
	return fmt.Sprintf("%v %s\n%s", s.cmd.ProcessState, rest, s.stderr.String())
}

// running are the servers of a script, by directory.
type running map[string]*server

const runningKey = "running"

func runningServers(ts *testscript.TestScript) running { return ts.Value(runningKey).(running) }

// scriptServe starts a server, which is killed when the script ends. Its address
// is in $URL.
func scriptServe(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) > 0, "serve DIR [ARG...]")
	env := os.Environ()
	for _, e := range []string{"OUTLOG_TOKEN"} {
		env = append(env, e+"="+ts.Getenv(e))
	}
	s, line, err := startServer(ts.MkAbs("."), env, append([]string{"--dir", args[0]}, args[1:]...)...)
	ts.Check(err)
	ts.Defer(func() { s.end(os.Kill) })
	runningServers(ts)[args[0]] = s
	ts.Setenv("URL", s.base)
	fmt.Fprint(ts.Stdout(), line)
}

// scriptStop ends the directory's server with SIGTERM. It must exit with status 0
// and have written nothing more to stdout. What it logged can be matched with
// stderr.
func scriptStop(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 1, "stop DIR")
	text := runningServers(ts)[args[0]].end(syscall.SIGTERM)
	how, log, _ := strings.Cut(text, "\n")
	if how != "exit status 0 " {
		ts.Fatalf("serve: %s", text)
	}
	fmt.Fprint(ts.Stderr(), log)
}

// scriptKill ends the directory's server with SIGKILL.
func scriptKill(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 1, "kill DIR")
	runningServers(ts)[args[0]].end(os.Kill)
}

// scriptHTTP sends a request to $URL, checks the status of the answer and prints
// its body.
func scriptHTTP(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 3 || len(args) == 4, "http STATUS METHOD PATH [JSON]")
	req, err := http.NewRequest(args[1], ts.Getenv("URL")+args[2], strings.NewReader(strings.Join(args[3:], "")))
	ts.Check(err)
	req.Header.Set("Content-Type", "application/json")
	if token := ts.Getenv("OUTLOG_TOKEN"); token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	ts.Check(err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	ts.Check(err)
	if strconv.Itoa(resp.StatusCode) != args[0] {
		ts.Fatalf("%s %s answers %d, want %s: %s", args[1], args[2], resp.StatusCode, args[0], body)
	}
	fmt.Fprint(ts.Stdout(), string(body))
}
