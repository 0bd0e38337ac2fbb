package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"outlog/examples/orders"
	"outlog/internal/lock"
	"outlog/internal/web"
	"outlog/node"
	"outlog/store"
)

type serveCmd struct {
	Dir            string        `default:"./outlog-data" placeholder:"DIR" help:"Data directory; it is made if it is not there (${default})."`
	HTTP           string        `name:"http" default:"127.0.0.1:8080" placeholder:"HOST:PORT" help:"Listen here; port 0 picks a free one (${default})."`
	Synchronous    string        `default:"full" enum:"full,normal" placeholder:"MODE" help:"full: accepted orders survive power loss. normal: power loss may take the last ones (${default})."`
	DrainTimeout   time.Duration `default:"5s" placeholder:"DURATION" help:"Bounds each step of an orderly stop (${default})."`
	Retention      time.Duration `default:"0s" placeholder:"DURATION" help:"Prune events older than this that nobody needs; 0s keeps them for ever (${default})."`
	RetentionBytes int64         `default:"0" placeholder:"BYTES" help:"Prune the oldest such events until the log is no larger; 0: whatever its size (${default})."`
	archiveFlags
	InboxWindow int64         `default:"1000000" placeholder:"POSITIONS" help:"Keep inbox rows for this many positions below a consumer's cursor; -1 keeps all (${default})."`
	HistoryAge  time.Duration `default:"2160h" placeholder:"DURATION" help:"Remember failed attempts for this long; -1ns: for ever (${default})."`
	Standby     bool          `help:"Wait while another process owns the directory, and take over when it ends."`
	tokenFlag
	logFlags
}

// readyDocument is the one line that serve prints, when it is ready.
type readyDocument struct {
	Event string `json:"event"`
	HTTP  string `json:"http"` // host:port
	Dir   string `json:"dir"`
}

const readyEvent = "ready"

// Run runs the order service until the first signal, then drains.
func (c *serveCmd) Run(ctx context.Context, out output) error {
	if err := web.CheckListen(c.HTTP, c.Token); err != nil {
		return err
	}
	log := c.logger(out.Err)
	if c.Synchronous == "normal" {
		log.Warn("with --synchronous normal a power cut may take back orders that were accepted in the last moments before it")
	}
	if owner, held, _ := lock.Holder(node.DatabasePath(c.Dir)); held && c.Standby {
		log.Info("standing by until the owner of the directory ends", "dir", c.Dir, "owner_pid", owner.PID)
	}
	n, err := node.Open(ctx, node.Options{
		Dir:            c.Dir,
		Standby:        c.Standby,
		Synchronous:    strings.ToUpper(c.Synchronous),
		DrainTimeout:   c.DrainTimeout,
		Retention:      c.Retention,
		RetentionBytes: c.RetentionBytes,
		Archive:        c.Archive,
		ArchiveFormat:  c.ArchiveFormat,
		InboxWindow:    c.InboxWindow,
		HistoryAge:     c.HistoryAge,
		Migrations:     []store.Migrations{orders.Migrations()},
		Logger:         log,
	})
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil // told to stop while it was waiting
	}
	if err != nil {
		return err
	}
	return errors.Join(c.serve(ctx, n, log, out), n.Close())
}

// serve stops in order: first no more requests, then the node drains.
func (c *serveCmd) serve(ctx context.Context, n *node.Node, log *slog.Logger, out output) error {
	for _, o := range orders.Consumers() {
		if err := n.Handle(o); err != nil {
			return err
		}
	}
	handler, err := c.handler(n, log)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", c.HTTP)
	if err != nil {
		return fmt.Errorf("%w; --http 127.0.0.1:0 picks a free port", err)
	}
	address := reachable(ln.Addr())
	if err := n.Announce(address); err != nil {
		log.Warn("other commands cannot find this server", "error", err)
	}
	requests, stopRequests := context.WithCancel(ctx)
	defer stopRequests()
	moving, stopMoving := context.WithCancel(context.WithoutCancel(ctx))
	defer stopMoving()
	moved := make(chan error, 1)
	go func() {
		moved <- n.Run(moving)
		stopRequests() // it only ends early with an error
	}()
	announced := writeJSON(out.Out, readyDocument{readyEvent, address, c.Dir})
	if announced != nil {
		stopRequests() // nobody learns the address
		announced = fmt.Errorf("say on stdout that the service is ready: %w", announced)
	}
	served := web.Serve(requests, ln, handler, c.DrainTimeout)
	stopMoving()
	return errors.Join(announced, served, <-moved)
}

// handler answers for the order service, for health, and for verify.
func (c *serveCmd) handler(n *node.Node, log *slog.Logger) (http.Handler, error) {
	mux := http.NewServeMux()
	orders.New(n, log).Routes(mux)
	web.Health(mux, n.NotReady)
	mux.HandleFunc("GET "+verifyStreamPath, func(w http.ResponseWriter, r *http.Request) {
		if result, err := streamResult(r.Context(), n); err == nil { // else the client is gone
			web.JSON(w, http.StatusOK, result)
		}
	})
	host, _, err := net.SplitHostPort(c.HTTP)
	if err != nil {
		return nil, err
	}
	return web.Recover(log, web.Guard(web.Mux(mux), web.GuardOptions{Hosts: []string{host}, Token: c.Token})), nil
}

// reachable is where commands on this machine find a listener: one on every
// interface is also on loopback.
func reachable(a net.Addr) string {
	if t, ok := a.(*net.TCPAddr); ok && t.IP.IsUnspecified() {
		return (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: t.Port}).String()
	}
	return a.String()
}
