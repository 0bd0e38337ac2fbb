package store_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/store"
)

func TestTxRevoked(t *testing.T) {
	db := open(t, store.Options{})
	var leaked *store.Tx
	var rows *sql.Rows
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) (err error) {
		if err := errors.Join(insert(tx, 1), insert(tx, 2)); err != nil {
			return err
		}
		leaked = tx
		rows, err = tx.QueryContext(t.Context(), `SELECT id FROM t`)
		return err
	}))
	require.False(t, rows.Next(), "rows must end with the callback")
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error { // while somebody else's transaction is open
		require.ErrorIs(t, insert(leaked, 3), store.ErrTxDone)
		_, err := leaked.QueryContext(t.Context(), `SELECT 1`)
		require.ErrorIs(t, err, store.ErrTxDone)
		var n int
		require.Error(t, leaked.QueryRowContext(t.Context(), `SELECT 1`).Scan(&n))
		return insert(tx, 4)
	}))
	require.Equal(t, map[int]bool{1: true, 2: true, 4: true}, stored(t, db))
}

// TestRowNotScannedDoesNotOutliveCallback leaves a read open the one way that
// database/sql does not track.
func TestRowNotScannedDoesNotOutliveCallback(t *testing.T) {
	db := open(t, store.Options{})
	var row *sql.Row
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error {
		row = tx.QueryRowContext(t.Context(), `SELECT 1`)
		return insert(tx, 1)
	}))
	var n int
	require.ErrorIs(t, row.Scan(&n), store.ErrTxDone)
}

func TestTransactionControlRefused(t *testing.T) {
	for _, q := range []string{"COMMIT", "END", " /* x */ rollback", "BEGIN", "INSERT INTO t (id) VALUES (77); COMMIT", "RELEASE outlog_update",
		"ROLLBACK TO outlog_update", "SAVEPOINT OUTLOG_UPDATE", "PRAGMA synchronous = OFF", "ATTACH ':memory:' AS other"} {
		t.Run(q, func(t *testing.T) {
			db := open(t, store.Options{})
			errOwn := errors.New("own")
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				require.NoError(t, insert(tx, 1))
				_, err := tx.ExecContext(t.Context(), q)
				require.Error(t, err)
				require.NoError(t, insert(tx, 2), "the transaction must be alive")
				return errOwn
			})
			require.ErrorIs(t, err, errOwn)
			require.Empty(t, stored(t, db), "nothing may have been committed")
		})
	}
}

func TestSavepointsOfCallbacksWork(t *testing.T) {
	db := open(t, store.Options{})
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error {
		for _, q := range []string{"SAVEPOINT mine", "INSERT INTO t (id) VALUES (1)", "ROLLBACK TO mine", "RELEASE mine", "INSERT INTO t (id) VALUES (2)"} {
			if _, err := tx.ExecContext(t.Context(), q); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Equal(t, map[int]bool{2: true}, stored(t, db))
}

func TestNestedUpdateIsAnError(t *testing.T) {
	db := open(t, store.Options{})
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error {
		err := db.Update(t.Context(), func(*store.Tx) error { return nil })
		require.ErrorIs(t, err, store.ErrNested)
		return insert(tx, 1)
	}))
	require.Equal(t, map[int]bool{1: true}, stored(t, db))
}

// TestWaitForTurnIsCancellable cancels a caller that waits behind a slow one.
func TestWaitForTurnIsCancellable(t *testing.T) {
	db := open(t, store.Options{})
	holding, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error { close(holding); <-release; return insert(tx, 1) }))
	})
	<-holding
	ctx, cancel := context.WithCancel(t.Context())
	cancelled := make(chan error, 1)
	go func() { cancelled <- db.Update(ctx, func(tx *store.Tx) error { return insert(tx, 2) }) }()
	cancel()
	require.ErrorIs(t, <-cancelled, context.Canceled)
	name, _, ok := db.Holder()
	require.True(t, ok)
	require.Contains(t, name, "TestWaitForTurnIsCancellable")
	close(release)
	wg.Wait()
	require.Equal(t, map[int]bool{1: true}, stored(t, db))
}

func TestSlowCallbackIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "outlog.db")
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		db, err := store.Open(t.Context(), store.Options{Path: path, Logger: slog.New(slog.NewTextHandler(&out, nil))})
		require.NoError(t, err)
		defer db.Close()
		require.NoError(t, db.Update(t.Context(), func(*store.Tx) error { time.Sleep(49 * time.Millisecond); return nil }))
		require.NotContains(t, out.String(), "slow Update")
		require.NoError(t, db.Update(t.Context(), func(*store.Tx) error { time.Sleep(51 * time.Millisecond); return nil }))
		require.Contains(t, out.String(), "callback=store_test.TestSlowCallbackIsNamed")
		require.Contains(t, out.String(), "held=51ms")
		require.Len(t, db.Stats().Slow, 1)
		for name, times := range db.Stats().Slow {
			require.Contains(t, name, "store_test.TestSlowCallbackIsNamed")
			require.Equal(t, int64(1), times)
		}
	})
}

func TestFailedCommitFailsTheGroup(t *testing.T) {
	fail := false
	injected := errors.New("injected")
	db := open(t, store.Options{Failpoint: func(p string) error {
		if fail && p == "store.before-commit" {
			return injected
		}
		return nil
	}})
	fail = true
	require.ErrorIs(t, db.Update(t.Context(), func(tx *store.Tx) error { return insert(tx, 1) }), injected)
	fail = false
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error { return insert(tx, 2) }))
	require.Equal(t, map[int]bool{2: true}, stored(t, db))
}

func TestCloseRefusesFurtherUpdates(t *testing.T) {
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "outlog.db")})
	require.NoError(t, err)
	require.NoError(t, db.Close())
	require.ErrorIs(t, db.Update(t.Context(), func(*store.Tx) error { return nil }), store.ErrClosed)
}

// TestFullDatabaseIsUnavailable fills the database to its page limit.
func TestFullDatabaseIsUnavailable(t *testing.T) {
	db := open(t, store.Options{})
	limit := func(pages string) {
		// The limit is a property of the connection, so it is set through the writer.
		require.NoError(t, store.SetMaxPages(db, pages))
	}
	limit("60")
	var err error
	n := 0
	for ; err == nil; n++ {
		err = db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `INSERT INTO t (id, v) VALUES (?, ? || hex(zeroblob(2000)))`, n, n)
			return err
		})
	}
	require.True(t, store.IsFull(err), "%v", err)
	require.True(t, store.IsUnavailable(fmt.Errorf("wrapped: %w", err)))
	require.Len(t, stored(t, db), n-1, "reads work, and what was acknowledged is there")
	limit("1000000")
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error { return insert(tx, 1_000_000) }))
}

// TestOutsiderGetsIn saturates the writer and inserts through another
// connection, as another program would, with a short patience.
func TestOutsiderGetsIn(t *testing.T) {
	db := open(t, store.Options{Synchronous: "NORMAL"})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var next sync.Mutex
	id := 0
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				next.Lock()
				id++
				k := id
				next.Unlock()
				_ = db.Update(ctx, func(tx *store.Tx) error { return insert(tx, k) })
			}
		})
	}
	wg.Go(func() { _ = db.Run(ctx) })
	outside, err := store.OpenOutsider(db.Path(), 5*time.Second)
	require.NoError(t, err)
	defer outside.Close()
	for i := range 10 {
		_, err := outside.ExecContext(t.Context(), `INSERT INTO t (id) VALUES (?)`, -1-i)
		require.NoError(t, err, "insert %d", i)
	}
}

// TestLazyGroupsDoNotSync: a lazy commit leaves the setting at NORMAL, anybody
// else's puts it back, and no lazy caller's positions count as on disk.
func TestLazyGroupsDoNotSync(t *testing.T) {
	db := open(t, store.Options{})
	synchronous := func() string {
		v, err := store.WriterPragma(db, "synchronous")
		require.NoError(t, err)
		return v
	}
	require.NoError(t, db.UpdateLazy(t.Context(), func(tx *store.Tx) error { tx.Appended(1, 1); return insert(tx, 1) }))
	require.Equal(t, "1", synchronous())
	from, to := store.KnownDurable(db)
	require.Equal(t, [2]int64{}, [2]int64{from, to})
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error { tx.Appended(2, 2); return insert(tx, 2) }))
	require.Equal(t, "2", synchronous())
	from, to = store.KnownDurable(db)
	require.Equal(t, [2]int64{2, 2}, [2]int64{from, to})
}

// TestNobodyIsDurableInALazyGroup queues an Update behind a lazy one: it must
// not be committed without an fsync.
func TestNobodyIsDurableInALazyGroup(t *testing.T) {
	db := open(t, store.Options{})
	holding, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		require.NoError(t, db.UpdateLazy(t.Context(), func(tx *store.Tx) error { close(holding); <-release; return insert(tx, 1) }))
	})
	<-holding
	wg.Go(func() {
		require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error { tx.Appended(7, 7); return insert(tx, 2) }))
		from, to := store.KnownDurable(db)
		require.Equal(t, [2]int64{7, 7}, [2]int64{from, to})
		v, err := store.WriterPragma(db, "synchronous")
		require.NoError(t, err)
		require.Equal(t, "2", v)
	})
	require.Eventually(t, func() bool { return db.Stats().Waiting == 1 }, 10*time.Second, time.Millisecond)
	close(release)
	wg.Wait()
	require.Equal(t, map[int]bool{1: true, 2: true}, stored(t, db))
}

// TestFailureRunsTheGroupAgainOnce forms groups of four, the third of which
// fails. Its first failure after a write takes the whole transaction; from then
// on there are savepoints. One that wrote nothing disturbs nobody.
func TestFailureRunsTheGroupAgainOnce(t *testing.T) {
	synctest.Test(t, failureRunsTheGroupAgainOnce)
}

func failureRunsTheGroupAgainOnce(t *testing.T) {
	db := open(t, store.Options{})
	errOwn := errors.New("own")
	id := 0
	round := func(failing string) (runs [4]int) {
		var wg sync.WaitGroup
		grouped := make(chan struct{})
		for i := range runs {
			query := fmt.Sprintf(`INSERT INTO t (id) VALUES (%d)`, id+i)
			wg.Go(func() {
				err := db.Update(t.Context(), func(tx *store.Tx) error {
					runs[i]++
					if i == 0 {
						<-grouped
					}
					if i != 2 {
						_, err := tx.ExecContext(t.Context(), query)
						return err
					}
					rows, err := tx.QueryContext(t.Context(), failing)
					require.NoError(t, err)
					for rows.Next() {
					}
					return errOwn
				})
				if i == 2 {
					require.ErrorIs(t, err, errOwn)
				} else {
					require.NoError(t, err)
				}
			})
			synctest.Wait()
			require.Equal(t, i, db.Stats().Waiting)
		}
		close(grouped)
		wg.Wait()
		for i := range runs {
			require.Equal(t, i != 2, stored(t, db)[id+i])
		}
		id += 4
		return runs
	}
	require.Equal(t, [4]int{1, 1, 1, 1}, round(`SELECT id FROM t`))
	require.Equal(t, [4]int{2, 2, 1, 1}, round(`INSERT INTO t (id) VALUES (1002) RETURNING id`))
	require.Equal(t, [4]int{1, 1, 1, 1}, round(`INSERT INTO t (id) VALUES (1002) RETURNING id`))
	require.False(t, stored(t, db)[1002])
}
