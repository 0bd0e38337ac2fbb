package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"outlog/internal/admin"
)

// deadCmd is about events that a consumer, or the relay, has given up.
type deadCmd struct {
	List    deadListCmd    `cmd:"" help:"List dead letters, or groups of equal errors."`
	Show    deadShowCmd    `cmd:"" help:"Show an event that failed: payload, every attempt, what waits behind it."`
	Redrive deadRedriveCmd `cmd:"" help:"Try dead letters again, in order, with no attempt counted."`
	Discard deadDiscardCmd `cmd:"" help:"Give dead letters up for good; what waits behind them goes on."`
}

type deadListCmd struct {
	dataDir
	jsonFlag
	Consumer string `env:"-" placeholder:"NAME" help:"Only those of this consumer; relay: of the relay."`
	Group    bool   `env:"-" help:"Group equal errors."`
	Limit    int    `env:"-" default:"100" placeholder:"N" help:"Show at most this many; 0: all (${default})."`
}

// Validate refuses what no list can have.
func (c *deadListCmd) Validate() error {
	if c.Limit < 0 {
		return errors.New("--limit is not negative")
	}
	return nil
}

// Run prints dead letters or their groups.
func (c *deadListCmd) Run(ctx context.Context, out output) error {
	db, err := c.openReader(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	if c.Group {
		groups, err := admin.GroupDead(ctx, db, c.Consumer)
		if err != nil {
			return err
		}
		return show(out.Out, c.JSON, groups, printDeadGroups)
	}
	limit := c.Limit
	if limit > 0 {
		limit++ // to see whether there are more
	}
	letters, err := admin.ListDead(ctx, db, c.Consumer, limit)
	if err != nil {
		return err
	}
	if more := c.Limit > 0 && len(letters) > c.Limit; more {
		letters = letters[:c.Limit]
		defer fmt.Fprintln(out.Err, "outlog: there are more; --limit 0 shows all, --group what they have in common")
	}
	return show(out.Out, c.JSON, letters, printDead)
}

// show prints documents: each as a line of JSON, or all as people read them.
func show[T any](w io.Writer, asJSON bool, documents []T, print func(io.Writer, []T) error) error {
	if !asJSON {
		return print(w, documents)
	}
	for _, d := range documents {
		if err := writeJSON(w, d); err != nil {
			return err
		}
	}
	return nil
}

func printDead(w io.Writer, letters []admin.DeadLetter) error {
	t := newTable(w)
	fmt.Fprintln(t, "CONSUMER\tPOSITION\tFAILED\tID\tTYPE\tAGGREGATE\tVERSION\tATTEMPTS\tWAITING\tERROR")
	for _, d := range letters {
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s/%s\t%d\t%d\t%d\t%s\n", printable(d.Consumer), d.Position, stamp(d.FailedAt), d.EventID, printable(d.Type),
			printable(d.AggregateType), printable(d.AggregateID), d.AggregateVersion, d.Attempts, d.Waiting, printable(d.Error))
	}
	return t.Flush()
}

func printDeadGroups(w io.Writer, groups []admin.DeadGroup) error {
	t := newTable(w)
	fmt.Fprintln(t, "CONSUMER\tFINGERPRINT\tCOUNT\tFIRST\tLAST\tSAMPLE\tERROR")
	for _, g := range groups {
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%s\n", printable(g.Consumer), g.Fingerprint, g.Count, stamp(g.First), stamp(g.Last),
			g.SampleEventID, printable(g.SampleError))
	}
	return t.Flush()
}

type deadShowCmd struct {
	dataDir
	jsonFlag
	EventID  string `arg:"" name:"event-id" help:"Id of the event."`
	Consumer string `env:"-" placeholder:"NAME" help:"Only what happened at this consumer."`
}

// Run prints one event and its history.
func (c *deadShowCmd) Run(ctx context.Context, out output) error {
	db, err := c.openReader(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	p, err := admin.ShowParked(ctx, db, strings.ToUpper(c.EventID), c.Consumer)
	if err != nil {
		return err
	}
	return show(out.Out, c.JSON, []admin.Parked{p}, printParked)
}

func printParked(w io.Writer, events []admin.Parked) error {
	t := newTable(w)
	for _, p := range events {
		fmt.Fprintf(t, "event\t%s at position %d of %s\n", p.EventID, p.Position, stamp(p.CreatedAt))
		fmt.Fprintf(t, "type\t%s, schema version %d\n", printable(p.Type), p.SchemaVersion)
		fmt.Fprintf(t, "aggregate\t%s/%s at version %d\n", printable(p.AggregateType), printable(p.AggregateID), p.AggregateVersion)
		for name, value := range p.Headers {
			fmt.Fprintf(t, "header\t%s: %s\n", printable(name), printable(value))
		}
		payload := string(p.Payload)
		if payload == "" {
			payload = string(p.PayloadBase64)
		}
		fmt.Fprintf(t, "payload\t%s\n", printable(payload))
		for _, place := range p.Places {
			printPlace(t, place)
		}
	}
	return t.Flush()
}

func printPlace(t io.Writer, p admin.Place) {
	state := p.State
	if state == "" {
		state = "not parked any more"
	}
	fmt.Fprintf(t, "\nconsumer\t%s: %s\n", printable(p.Consumer), state)
	for _, a := range p.History {
		fmt.Fprintf(t, "%s\t%s %d: %s\n", stamp(a.At), a.Outcome, a.Attempt, printable(a.Error))
		for line := range strings.Lines(a.Stack) {
			fmt.Fprintf(t, "\t    %s\n", printable(strings.ReplaceAll(strings.TrimRight(line, "\n"), "\t", "    ")))
		}
	}
	for _, b := range p.Behind {
		fmt.Fprintf(t, "waits\t%s at position %d, %s, version %d\n", b.EventID, b.Position, printable(b.Type), b.AggregateVersion)
	}
	if more := p.Waiting - int64(len(p.Behind)); more > 0 {
		fmt.Fprintf(t, "waits\tand %d more\n", more)
	}
}

// deadSelector says which dead letters a command is for.
type deadSelector struct {
	EventID     string `arg:"" optional:"" name:"event-id" help:"Id of the event."`
	Consumer    string `env:"-" placeholder:"NAME" help:"Those of this consumer; relay: of the relay."`
	Fingerprint string `env:"-" placeholder:"HEX" help:"Those with this error; list --group shows it."`
	All         bool   `env:"-" help:"All of them."`
}

func (s *deadSelector) selector() admin.Selector {
	return admin.Selector{EventID: strings.ToUpper(s.EventID), Fingerprint: s.Fingerprint, Consumer: s.Consumer, All: s.All}
}

// Validate refuses a selection that could mean several things.
func (s *deadSelector) Validate() error { return s.selector().Check() }

type deadRedriveCmd struct {
	dataDir
	jsonFlag
	deadSelector
}

// redrivenDocument is what dead redrive prints.
type redrivenDocument struct {
	Redriven int `json:"redriven"`
}

// Run redrives.
func (c *deadRedriveCmd) Run(ctx context.Context, out output) error {
	db, err := c.openWriter(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	n, err := admin.Redrive(ctx, db, c.selector())
	if err != nil {
		return err
	}
	return show(out.Out, c.JSON, []redrivenDocument{{n}}, func(w io.Writer, _ []redrivenDocument) error {
		_, err := fmt.Fprintf(w, "%d redriven\n", n)
		return err
	})
}

type deadDiscardCmd struct {
	dataDir
	jsonFlag
	deadSelector
	Reason string `env:"-" required:"" placeholder:"TEXT" help:"Why; it is kept with the event."`
}

// discardedDocument is what dead discard prints.
type discardedDocument struct {
	Discarded int `json:"discarded"`
}

// Run discards.
func (c *deadDiscardCmd) Run(ctx context.Context, out output) error {
	db, err := c.openWriter(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	n, err := admin.Discard(ctx, db, c.selector(), c.Reason)
	if err != nil {
		return err
	}
	return show(out.Out, c.JSON, []discardedDocument{{n}}, func(w io.Writer, _ []discardedDocument) error {
		_, err := fmt.Fprintf(w, "%d discarded\n", n)
		return err
	})
}
