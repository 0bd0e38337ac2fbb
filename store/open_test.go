package store_test

import (
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/stretchr/testify/require"

	"outlog/store"
)

func TestPragmasReadBack(t *testing.T) {
	want := map[string]string{"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "busy_timeout": "5000",
		"recursive_triggers": "0", "auto_vacuum": "2"}
	db := open(t, store.Options{})
	for name, value := range want {
		got, err := store.WriterPragma(db, name)
		require.NoError(t, err)
		require.Equal(t, value, got, name)
	}
	var queryOnly int
	require.NoError(t, db.Reader().QueryRow("PRAGMA query_only").Scan(&queryOnly))
	require.Equal(t, 1, queryOnly)
	_, err := db.Reader().Exec(`INSERT INTO t (id) VALUES (1)`)
	require.Error(t, err, "readers must not write")
}

// TestImpossibleSettingIsRefused asks for a setting that SQLite ignores
// silently.
func TestImpossibleSettingIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "outlog.db")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.ErrorIs(t, store.TryPragma(t.Context(), path, "no_such_setting", "1"), store.ErrPragma)
}

func TestOpenStrangePaths(t *testing.T) {
	for _, name := range []string{"with space.db", "a?b=c&d.db", "100%25.db", "#hash.db", "ünïcode 🎈.db"} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), name)
			open(t, store.Options{Path: path})
			st, err := os.Stat(path)
			require.NoError(t, err)
			require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
		})
	}
}

func TestOpenMissing(t *testing.T) {
	_, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "no.db"), MustExist: true})
	require.ErrorIs(t, err, store.ErrMissing)
	_, err = store.OpenReader(t.Context(), filepath.Join(t.TempDir(), "no.db"))
	require.ErrorIs(t, err, store.ErrMissing)
}

func TestOpenForeign(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.db")
	app, err := store.OpenOutsider(path, time.Second)
	require.NoError(t, err)
	_, err = app.Exec(`CREATE TABLE outbox (id INTEGER PRIMARY KEY, mine TEXT)`)
	require.NoError(t, err)
	require.NoError(t, app.Close())
	journalMode(t, path, "DELETE")
	before, err := os.ReadFile(path)
	require.NoError(t, err)
	_, err = store.Open(t.Context(), store.Options{Path: path})
	require.ErrorIs(t, err, store.ErrForeign)
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, before, after, "a foreign file must not be touched")
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "text.db"), []byte("this is not a database at all, but long enough to be read as one header"), 0o600))
	_, err = store.Open(t.Context(), store.Options{Path: filepath.Join(filepath.Dir(path), "text.db")})
	require.Error(t, err)
}

// TestMigrateExisting adds a migration to an application's set: the file is
// copied before it, the data stays, and the older program refuses the newer
// file.
func TestMigrateExisting(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "outlog.db")
	one := fstest.MapFS{"00001_a.sql": {Data: []byte("-- +goose Up\nCREATE TABLE a (x INTEGER);\nINSERT INTO a VALUES (7);\n")}}
	two := fstest.MapFS{"00001_a.sql": one["00001_a.sql"], "00002_b.sql": {Data: []byte("-- +goose Up\nALTER TABLE a ADD COLUMN y INTEGER DEFAULT 8;\n")}}
	set := func(fs fstest.MapFS) store.Options {
		return store.Options{Path: path, Migrations: []store.Migrations{{Table: "app_migrations", FS: fs}}}
	}
	db, err := store.Open(t.Context(), set(one))
	require.NoError(t, err)
	require.NoError(t, db.Close())
	require.Empty(t, backups(t, dir), "a new file needs no copy")

	db, err = store.Open(t.Context(), set(two))
	require.NoError(t, err)
	var x, y int
	require.NoError(t, db.Reader().QueryRow(`SELECT x, y FROM a`).Scan(&x, &y))
	require.Equal(t, []int{7, 8}, []int{x, y})
	require.NoError(t, db.Close())

	copies := backups(t, dir)
	require.Len(t, copies, 1)
	st, err := os.Stat(copies[0])
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
	old, err := sql.Open("sqlite", copies[0])
	require.NoError(t, err)
	defer old.Close()
	require.NoError(t, old.QueryRow(`SELECT x FROM a`).Scan(&x))
	require.Error(t, old.QueryRow(`SELECT y FROM a`).Scan(&y), "the copy is from before")

	_, err = store.Open(t.Context(), set(one))
	require.ErrorIs(t, err, store.ErrNewer)
	_, err = store.OpenReader(t.Context(), path, set(one).Migrations...)
	require.ErrorIs(t, err, store.ErrNewer)

	db, err = store.Open(t.Context(), set(two))
	require.NoError(t, err)
	require.NoError(t, db.Close())
	require.Len(t, backups(t, dir), 1, "nothing to migrate, nothing to copy")
}

// TestNoMigrate opens a database beside its owner as a command does: it writes,
// and refuses every file that would have to be made or changed first.
func TestNoMigrate(t *testing.T) {
	dir := t.TempDir()
	beside := func(name string, sets ...store.Migrations) (*store.DB, error) {
		return store.Open(t.Context(), store.Options{Path: filepath.Join(dir, name), NoMigrate: true, Migrations: sets})
	}
	app := store.Migrations{Table: "app_migrations", FS: fstest.MapFS{"00001_a.sql": {Data: []byte("-- +goose Up\nCREATE TABLE a (x INTEGER);\n")}}}
	owner := open(t, store.Options{Path: filepath.Join(dir, "outlog.db")})

	db, err := beside("outlog.db")
	require.NoError(t, err)
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error { return insert(tx, 1) }))
	require.NoError(t, owner.Update(t.Context(), func(tx *store.Tx) error { return insert(tx, 2) }))
	require.Equal(t, map[int]bool{1: true, 2: true}, stored(t, db))
	require.NoError(t, db.Close())

	_, err = beside("missing.db")
	require.ErrorIs(t, err, store.ErrMissing)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "empty.db"), nil, 0o600))
	_, err = beside("empty.db")
	require.ErrorIs(t, err, store.ErrForeign)
	st, err := os.Stat(filepath.Join(dir, "empty.db"))
	require.NoError(t, err)
	require.Zero(t, st.Size(), "a refused file is left as it is")
	_, err = beside("outlog.db", app)
	require.ErrorIs(t, err, store.ErrForeign, "a set that has not run here")
	require.NoError(t, owner.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `INSERT INTO outlog_migrations (version_id, is_applied) VALUES (999, 1)`)
		return err
	}))
	_, err = beside("outlog.db")
	require.ErrorIs(t, err, store.ErrNewer)
}

func backups(t *testing.T, dir string) []string {
	files, err := filepath.Glob(filepath.Join(dir, "*.before-migration-*"))
	require.NoError(t, err)
	return files
}

func TestBackupBesideWriter(t *testing.T) {
	db := open(t, store.Options{})
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error { return insert(tx, 1) }))
	path := filepath.Join(t.TempDir(), "copy.db")
	require.NoError(t, db.Backup(t.Context(), path))
	require.Error(t, db.Backup(t.Context(), path), "an existing file is not overwritten")
	copied, err := store.OpenReader(t.Context(), path)
	require.NoError(t, err)
	defer copied.Close()
	require.Equal(t, map[int]bool{1: true}, stored(t, copied))
}

// TestIDsRise steps the clock back and takes more ids than a millisecond has
// by the clock.
func TestIDsRise(t *testing.T) {
	now := time.Date(2026, 3, 29, 1, 59, 0, 0, time.UTC)
	db := open(t, store.Options{Now: func() time.Time { return now }})
	last := ""
	for i := range 200_000 {
		if i == 100_000 {
			now = now.Add(-time.Hour)
		}
		id := db.NewID()
		require.Len(t, id, 26)
		if id <= last {
			t.Fatalf("id %d: %s does not rise above %s", i, id, last)
		}
		last = id
	}
	id, err := ulid.ParseStrict(last)
	require.NoError(t, err)
	require.Equal(t, now.Add(time.Hour).UnixMilli(), int64(id.Time()), "the time part never goes back")
}

func TestSubscribersSeeForeignCommits(t *testing.T) {
	db := open(t, store.Options{})
	wake, stop := db.Subscribe()
	defer stop()
	done := make(chan error, 1)
	go func() { done <- db.Run(t.Context()) }()
	other, err := store.OpenOutsider(db.Path(), time.Second)
	require.NoError(t, err)
	defer other.Close()
	_, err = other.Exec(`INSERT INTO t (id) VALUES (1)`)
	require.NoError(t, err)
	select {
	case <-wake:
	case <-time.After(5 * time.Second):
		t.Fatal("a commit of another connection was not seen")
	}
}

// TestDurableKnowsItsOwnCommits: positions committed here at FULL need no
// sync, and anybody else's break the range.
func TestDurableKnowsItsOwnCommits(t *testing.T) {
	for _, tc := range []struct {
		synchronous string
		from, to    int64
	}{{"FULL", 8, 12}, {"NORMAL", 0, 0}} {
		t.Run(tc.synchronous, func(t *testing.T) {
			db := open(t, store.Options{Synchronous: tc.synchronous})
			for _, r := range [][2]int64{{1, 3}, {4, 6}, {8, 9}, {10, 12}} { // 7 was somebody else's
				require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error {
					tx.Appended(r[0], r[1])
					return insert(tx, int(r[0]))
				}))
			}
			from, to := store.KnownDurable(db)
			require.Equal(t, [2]int64{tc.from, tc.to}, [2]int64{from, to})
			require.NoError(t, db.Durable(1, 12))
		})
	}
}

// journalMode leaves the file in a journal mode that the store does not use.
func journalMode(t *testing.T, path, mode string) {
	db, err := sql.Open("sqlite", path)
	require.NoError(t, err)
	_, err = db.Exec("PRAGMA journal_mode = " + mode)
	require.NoError(t, err)
	require.NoError(t, db.Close())
}

// TestReplacedFileIsNoticed removes the database under the open store, and puts
// another one in its place.
func TestReplacedFileIsNoticed(t *testing.T) {
	for name, replace := range map[string]func(path string) error{
		"removed":  os.Remove,
		"replaced": func(path string) error { return errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600)) },
	} {
		t.Run(name, func(t *testing.T) {
			db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "outlog.db")})
			require.NoError(t, err)
			defer db.Close()
			done := make(chan error, 1)
			go func() { done <- db.Run(t.Context()) }()
			require.NoError(t, db.Update(t.Context(), func(*store.Tx) error { return nil }))
			require.NoError(t, replace(db.Path()))
			require.ErrorIs(t, <-done, store.ErrReplaced)
			err = db.Update(t.Context(), func(*store.Tx) error { return nil })
			require.ErrorIs(t, err, store.ErrReplaced)
			require.True(t, store.IsUnavailable(err))
		})
	}
}
