package cli

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"
)

type demoCmd struct {
	jsonFlag
	Dir    string `env:"-" placeholder:"DIR" help:"New or empty directory to use and to keep. Without it a temporary one is used, and removed unless a promise was broken."`
	Orders int    `default:"2000" placeholder:"N" help:"Orders to place (${default})."`
	Kills  int    `default:"3" placeholder:"N" help:"How often to kill the service under load (${default})."`
	Seed   uint64 `default:"0" placeholder:"N" help:"Makes orders and moments of killing repeatable; 0: random."`
}

// catchUp bounds the wait for relay and consumers before the service is told to
// stop. What is not applied by then counts as lost.
const catchUp = 20 * time.Second

// Validate refuses numbers that make no demonstration.
func (c *demoCmd) Validate() error {
	switch {
	case c.Orders < 1 || c.Orders > 10_000_000:
		return errors.New("--orders is 1 to 10000000")
	case c.Kills < 0 || c.Kills >= c.Orders:
		return errors.New("--kills is 0 to one less than --orders")
	}
	return nil
}

// Run places orders with a service that it kills again and again, and then
// looks from outside whether every promise was kept.
func (c *demoCmd) Run(ctx context.Context, out output) (err error) {
	if c.Seed == 0 {
		c.Seed = rand.Uint64()
	}
	dir, temporary, err := newDataDir("demo", c.Dir)
	if err != nil {
		return err
	}
	fmt.Fprintf(out.Err, "outlog demo: --seed %d, directory %s\n", c.Seed, dir)
	d, err := c.demonstrate(ctx, dataDir{dir}, out)
	kept := dir
	if temporary && (err == nil && d.OK || ctx.Err() != nil) {
		err = errors.Join(err, os.RemoveAll(dir))
		kept = ""
	}
	if err != nil {
		return err
	}
	people := out.Out
	if c.JSON {
		if err := writeJSON(out.Out, d); err != nil || d.OK {
			return err
		}
		people = out.Err // why it is not ok
	}
	if err = d.print(people, kept); err == nil && !d.OK {
		err = errReported
	}
	return err
}

// demonstrate does it. An error means that there is nothing to judge.
func (c *demoCmd) demonstrate(ctx context.Context, dir dataDir, out output) (demoDocument, error) {
	var d demoDocument
	server := newChild(dir.Dir)
	defer server.kill()
	if err := server.start(ctx); err != nil {
		return d, err
	}
	load := newDemoLoad(c.Seed, c.Orders, c.Kills, server)
	if err := load.run(ctx, newProgress(out.Err, c.Orders, "orders")); err != nil {
		return d, errors.Join(err, server.trouble())
	}
	if err := awaitQuiet(ctx, dir, catchUp); err != nil {
		return d, errors.Join(err, server.trouble())
	}
	load.http.CloseIdleConnections() // the server would wait for one that was never used
	d.cleanStop = server.stop(ctx)
	d.Orders, d.Kills, d.Recovery = c.Orders, len(load.recoveries), milliseconds(load.recoveries)
	d.cancelled = load.cancelled()
	v, err := audit(ctx, dir, load.list, nil)
	d.promises, d.Events, d.Consumers, d.checks = v.promises, v.events, v.consumers, v.checks
	d.OK = err == nil && v.kept() && d.cleanStop == nil
	return d, err
}

func milliseconds(ds []time.Duration) []int64 {
	out := make([]int64, len(ds))
	for i, d := range ds {
		out[i] = d.Milliseconds()
	}
	return out
}
