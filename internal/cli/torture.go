package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"
)

type tortureCmd struct {
	jsonFlag
	Dir  string        `env:"-" placeholder:"DIR" help:"New or empty directory to use and to keep. Without it a temporary one is used, and removed unless a promise was broken."`
	For  time.Duration `env:"-" default:"60s" placeholder:"DURATION" help:"How long to inject faults (${default})."`
	Seed uint64        `env:"-" default:"0" placeholder:"N" help:"Repeats a schedule of faults; 0: random."`
}

// tortureLog is the file in the directory that says what was done and what the
// service wrote.
const tortureLog = "torture.log"

// Validate refuses a time in which nothing can be shown.
func (c *tortureCmd) Validate() error {
	if c.For < time.Second || c.For > 24*time.Hour {
		return errors.New("--for is 1s to 24h")
	}
	return nil
}

// Run places orders with a service that it hurts in every way it can, and then
// looks from outside whether every promise was kept.
func (c *tortureCmd) Run(ctx context.Context, out output) error {
	if c.Seed == 0 {
		c.Seed = rand.Uint64()
	}
	dir, temporary, err := newDataDir("torture", c.Dir)
	if err != nil {
		return err
	}
	fmt.Fprintf(out.Err, "outlog torture: --seed %d --for %v, directory %s\n", c.Seed, c.For, dir)
	d, err := c.torture(ctx, dir, out.Err)
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

// torture does it. An error means that nothing could be tried: a service that
// does not come back is a verdict.
func (c *tortureCmd) torture(ctx context.Context, dir string, bar io.Writer) (*tortureDocument, error) {
	file, err := os.OpenFile(filepath.Join(dir, tortureLog), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	copies, err := os.MkdirTemp("", "outlog-torture-copies-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(copies)
	t := newTorment(c.Seed, dir, copies, slog.New(slog.NewTextHandler(file, nil)))
	t.server.log = file
	defer t.server.kill()
	if err := t.server.start(ctx); err != nil {
		return nil, err
	}
	d := &tortureDocument{Seed: c.Seed, left: t.impossible}
	d.failed(t.run(ctx, c.For, newProgress(bar, int(c.For/time.Second), "torture")))
	d.Faults, d.Recovery, d.RSSMaxMB = t.counts, spread(t.recoveries), t.memory.max()>>20
	if ctx.Err() != nil || len(d.Reasons) > 0 {
		return d, ctx.Err()
	}
	if err := awaitQuiet(ctx, dataDir{dir}, catchUp); err != nil {
		return nil, err
	}
	t.load.http.CloseIdleConnections()
	d.failed(t.server.stop(ctx))
	return d, d.judge(ctx, dataDir{dir}, t)
}

// judge audits the directory when the service has ended.
func (d *tortureDocument) judge(ctx context.Context, dir dataDir, t *torment) error {
	e := t.load.expected(t.restores)
	v, err := audit(ctx, dir, e.orders, e.gone)
	if err != nil {
		return err
	}
	v.Duplicated += e.twice
	for _, c := range v.checks {
		if !c.OK {
			d.failed(fmt.Errorf("verify: %s: %s", c.Name, c.Detail))
		}
	}
	d.promises, d.Events = v.promises, v.events
	d.Orders, d.Cancelled, d.RolledBack = len(e.orders), e.cancelled, len(e.gone)
	d.OK = v.kept() && len(d.Reasons) == 0
	return nil
}
