package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"outlog/consumer"
	"outlog/examples/orders"
	"outlog/internal/admin"
	"outlog/internal/lock"
	"outlog/node"
	"outlog/store"
)

// consumersCmd is about the consumers of a log.
type consumersCmd struct {
	List   consumersListCmd   `cmd:"" help:"Show the consumers and what they have set aside."`
	Pause  consumersPauseCmd  `cmd:"" help:"Stop a consumer after the batch it is in."`
	Resume consumersResumeCmd `cmd:"" help:"Let a paused consumer go on."`
	Reset  consumersResetCmd  `cmd:"" help:"Let a consumer go on from another position; its effects after that are undone first."`
	Remove consumersRemoveCmd `cmd:"" help:"Forget a consumer that is not used any more, so that it keeps nothing from being pruned."`
}

type consumersListCmd struct {
	dataDir
	jsonFlag
}

// Run prints the consumers.
func (c *consumersListCmd) Run(ctx context.Context, out output) error {
	db, err := c.openReader(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	list, err := admin.ListConsumers(ctx, db)
	if err != nil {
		return err
	}
	return show(out.Out, c.JSON, list, printConsumers)
}

func printConsumers(w io.Writer, list []admin.ConsumerDetail) error {
	t := newTable(w)
	fmt.Fprintln(t, "NAME\tPOSITION\tBEHIND\tOLDEST\tSTATE\tGENERATION\tON DEAD\tRETRYING\tBLOCKED\tDEAD\tSKIPPED")
	for _, c := range list {
		skipped := make([]string, len(c.Skipped))
		for i, r := range c.Skipped {
			skipped[i] = fmt.Sprintf("%d-%d", r.After+1, r.Through)
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%.1f s\t%s\t%d\t%s\t%d\t%d\t%d\t%s\n", printable(c.Name), c.Position, c.LagEvents, c.LagSeconds,
			consumerState(c), c.Generation, c.OnDead, c.Retrying+c.Executing, c.Blocked, c.Dead, strings.Join(skipped, " "))
	}
	return t.Flush()
}

func consumerState(c admin.ConsumerDetail) string {
	state := "stopped"
	if c.Running {
		state = "running"
	}
	if c.Paused {
		state += ", paused"
	}
	if c.ResetPending {
		state += ", reset pending"
	}
	return state
}

// consumerFlags are those of all commands that change a consumer.
type consumerFlags struct {
	dataDir
	jsonFlag
	Name string `arg:"" help:"Name of the consumer."`
}

type (
	consumersPauseCmd  struct{ consumerFlags }
	consumersResumeCmd struct{ consumerFlags }
)

// pausedDocument is what consumers pause and resume print.
type pausedDocument struct {
	Consumer string `json:"consumer"`
	Paused   bool   `json:"paused"`
	Changed  bool   `json:"changed"` // false: it was so already
}

// Run pauses a consumer.
func (c *consumersPauseCmd) Run(ctx context.Context, out output) error {
	return c.setPaused(ctx, out, true, admin.Pause)
}

// Run resumes a consumer.
func (c *consumersResumeCmd) Run(ctx context.Context, out output) error {
	return c.setPaused(ctx, out, false, admin.Resume)
}

func (c *consumerFlags) setPaused(ctx context.Context, out output, paused bool, set func(context.Context, *store.DB, string) (bool, error)) error {
	db, err := c.openWriter(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	changed, err := set(ctx, db, c.Name)
	if err != nil {
		return err
	}
	return show(out.Out, c.JSON, []pausedDocument{{c.Name, paused, changed}}, func(w io.Writer, _ []pausedDocument) error {
		what := map[bool]string{true: "paused", false: "resumed"}[paused]
		if !changed {
			what = map[bool]string{true: "was paused already", false: "was not paused"}[paused]
		}
		_, err := fmt.Fprintf(w, "%s %s\n", c.Name, what)
		return err
	})
}

type consumersResetCmd struct {
	consumerFlags
	To            resetTarget   `env:"-" required:"" placeholder:"POSITION" help:"beginning, now, or the position after which to go on."`
	Force         bool          `env:"-" help:"Also a consumer that appends events."`
	KeepDiscarded bool          `env:"-" help:"Leave discarded events discarded; otherwise they are handled again."`
	Timeout       time.Duration `env:"-" default:"30s" placeholder:"DURATION" help:"How long the program that runs the consumer may take (${default})."`
	NoWait        bool          `env:"-" help:"Only leave the request: the program does it when it runs next."`
}

// resetTarget is where a consumer is reset to.
type resetTarget string

// UnmarshalText refuses what is no target.
func (r *resetTarget) UnmarshalText(text []byte) error {
	*r = resetTarget(text)
	if *r == "beginning" || *r == "now" {
		return nil
	}
	if p, err := strconv.ParseInt(string(*r), 10, 64); err != nil || p < 0 {
		return fmt.Errorf(`%q is not "beginning", "now" or a position`, text)
	}
	return nil
}

func (c *consumersResetCmd) request() consumer.ResetRequest {
	return consumer.ResetRequest{To: string(c.To), Force: c.Force, KeepDiscarded: c.KeepDiscarded}
}

// requestedDocument is what consumers reset --no-wait prints.
type requestedDocument struct {
	Consumer  string `json:"consumer"`
	RequestID int64  `json:"request_id"`
}

// Run resets a consumer: the running owner does it, or this process for a
// moment.
func (c *consumersResetCmd) Run(ctx context.Context, out output) error {
	if c.NoWait {
		return c.leaveRequest(ctx, out)
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	r, err := c.reset(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w; nothing was changed. Does the running program handle %s? --no-wait leaves the request for it", err, c.Name)
	}
	if err != nil {
		return err
	}
	return show(out.Out, c.JSON, []admin.ResetResult{r}, func(w io.Writer, _ []admin.ResetResult) error {
		_, err := fmt.Fprintf(w, "%s goes on after position %d, it was at %d\n", r.Consumer, r.To, r.From)
		return err
	})
}

func (c *consumersResetCmd) leaveRequest(ctx context.Context, out output) error {
	db, err := c.openWriter(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	p, err := admin.RequestReset(ctx, db, c.Name, c.request())
	if err != nil {
		return err
	}
	return show(out.Out, c.JSON, []requestedDocument{{c.Name, p.ID}}, func(w io.Writer, _ []requestedDocument) error {
		_, err := fmt.Fprintf(w, "reset of %s requested\n", c.Name)
		return err
	})
}

func (c *consumersResetCmd) reset(ctx context.Context) (r admin.ResetResult, err error) {
	_, held, err := lock.Holder(c.database())
	if err != nil {
		return r, err
	}
	if !held {
		r, err = c.resetAsOwner(ctx)
		if _, taken := errors.AsType[*lock.HeldError](err); !taken { // by one that has started since
			return r, err
		}
	}
	db, err := c.openWriter(ctx)
	if err != nil {
		return r, err
	}
	defer db.Close()
	return admin.Reset(ctx, db, c.Name, c.request())
}

// resetAsOwner runs the one consumer, without a broker, until it is reset. It
// may get some way from there before it is stopped.
func (c *consumersResetCmd) resetAsOwner(ctx context.Context) (r admin.ResetResult, err error) {
	db, err := c.openWriter(ctx) // a directory that is not there must not be made
	if err != nil {
		return r, err
	}
	known := admin.CheckKnown(ctx, db.Reader(), c.Name)
	application, err := applicationChecks(ctx, db)
	if err := errors.Join(known, err, db.Close()); err != nil {
		return r, err
	}
	all := orders.Consumers()
	i := slices.IndexFunc(all, func(o consumer.Options) bool { return o.Name == c.Name })
	if i < 0 || application == nil {
		return r, fmt.Errorf("no running program handles %s, and it is none of the order service's consumers; start its program, or use --no-wait", c.Name)
	}
	n, err := node.Open(ctx, node.Options{Dir: c.Dir, NoBroker: true, Migrations: []store.Migrations{orders.Migrations()}})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.Handle(all[i]); err != nil {
		return r, err
	}
	pending, err := admin.RequestReset(ctx, n.Store(), c.Name, c.request()) // before the consumer starts, which may depend on it
	if err != nil {
		return r, err
	}
	running, stop := context.WithCancel(ctx)
	waiting, ended := context.WithCancelCause(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		ended(n.Run(running))
	}()
	defer func() { stop(); <-stopped }()
	r, err = pending.Wait(waiting)
	if why := context.Cause(waiting); err != nil && why != nil && why != waiting.Err() {
		return r, why // the node could not run
	}
	return r, err
}

type consumersRemoveCmd struct{ consumerFlags }

// Run removes a consumer.
func (c *consumersRemoveCmd) Run(ctx context.Context, out output) error {
	db, err := c.openWriter(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	r, err := admin.Remove(ctx, db, c.Name)
	if err != nil {
		return err
	}
	return show(out.Out, c.JSON, []admin.Removed{r}, func(w io.Writer, _ []admin.Removed) error {
		_, err := fmt.Fprintf(w, "%s removed: %d inbox rows, %d parked events\n", r.Consumer, r.Inbox, r.Parked)
		return err
	})
}
