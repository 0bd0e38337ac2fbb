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
	childReady = 30 * time.Second // for serve to become ready
	childStop  = 30 * time.Second // for serve to drain
)

// child is a serve process that is killed and started again. Each start
// has another port.
type child struct {
	dir     string
	stderr  lastBytes
	log     io.Writer  // gets stderr too
	crashed chan error // receives when a process ends that nobody told to

	mu      sync.Mutex
	runs    int           // started so far
	process *process      // nil while down
	changed chan struct{} // closed and replaced when process changes
}

// process is one run of serve.
type process struct {
	cmd      *exec.Cmd
	run      int           // which of the child's, from 1
	base     string        // http://host:port
	expected atomic.Bool   // it was told to end
	done     chan struct{} // closed when it has ended
	err      error         // how; read after done
}

func newChild(dir string) *child {
	return &child{dir: dir, log: io.Discard, crashed: make(chan error, 1), changed: make(chan struct{})}
}

// start runs serve and returns when it is ready.
func (s *child) start(ctx context.Context) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	p := &process{cmd: exec.Command(exe, "serve", "--dir", s.dir, "--http", "127.0.0.1:0", "--log-level", "warn"),
		done: make(chan struct{})}
	p.cmd.Args[0] = os.Args[0]
	p.cmd.Env = plainEnvironment()
	p.cmd.Stderr = io.MultiWriter(&s.stderr, s.log)
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start serve: %w", err)
	}
	ready := make(chan readyDocument, 1)
	go s.follow(p, stdout, ready)
	timeout := time.NewTimer(childReady)
	defer timeout.Stop()
	select {
	case d := <-ready:
		p.base = "http://" + d.HTTP
		s.set(p)
		return nil
	case err = <-s.crashed:
		return err
	case <-timeout.C:
		err = fmt.Errorf("serve is not ready after %v", childReady)
	case <-ctx.Done():
		err = ctx.Err()
	}
	p.end(os.Kill)
	return errors.Join(err, s.trouble())
}

// follow reads what a process writes to stdout, and sees it end.
func (s *child) follow(p *process, stdout io.Reader, ready chan<- readyDocument) {
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
func (p *process) end(signal os.Signal) {
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
func (s *child) set(p *process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p != nil {
		s.runs++
		p.run = s.runs
	}
	s.process = p
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *child) current() (p *process, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process, s.changed
}

// up waits until the server is up.
func (s *child) up(ctx context.Context) (*process, error) {
	for {
		p, changed := s.current()
		if p != nil {
			return p, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// kill ends the process as SIGKILL does, if there is one, and waits for its end.
func (s *child) kill() {
	if p, _ := s.current(); p != nil {
		p.end(os.Kill)
		<-p.done
		s.set(nil)
	}
}

// stop asks the process to drain and end, and returns an error if it did not
// do so in order.
func (s *child) stop(ctx context.Context) error {
	if runtime.GOOS == "windows" { // which has no SIGTERM
		s.kill()
		return nil
	}
	p, _ := s.current()
	p.end(syscall.SIGTERM)
	timeout := time.NewTimer(childStop)
	defer timeout.Stop()
	select {
	case <-p.done:
		s.set(nil)
		if p.err != nil {
			return errors.Join(fmt.Errorf("serve did not stop in order: %w", p.err), s.trouble())
		}
		return nil
	case <-timeout.C:
		return errors.Join(fmt.Errorf("serve has not stopped after %v", childStop), s.trouble())
	case <-ctx.Done():
		return ctx.Err()
	}
}

// trouble is what the processes wrote to stderr, nil if nothing.
func (s *child) trouble() error {
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
