package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	demoReady = 30 * time.Second // for serve to become ready
	demoStop  = 30 * time.Second // for serve to drain
)

// demoServer is a serve process that is killed and started again. Each start
// has another port.
type demoServer struct {
	dir     string
	stderr  lastBytes
	crashed chan error // receives when a process ends that nobody told to

	mu      sync.Mutex
	process *demoProcess  // nil while down
	changed chan struct{} // closed and replaced when process changes
}

// demoProcess is one run of serve.
type demoProcess struct {
	cmd      *exec.Cmd
	base     string        // http://host:port
	expected atomic.Bool   // it was told to end
	done     chan struct{} // closed when it has ended
	err      error         // how; read after done
}

func newDemoServer(dir string) *demoServer {
	return &demoServer{dir: dir, crashed: make(chan error, 1), changed: make(chan struct{})}
}

// start runs serve and returns when it is ready.
func (s *demoServer) start(ctx context.Context) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	p := &demoProcess{cmd: exec.Command(exe, "serve", "--dir", s.dir, "--http", "127.0.0.1:0", "--log-level", "warn"),
		done: make(chan struct{})}
	p.cmd.Args[0] = os.Args[0]
	p.cmd.Env = plainEnvironment()
	p.cmd.Stderr = &s.stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start serve: %w", err)
	}
	ready := make(chan readyDocument, 1)
	go s.follow(p, stdout, ready)
	timeout := time.NewTimer(demoReady)
	defer timeout.Stop()
	select {
	case d := <-ready:
		p.base = "http://" + d.HTTP
		s.set(p)
		return nil
	case err = <-s.crashed:
		return err
	case <-timeout.C:
		err = fmt.Errorf("serve is not ready after %v", demoReady)
	case <-ctx.Done():
		err = ctx.Err()
	}
	p.end(os.Kill)
	return errors.Join(err, s.trouble())
}

// follow reads what a process writes to stdout, and sees it end.
func (s *demoServer) follow(p *demoProcess, stdout io.Reader, ready chan<- readyDocument) {
	lines := bufio.NewReader(stdout)
	line, _ := lines.ReadBytes('\n')
	var d readyDocument
	if json.Unmarshal(line, &d) == nil && d.Event == readyEvent {
		ready <- d
	}
	_, _ = io.Copy(io.Discard, lines)
	p.err = p.cmd.Wait()
	close(p.done)
	if !p.expected.Load() {
		s.crashed <- errors.Join(fmt.Errorf("serve ended by itself: %v", p.cmd.ProcessState), s.trouble())
	}
}

// end sends the process a signal that ends it.
func (p *demoProcess) end(signal os.Signal) {
	p.expected.Store(true)
	_ = p.cmd.Process.Signal(signal) // fails when it has ended
}

// plainEnvironment is ours without the settings of outlog: they are the
// user's, for the user's own service.
func plainEnvironment() []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "OUTLOG_") {
			env = append(env, e)
		}
	}
	return env
}

// set notes the running process, or with nil that there is none.
func (s *demoServer) set(p *demoProcess) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.process = p
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *demoServer) current() (p *demoProcess, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process, s.changed
}

// url waits until the server is up.
func (s *demoServer) url(ctx context.Context) (string, error) {
	for {
		p, changed := s.current()
		if p != nil {
			return p.base, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// kill ends the process as SIGKILL does, if there is one, and waits for its end.
func (s *demoServer) kill() {
	if p, _ := s.current(); p != nil {
		p.end(os.Kill)
		<-p.done
		s.set(nil)
	}
}

// stop asks the process to drain and end, and returns an error if it did not
// do so in order.
func (s *demoServer) stop(ctx context.Context) error {
	if runtime.GOOS == "windows" { // which has no SIGTERM
		s.kill()
		return nil
	}
	p, _ := s.current()
	p.end(syscall.SIGTERM)
	timeout := time.NewTimer(demoStop)
	defer timeout.Stop()
	select {
	case <-p.done:
		s.set(nil)
		if p.err != nil {
			return errors.Join(fmt.Errorf("serve did not stop in order: %w", p.err), s.trouble())
		}
		return nil
	case <-timeout.C:
		return errors.Join(fmt.Errorf("serve has not stopped after %v", demoStop), s.trouble())
	case <-ctx.Done():
		return ctx.Err()
	}
}

// trouble is what the processes wrote to stderr, nil if nothing.
func (s *demoServer) trouble() error {
	if text := s.stderr.String(); text != "" {
		return fmt.Errorf("serve wrote:\n%s", text)
	}
	return nil
}

// lastBytes keeps the end of what is written to it.
type lastBytes struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

const lastBytesKept = 16 << 10

func (l *lastBytes) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(p)
	if over := l.buf.Len() - lastBytesKept; over > 0 {
		l.buf.Next(over)
	}
	return len(p), nil
}

func (l *lastBytes) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.TrimSpace(l.buf.String())
}
