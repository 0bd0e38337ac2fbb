package store_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/store"
)

// open returns a store in a temporary directory with a table t, and verifies
// the database when the test ends.
func open(t testing.TB, o store.Options) *store.DB {
	if o.Path == "" {
		o.Path = filepath.Join(t.TempDir(), "outlog.db")
	}
	db, err := store.Open(t.Context(), o)
	require.NoError(t, err)
	t.Cleanup(func() {
		results, err := db.Verify(context.Background())
		require.NoError(t, err)
		for _, r := range results {
			require.True(t, r.OK, "%s: %s", r.Name, r.Detail)
		}
		require.NoError(t, db.Close())
	})
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, v TEXT UNIQUE) STRICT`)
		return err
	}))
	return db
}

func insert(tx *store.Tx, id int) error {
	_, err := tx.ExecContext(context.Background(), `INSERT INTO t (id, v) VALUES (?, ?)`, id, fmt.Sprint(id))
	return err
}

func stored(t testing.TB, db *store.DB) map[int]bool {
	rows, err := db.Reader().QueryContext(context.Background(), `SELECT id FROM t`)
	require.NoError(t, err)
	defer rows.Close()
	ids := map[int]bool{}
	for rows.Next() {
		var id int
		require.NoError(t, rows.Scan(&id))
		ids[id] = true
	}
	require.NoError(t, rows.Err())
	return ids
}

// TestUpdateHostileGroup lets 64 callers share transactions while some of them
// do every harmful thing a callback can do; exactly the successful are stored.
func TestUpdateHostileGroup(t *testing.T) {
	db := open(t, store.Options{Synchronous: "NORMAL"})
	require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `CREATE TABLE child (id INTEGER PRIMARY KEY, parent INTEGER REFERENCES t (id) DEFERRABLE INITIALLY DEFERRED) STRICT`)
		return err
	}))
	errOwn := errors.New("own error")
	const callers, rounds = 64, 8
	var mu sync.Mutex
	want := map[int]bool{}
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			for r := range rounds {
				id := c*1000 + r
				kind := (c + r) % 16
				ctx, cancel := context.WithCancel(t.Context())
				err := errors.New("did not return")
				done := make(chan struct{})
				go func() { // Goexit ends the goroutine that runs the callback
					defer close(done)
					defer func() {
						if p := recover(); p != nil {
							err = fmt.Errorf("panic: %v", p)
						}
					}()
					err = db.Update(ctx, func(tx *store.Tx) error {
						if e := insert(tx, id); e != nil {
							return e
						}
						switch kind {
						case 0:
							return errOwn
						case 1:
							cancel() // in the middle of the write
							_, e := tx.ExecContext(ctx, `INSERT INTO t (id) VALUES (?)`, id+500)
							return e
						case 2:
							panic("boom")
						case 3:
							runtime.Goexit()
						case 4: // kills the whole transaction
							_, e := tx.ExecContext(ctx, `INSERT OR ROLLBACK INTO t (id) VALUES (?)`, id)
							return e
						case 5: // the same, and hides it
							_, _ = tx.ExecContext(ctx, `INSERT OR ROLLBACK INTO t (id) VALUES (?)`, id)
							return nil
						case 6:
							_, e := tx.ExecContext(ctx, `INSERT INTO child (id, parent) VALUES (?, -1)`, id)
							return e
						case 7: // leaves rows open
							_, e := tx.QueryContext(ctx, `SELECT id FROM t`)
							return e
						}
						return nil
					})
				}()
				<-done
				cancel()
				switch kind {
				case 0:
					require.ErrorIs(t, err, errOwn)
				case 5:
					require.ErrorIs(t, err, store.ErrTxAborted)
				case 6:
					require.ErrorIs(t, err, store.ErrForeignKey)
				case 2, 3, 4:
					require.Error(t, err)
				default:
					if kind == 1 && errors.Is(err, context.Canceled) {
						break // its transaction died of another's fault, and by then it was cancelled
					}
					require.NoError(t, err)
					mu.Lock()
					want[id] = true
					if kind == 1 {
						want[id+500] = true
					}
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	require.Equal(t, want, stored(t, db))
}

// BenchmarkCommit compares Update with a transaction of its own per caller, on
// one prepared connection, in the same run at FULL:
//
//	go test ./store -run - -bench Commit -benchtime 20000x
func BenchmarkCommit(b *testing.B) {
	for _, callers := range []int{1, 64} {
		b.Run(fmt.Sprintf("update/callers=%d", callers), func(b *testing.B) {
			db := open(b, store.Options{})
			each(b, callers, func(id int) error {
				return db.Update(b.Context(), func(tx *store.Tx) error { return insert(tx, id) })
			})
		})
		b.Run(fmt.Sprintf("direct/callers=%d", callers), func(b *testing.B) {
			direct, err := store.OpenOutsider(open(b, store.Options{}).Path(), time.Minute)
			require.NoError(b, err)
			defer direct.Close()
			each(b, callers, func(id int) error {
				tx, err := direct.BeginTx(b.Context(), nil)
				if err != nil {
					return err
				}
				if _, err := tx.Exec(`INSERT INTO t (id, v) VALUES (?, ?)`, id, fmt.Sprint(id)); err != nil {
					return errors.Join(err, tx.Rollback())
				}
				return tx.Commit()
			})
		})
	}
}

// each calls do b.N times from so many goroutines, with ids from 1.
func each(b *testing.B, callers int, do func(id int) error) {
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ResetTimer()
	for range callers {
		wg.Go(func() {
			for {
				id := int(next.Add(1))
				if id > b.N {
					return
				}
				if err := do(id); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tx/s")
}
