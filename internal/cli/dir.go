package cli

import (
	"context"
	"errors"
	"fmt"

	"outlog/node"
	"outlog/store"
)

// dataDir is the flag of all commands that work on an existing directory.
type dataDir struct {
	Dir string `default:"./outlog-data" placeholder:"DIR" help:"Data directory (${default})."`
}

func (d dataDir) database() string { return node.DatabasePath(d.Dir) }

// openReader opens the directory's database for reading, beside a running node
// or without one.
func (d dataDir) openReader(ctx context.Context, migrations ...store.Migrations) (*store.DB, error) {
	return store.OpenReader(ctx, d.database(), migrations...)
}

// openWriter opens the directory's database to change something beside a running
// node or without one. It must be of this program's version.
func (d dataDir) openWriter(ctx context.Context) (*store.DB, error) {
	return store.Open(ctx, store.Options{Path: d.database(), NoMigrate: true, Readers: 2, CacheMiB: 8})
}

// withHint adds to an error what to do next, where the error alone does not say.
func withHint(err error) error {
	if errors.Is(err, store.ErrMissing) {
		return fmt.Errorf("%w; `outlog serve` makes one, --dir names another directory", err)
	}
	return err
}
