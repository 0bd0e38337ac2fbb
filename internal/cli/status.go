package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"outlog/internal/admin"
	"outlog/internal/lock"
)

type statusCmd struct {
	dataDir
	jsonFlag
}

// statusDocument is what status prints.
type statusDocument struct {
	Dir   string      `json:"dir"`
	Owner *lock.Owner `json:"owner"` // null: no node is running
	admin.Status
	Bytes sizes `json:"bytes"`
}

// sizes are the bytes on disk.
type sizes struct {
	Database int64 `json:"database"`
	WAL      int64 `json:"wal"`
	Stream   int64 `json:"stream"`
}

// Run prints the status.
func (c *statusCmd) Run(ctx context.Context, out output) error {
	db, err := c.openReader(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	d := statusDocument{Dir: c.Dir}
	if d.Status, err = admin.ReadStatus(ctx, db); err != nil {
		return err
	}
	owner, held, err := lock.Holder(c.database())
	if err != nil {
		return err
	}
	if held {
		d.Owner = &owner
	}
	if d.Bytes, err = c.sizes(); err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(out.Out, d)
	}
	return d.print(out.Out)
}

func (c *statusCmd) sizes() (s sizes, err error) {
	for _, f := range []struct {
		path string
		size *int64
	}{
		{c.database(), &s.Database},
		{c.database() + "-wal", &s.WAL},
		{filepath.Join(c.Dir, "jetstream"), &s.Stream},
	} {
		if *f.size, err = sizeOf(f.path); err != nil {
			return s, err
		}
	}
	return s, nil
}

// sizeOf adds up the files below path. It opens none of them, and one that
// vanishes meanwhile counts nothing.
func sizeOf(path string) (total int64, err error) {
	err = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		var info os.FileInfo
		if err == nil && !d.IsDir() {
			info, err = d.Info()
		}
		if info != nil && err == nil {
			total += info.Size()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	return total, err
}

func (d *statusDocument) print(w io.Writer) error {
	t := newTable(w)
	fmt.Fprintf(t, "directory\t%s\n", d.Dir)
	switch {
	case d.Owner == nil:
		fmt.Fprint(t, "node\tnot running\n")
	case d.Owner.Address == "":
		fmt.Fprintf(t, "node\tpid %d since %s\n", d.Owner.PID, stamp(d.Owner.StartedAt))
	default:
		fmt.Fprintf(t, "node\tpid %d at http://%s since %s\n", d.Owner.PID, d.Owner.Address, stamp(d.Owner.StartedAt))
	}
	fmt.Fprintf(t, "log\t%s, head %d, pruned through %d\n", d.LogID, d.Head, d.PrunedThrough)
	if d.HeldBy != nil && d.HeldBy.Kind != "stream" { // that is over in a minute
		fmt.Fprintf(t, "prunable\tthrough %d: %s\n", d.PrunableThrough, printable(d.HeldBy.String()))
	}
	fmt.Fprintf(t, "on disk\tdatabase %s, WAL %s, stream %s\n\n",
		bytesText(d.Bytes.Database), bytesText(d.Bytes.WAL), bytesText(d.Bytes.Stream))
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprint(t, "\tPOSITION\tBEHIND\tOLDEST\tPARKED\tDEAD\n")
	row := func(name string, position int64, b admin.Backlog, note string) {
		fmt.Fprintf(t, "%s\t%d\t%d\t%.1f s\t%d\t%d%s\n", name, position, b.LagEvents, b.LagSeconds, b.Parked, b.Dead, note)
	}
	row("relay", d.Relay.Position, d.Relay.Backlog, "")
	for _, c := range d.Consumers {
		note := ""
		if c.Paused {
			note = "  paused"
		}
		row(printable(c.Name), c.Position, c.Backlog, note)
	}
	return t.Flush()
}
