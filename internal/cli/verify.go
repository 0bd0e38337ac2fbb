package cli

import (
	"context"
	"fmt"
	"io"

	"outlog/examples/orders"
	"outlog/internal/admin"
	"outlog/node"
	"outlog/store"
)

type verifyCmd struct {
	dataDir
	jsonFlag
	tokenFlag
	Stream   bool `env:"-" xor:"stream" help:"Only compare the stream with the log."`
	NoStream bool `xor:"stream" help:"Do not compare the stream with the log."`
}

// verifyDocument is what verify prints.
type verifyDocument struct {
	OK     bool                `json:"ok"`
	Checks []node.StreamResult `json:"checks"` // only the one of the stream names single faults
}

// Run runs all checks, also beside a running node, and fails when one does.
func (c *verifyCmd) Run(ctx context.Context, out output) error {
	d := verifyDocument{OK: true}
	if !c.Stream {
		checks, err := verifyDatabase(ctx, c.dataDir)
		if err != nil {
			return err
		}
		d = newVerifyDocument(checks)
	}
	if !c.NoStream {
		stream, err := verifyStream(ctx, c.dataDir, c.Token)
		if err != nil {
			return fmt.Errorf("compare the stream with the log: %w%s", err, map[bool]string{false: "; --no-stream leaves it out"}[c.Stream])
		}
		d.add(stream)
	}
	var err error
	if c.JSON {
		err = writeJSON(out.Out, d)
	} else {
		err = d.print(out.Out)
	}
	if err == nil && !d.OK {
		err = errReported
	}
	return err
}

func newVerifyDocument(checks []store.Result) verifyDocument {
	d := verifyDocument{OK: true}
	for _, r := range checks {
		d.add(node.StreamResult{Result: r})
	}
	return d
}

func (d *verifyDocument) add(r node.StreamResult) {
	d.OK = d.OK && r.OK
	d.Checks = append(d.Checks, r)
}

func (d verifyDocument) print(w io.Writer) error {
	t := newTable(w)
	for _, r := range d.Checks {
		verdict := "ok"
		if !r.OK {
			verdict = "FAILED"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", verdict, r.Name, printable(r.Detail))
		for _, f := range r.Faults {
			fmt.Fprintf(t, "\t  %s\t%s\n", f.Kind, printable(f.Detail))
		}
	}
	return t.Flush()
}

// verifyDatabase runs the checks that need nothing but the database.
func verifyDatabase(ctx context.Context, dir dataDir) ([]store.Result, error) {
	db, err := dir.openReader(ctx)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	application, err := applicationChecks(ctx, db)
	if err != nil {
		return nil, err
	}
	return admin.Verify(ctx, db, application...)
}

// applicationChecks are those of the order service, if the database is its.
func applicationChecks(ctx context.Context, db *store.DB) ([]store.Check, error) {
	var served bool
	err := db.Reader().QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = ?)`, orders.Migrations().Table).Scan(&served)
	if err != nil || !served {
		return nil, err
	}
	return orders.Checks(), nil
}
