package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"outlog/node"
	"outlog/store"
)

// dataDir is the flag of all commands that work on an existing directory.
type dataDir struct {
	Dir string `default:"./outlog-data" placeholder:"DIR" help:"Data directory (${default})."`
}

// newDataDir makes the directory that a command fills, kills and judges, or
// accepts an empty one: never somebody's data. Without a name it is a temporary
// one.
func newDataDir(command, name string) (dir string, temporary bool, err error) {
	if name == "" {
		dir, err = os.MkdirTemp("", "outlog-"+command+"-") // mode 0700
		return dir, true, err
	}
	if dir, err = filepath.Abs(name); err != nil {
		return "", false, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", false, err
	}
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("%s is not empty; give %s a directory of its own", dir, command)
	}
	return dir, false, err
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
