package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/pressly/goose/v3"
)

// Migrations is one set of versioned schema changes: goose SQL files
// (00001_name.sql, …) in the root of FS, and the table that remembers which of
// them have run. Each set counts by itself.
type Migrations struct {
	Table string // for example "orders_migrations"
	FS    fs.FS
}

//go:embed migrations/*.sql
var coreFiles embed.FS

// CoreMigrations returns the sets a database of outlog has before the
// application's own.
func CoreMigrations() Migrations {
	sub, err := fs.Sub(coreFiles, "migrations")
	if err != nil {
		panic(err) // the directory is compiled in
	}
	return Migrations{Table: "outlog_migrations", FS: sub}
}

func (o Options) migrations() []Migrations {
	return append([]Migrations{CoreMigrations()}, o.Migrations...)
}

// migrate brings all sets up to date. An existing file is copied first.
func migrate(ctx context.Context, o Options, existed bool) (err error) {
	if existed { // look before touching: the other connections switch the file to WAL
		look := openPool(o, roleReader, 1)
		if err := errors.Join(checkVersion(ctx, look, o, false), look.Close()); err != nil {
			return err
		}
	}
	db := sql.OpenDB(&connector{Connector: mustConnector(dsn(o.Path)), role: rolePlain, pragma: o.migrationPragmas(existed)})
	db.SetMaxOpenConns(1)
	defer func() { err = errors.Join(err, db.Close()) }()

	var providers []*goose.Provider
	pending := false
	for _, m := range o.migrations() {
		p, err := goose.NewProvider(goose.DialectSQLite3, db, m.FS, goose.WithTableName(m.Table), goose.WithDisableGlobalRegistry(true))
		if err != nil {
			return fmt.Errorf("migrations of %s: %w", m.Table, err)
		}
		has, err := hasPending(ctx, db, m)
		if err != nil {
			return err
		}
		if has {
			pending = true
			providers = append(providers, p)
		}
	}
	if pending && existed {
		path, err := backupBeside(ctx, db, o)
		if err != nil {
			return fmt.Errorf("backup before migrating: %w", err)
		}
		o.Logger.Info("schema will be migrated, the database was copied first", "backup", path)
	}
	for _, p := range providers {
		if _, err := p.Up(ctx); err != nil {
			return fmt.Errorf("migrate %s: %w", o.Path, err)
		}
	}
	if pending {
		return o.hook("store.after-migration")
	}
	return nil
}

// migrationPragmas are the writer's, and for a new file the space management
// that can only be chosen before the first table.
func (o Options) migrationPragmas(existed bool) []pragma {
	if existed {
		return o.pragmas(rolePlain)
	}
	return append([]pragma{{"auto_vacuum", "2", "2"}}, o.pragmas(rolePlain)...)
}

// checkVersion refuses a database that is newer than this program or not ours;
// for a reader also one that is older.
func checkVersion(ctx context.Context, db *sql.DB, o Options, reader bool) error {
	for i, m := range o.migrations() {
		applied, exists, err := appliedVersion(ctx, db, m.Table)
		if err != nil {
			return err
		}
		if !exists && i == 0 {
			if taken, err := hasTable(ctx, db, "outbox"); err != nil {
				return err
			} else if taken {
				return fmt.Errorf("%w: %s has a table of its own named outbox; use another file", ErrForeign, o.Path)
			}
			if reader {
				return fmt.Errorf("%w: %s", ErrForeign, o.Path)
			}
		}
		known, err := latestVersion(m)
		if err != nil {
			return err
		}
		if applied > known {
			return fmt.Errorf("%w: %s has version %d of %s, this program knows %d; use the newer program or restore a backup",
				ErrNewer, o.Path, applied, m.Table, known)
		}
		if reader && applied < known {
			return fmt.Errorf("%w: %s has version %d of %s, this program needs %d; run `outlog serve` once to migrate it",
				ErrForeign, o.Path, applied, m.Table, known)
		}
	}
	return nil
}

func hasPending(ctx context.Context, db *sql.DB, m Migrations) (bool, error) {
	applied, _, err := appliedVersion(ctx, db, m.Table)
	if err != nil {
		return false, err
	}
	known, err := latestVersion(m)
	return applied < known, err
}

// appliedVersion reads the highest version a set has reached in the database.
func appliedVersion(ctx context.Context, db *sql.DB, table string) (version int64, exists bool, err error) {
	if exists, err = hasTable(ctx, db, table); err != nil || !exists {
		return 0, exists, err
	}
	err = db.QueryRowContext(ctx, `SELECT coalesce(max(version_id), 0) FROM "`+table+`" WHERE is_applied`).Scan(&version)
	return version, true, err
}

func hasTable(ctx context.Context, db *sql.DB, name string) (ok bool, err error) {
	err = db.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE type IN ('table', 'view') AND name = ?)`, name).Scan(&ok)
	if err != nil {
		return false, fmt.Errorf("read schema: %w", err)
	}
	return ok, nil
}

// latestVersion is the highest version among a set's files.
func latestVersion(m Migrations) (int64, error) {
	files, err := fs.Glob(m.FS, "*.sql")
	if err != nil {
		return 0, err
	}
	var latest int64
	for _, f := range files {
		v, err := goose.NumericComponent(f)
		if err != nil {
			return 0, fmt.Errorf("migrations of %s: %w", m.Table, err)
		}
		latest = max(latest, v)
	}
	return latest, nil
}

// backupBeside copies the database next to itself and returns the copy's name.
func backupBeside(ctx context.Context, db *sql.DB, o Options) (string, error) {
	path := fmt.Sprintf("%s.before-migration-%s", o.Path, o.Now().UTC().Format("20060102T150405.000000"))
	return path, vacuumInto(ctx, db, path, o)
}

// Backup writes a consistent copy of the database to path, which must not
// exist, while writers go on. The copy is one file of mode 0600.
func (db *DB) Backup(ctx context.Context, path string) error {
	plain := sql.OpenDB(&connector{Connector: mustConnector(dsn(db.opts.Path)), role: rolePlain, pragma: db.opts.pragmas(rolePlain)})
	defer plain.Close()
	return vacuumInto(ctx, plain, path, db.opts)
}

func vacuumInto(ctx context.Context, db *sql.DB, path string, o Options) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	start := time.Now()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", path); err != nil {
		return errors.Join(fmt.Errorf("copy to %s after %v: %w", path, time.Since(start), err), os.Remove(path))
	}
	if err := o.hook("store.after-copy"); err != nil {
		return errors.Join(fmt.Errorf("copy to %s: %w", path, err), os.Remove(path))
	}
	return errors.Join(syncFile(path), SyncDir(filepath.Dir(path)))
}
