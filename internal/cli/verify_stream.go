package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"outlog/internal/lock"
	"outlog/node"
)

const (
	// verifyStreamPath is where serve answers for verify.
	verifyStreamPath = "/internal/verify-stream"
	// brokerStart is how long a broker that verify starts may take.
	brokerStart = 30 * time.Second
)

// tokenFlag is the flag of commands that ask a running node.
type tokenFlag struct {
	Token string `placeholder:"TOKEN" help:"Token of the HTTP server."`
}

// verifyStream compares the stream with the log. The stream belongs to the
// directory's owner: a running one is asked over HTTP; without one, this
// process is the owner for a moment.
func verifyStream(ctx context.Context, dir dataDir, token string) (node.StreamResult, error) {
	owner, held, err := lock.Holder(dir.database())
	if err != nil {
		return node.StreamResult{}, err
	}
	if !held {
		r, err := verifyStreamAsOwner(ctx, dir)
		taken, ok := errors.AsType[*lock.HeldError](err) // by one that has started since
		if !ok {
			return r, err
		}
		owner = taken.Owner
	}
	if owner.Address == "" {
		return node.StreamResult{}, fmt.Errorf("the owner of %s (pid %d) serves no HTTP to ask", dir.Dir, owner.PID)
	}
	return askVerifyStream(ctx, owner.Address, token)
}

// verifyStreamAsOwner compares without a running node.
func verifyStreamAsOwner(ctx context.Context, dir dataDir) (r node.StreamResult, err error) {
	err = withStream(ctx, dir, func(n *node.Node) error {
		r, err = streamResult(ctx, n)
		return err
	})
	return r, err
}

// streamResult compares. A stream that cannot be read fails the check.
func streamResult(ctx context.Context, n *node.Node) (node.StreamResult, error) {
	r, err := n.VerifyStream(ctx)
	if err != nil && ctx.Err() == nil {
		r.OK, r.Detail, err = false, err.Error(), nil
	}
	return r, err
}

// withStream calls fn with a node that owns the directory and runs nothing but
// the broker: relay and consumers stay where they are.
func withStream(ctx context.Context, dir dataDir, fn func(*node.Node) error) (err error) {
	n, err := node.Open(ctx, node.Options{Dir: dir.Dir})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- n.Broker().Run(running) }()
	defer func() {
		stop()
		err = errors.Join(err, <-ended, n.Close())
	}()
	starting, cancel := context.WithTimeout(ctx, brokerStart)
	defer cancel()
	if err := n.Broker().WaitUp(starting); err != nil {
		return fmt.Errorf("start the broker: %w", err)
	}
	return fn(n)
}

// askVerifyStream lets a running node compare.
func askVerifyStream(ctx context.Context, address, token string) (r node.StreamResult, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+verifyStreamPath, nil)
	if err != nil {
		return r, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return r, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return r, err
	}
	if resp.StatusCode != http.StatusOK {
		return r, fmt.Errorf("the node at %s answers %s: %s", address, resp.Status, problemDetail(body))
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return r, fmt.Errorf("answer of the node at %s: %w", address, err)
	}
	return r, nil
}

// problemDetail is what a problem document says, or the body as it is.
func problemDetail(body []byte) string {
	var p struct {
		Detail string `json:"detail"`
	}
	if json.Unmarshal(body, &p) == nil && p.Detail != "" {
		return p.Detail
	}
	return printable(string(body))
}
