package cli

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"outlog/store"
)

// Names in a data directory.
const (
	databaseFile = "outlog.db"
	streamDir    = "jetstream" // the broker's store
)

// dataDir is the flag of all commands that work on an existing directory.
type dataDir struct {
	Dir string `default:"./outlog-data" placeholder:"DIR" help:"Data directory (${default})."`
}

func (d dataDir) database() string { return filepath.Join(d.Dir, databaseFile) }

// openReader opens the directory's database for reading, beside a running node
// or without one.
func (d dataDir) openReader(ctx context.Context, migrations ...store.Migrations) (*store.DB, error) {
	return store.OpenReader(ctx, d.database(), migrations...)
}

// withHint adds to an error what to do next, where the error alone does not say.
func withHint(err error) error {
	if errors.Is(err, store.ErrMissing) {
		return fmt.Errorf("%w; `outlog serve` makes one, --dir names another directory", err)
	}
	return err
}
