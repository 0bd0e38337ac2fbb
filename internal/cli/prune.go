package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"outlog/internal/archive"
	"outlog/internal/retention"
	"outlog/outbox"
	"outlog/store"
)

type pruneCmd struct {
	dataDir
	jsonFlag
	OlderThan time.Duration `env:"-" placeholder:"DURATION" help:"Prune events older than this."`
	Through   int64         `env:"-" placeholder:"POSITION" help:"Prune events up to this position."`
	MaxBytes  int64         `env:"-" placeholder:"BYTES" help:"Prune the oldest events until the log is no larger: payloads, headers, and 256 bytes for each event."`
	DryRun    bool          `env:"-" help:"Only say what would be pruned, and what keeps the rest."`
	archiveFlags
}

// archiveFlags say where events are kept before they are pruned.
type archiveFlags struct {
	Archive       string `placeholder:"DIR" help:"Write events to files in this directory before they are pruned."`
	ArchiveFormat string `default:"ndjson" enum:"ndjson,parquet" placeholder:"FORMAT" help:"ndjson: compressed with zstd. parquet (${default})."`
}

func (a archiveFlags) open(log *outbox.Log) (*archive.Dir, error) {
	if a.Archive == "" {
		return nil, nil
	}
	return archive.Open(a.Archive, log.ID(), archive.Format(a.ArchiveFormat))
}

// Validate refuses what would prune nothing.
func (c *pruneCmd) Validate() error {
	if c.OlderThan < 0 || c.Through < 0 || c.MaxBytes < 0 {
		return errors.New("--older-than, --through and --max-bytes are not negative")
	}
	if c.OlderThan == 0 && c.Through == 0 && c.MaxBytes == 0 {
		return errors.New("say what to prune: --older-than, --through or --max-bytes")
	}
	return nil
}

// Run prunes beside a running node or without one: each transaction looks for
// itself who needs an event.
func (c *pruneCmd) Run(ctx context.Context, out output) error {
	db, err := c.openWriter(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	log, err := outbox.OpenReader(ctx, db)
	if err != nil {
		return err
	}
	o := retention.Options{Rule: retention.Rule{OlderThan: c.OlderThan, Through: c.Through, MaxBytes: c.MaxBytes}, DryRun: c.DryRun}
	if !c.DryRun {
		if o.Archive, err = c.open(log); err != nil {
			return err
		}
	}
	r, err := retention.Prune(ctx, db, log, o)
	if err != nil && r.Events > 0 {
		err = fmt.Errorf("%w; %d events were pruned through position %d, and the same command goes on from there", err, r.Events, r.Through)
	}
	if err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(out.Out, r)
	}
	space, err := db.Space(ctx)
	if err != nil {
		return err
	}
	return printPruned(out.Out, r, space)
}

func printPruned(w io.Writer, r retention.Result, space store.Space) error {
	t := newTable(w)
	what := "pruned"
	if r.DryRun {
		what = "would be pruned"
	}
	fmt.Fprintf(t, "%s\t%d events through position %d, %s of payloads and headers\n", what, r.Events, r.Through, bytesText(r.Bytes))
	for _, f := range r.Files {
		fmt.Fprintf(t, "archived\t%s\n", f)
	}
	for _, h := range r.Held {
		fmt.Fprintf(t, "held\t%s\n", printable(h.String()))
	}
	if !space.GivesBack {
		fmt.Fprint(t, "space\tis used again, but the file keeps its size: it was made without auto_vacuum\n")
	}
	return t.Flush()
}
