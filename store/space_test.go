package store_test

import (
	"database/sql"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/store"
)

// fill writes and deletes rows, so that most of the file is free.
func fill(t *testing.T, db *store.DB) {
	t.Helper()
	for _, q := range []string{
		`CREATE TABLE filler (id INTEGER PRIMARY KEY, b BLOB)`,
		`WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 4000) INSERT INTO filler SELECT i, zeroblob(4000) FROM n`,
		`DELETE FROM filler WHERE id < 3900`, // what is left lies at the end of the file
	} {
		require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), q)
			return err
		}))
	}
}

func giveBack(t *testing.T, db *store.DB, pages int64) (left int64) {
	t.Helper()
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) (err error) {
		left, err = tx.GiveBack(pages)
		return err
	}))
	return left
}

// TestGiveBack: the file shrinks by what is free, but for what is kept, and no
// row is harmed.
func TestGiveBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "outlog.db")
	db, err := store.Open(t.Context(), store.Options{Path: path})
	require.NoError(t, err)
	fill(t, db)
	before, err := db.Space(t.Context())
	require.NoError(t, err)
	require.True(t, before.GivesBack)
	require.Greater(t, before.Free, int64(3000))

	left := giveBack(t, db, 500)
	after, err := db.Space(t.Context())
	require.NoError(t, err)
	require.InDelta(t, before.Pages-500, after.Pages, 3, "pages of the map of pages come on top")
	require.Positive(t, left)
	for left > 0 {
		left = giveBack(t, db, 1000)
	}
	after, err = db.Space(t.Context())
	require.NoError(t, err)
	require.Positive(t, after.Free, "a reserve stays")
	require.Less(t, after.Free, int64(1000))
	var rows int
	require.NoError(t, db.Reader().QueryRow(`SELECT count(*) FROM filler WHERE length(b) = 4000`).Scan(&rows))
	require.Equal(t, 101, rows)
	results, err := db.Verify(t.Context())
	require.NoError(t, err)
	require.True(t, results[0].OK, results[0].Detail)
	require.NoError(t, db.Close())
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Less(t, st.Size(), 1000*before.PageBytes)
}

// TestGiveBackWithoutAutoVacuum: somebody else's database keeps its size, and
// that is no error.
func TestGiveBackWithoutAutoVacuum(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.db")
	plain, err := sql.Open("sqlite", path)
	require.NoError(t, err)
	_, err = plain.Exec(`CREATE TABLE app (id INTEGER PRIMARY KEY)`)
	require.NoError(t, err)
	require.NoError(t, plain.Close())
	db := open(t, store.Options{Path: path})
	fill(t, db)
	before, err := db.Space(t.Context())
	require.NoError(t, err)
	require.False(t, before.GivesBack)
	require.Zero(t, giveBack(t, db, 500))
	after, err := db.Space(t.Context())
	require.NoError(t, err)
	require.Equal(t, before, after)
}
