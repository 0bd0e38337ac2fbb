package outbox

import (
	"context"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/store"
)

func open(t testing.TB) *Log {
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "outlog.db"), Synchronous: "NORMAL"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	l, err := Open(t.Context(), db)
	require.NoError(t, err)
	return l
}

func (l *Log) add(t testing.TB, n int) {
	for range n {
		require.NoError(t, l.db.Update(context.Background(), func(tx *store.Tx) error {
			_, err := l.Append(context.Background(), tx, Event{AggregateType: "a", AggregateID: l.db.NewID(), Type: "T", Data: 1})
			return err
		}))
	}
}

func positions(rows []Record) (p []int64) {
	for _, r := range rows {
		p = append(p, r.Position)
	}
	return p
}

// TestTailServesWhatWasRead removes the rows under the tail: what it returns
// then is what it kept.
func TestTailServesWhatWasRead(t *testing.T) {
	l := open(t)
	l.add(t, 10)
	read := func(after int64, p Page) []int64 {
		rows, err := l.Follow(t.Context(), after, p)
		require.NoError(t, err)
		return positions(rows)
	}
	require.Equal(t, []int64{3, 4, 5, 6}, read(2, Page{Rows: 4}))
	require.NoError(t, l.db.Update(t.Context(), func(tx *store.Tx) error {
		if _, err := tx.ExecContext(t.Context(), `UPDATE outlog_meta SET pruned_through = 8`); err != nil {
			return err
		}
		_, err := tx.ExecContext(t.Context(), `DELETE FROM outbox WHERE position <= 8`)
		return err
	}))
	require.Equal(t, []int64{3, 4, 5, 6}, read(2, Page{}))
	require.Equal(t, []int64{5, 6}, read(4, Page{Rows: 3}))
	require.Equal(t, []int64{4, 5}, read(3, Page{Through: 5}))
	require.Equal(t, []int64{4}, read(3, Page{Bytes: 1}))
	require.Equal(t, []int64{9, 10}, read(1, Page{}), "position 2 was not read before: the log is asked")
	require.Equal(t, []int64{9, 10}, read(6, Page{}))
	require.Empty(t, read(10, Page{}))
	require.Empty(t, read(3, Page{Through: 3}))
}

// TestTailNeverSkips reads at random while events are appended: whatever the
// pages hold, a follower that goes on after the last row it got sees every
// position.
func TestTailNeverSkips(t *testing.T) {
	l := open(t)
	const events = 500
	var wg sync.WaitGroup
	wg.Go(func() { l.add(t, events) })
	for follower := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(follower)))
			for at := int64(0); at < events; {
				rows, err := l.Follow(context.Background(), at, Page{Rows: rng.IntN(50), Bytes: rng.IntN(2000)})
				if err != nil {
					t.Error(err)
					return
				}
				for _, r := range rows {
					if at++; r.Position != at {
						t.Errorf("follower %d got position %d, want %d", follower, r.Position, at)
						return
					}
				}
				if rng.IntN(20) == 0 {
					at -= min(at, rng.Int64N(500))
				}
			}
		})
	}
	wg.Wait()
}

func TestTailIsBounded(t *testing.T) {
	var l tail
	for i := range int64(1000) {
		l.add(i, []Record{{Position: i + 1}})
	}
	require.Len(t, l.pages, tailPages)
	l.add(5000, []Record{{Position: 5001, Payload: make([]byte, tailBytes-2*recordBytes)}})
	require.Len(t, l.pages, 2)
	l.add(6000, []Record{{Position: 6001, Payload: make([]byte, tailBytes)}})
	require.Empty(t, l.pages)
	require.Zero(t, l.bytes)
}

// TestPageIsARangeOfRowids pins how the log is read.
func TestPageIsARangeOfRowids(t *testing.T) {
	l := open(t)
	var id, parent, unused int
	var plan string
	require.NoError(t, l.db.Reader().QueryRow("EXPLAIN QUERY PLAN "+selectPage, 1, 2, 3).Scan(&id, &parent, &unused, &plan))
	require.Equal(t, "SEARCH outbox USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)", plan)
}
