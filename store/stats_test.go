package store_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/store"
)

// TestStats: a group of three behind one caller, one of which fails, then a
// callback that is slow.
func TestStats(t *testing.T) {
	db := open(t, store.Options{})
	before := db.Stats()
	done := make(chan error, 4)
	release := make(chan struct{})
	entered := make(chan struct{})
	go func() {
		done <- db.Update(t.Context(), func(tx *store.Tx) error {
			select {
			case <-entered: // it runs again after the failure in its group
			default:
				close(entered)
				<-release
			}
			return insert(tx, 0)
		})
	}()
	<-entered
	for i := range 3 {
		go func() {
			done <- db.Update(t.Context(), func(tx *store.Tx) error {
				if i == 2 {
					return errors.New("no")
				}
				return insert(tx, i+1)
			})
		}()
	}
	require.Eventually(t, func() bool { return db.Stats().Waiting == 3 }, 10*time.Second, time.Millisecond)
	close(release)
	failed := 0
	for range 4 {
		if <-done != nil {
			failed++
		}
	}
	require.Equal(t, 1, failed)
	s := db.Stats()
	require.Zero(t, s.Waiting)
	require.Zero(t, s.Failed)
	require.Equal(t, 3.0, s.Groups.Sum-before.Groups.Sum, "callers whose callbacks were committed")
	require.Equal(t, s.Groups.Count, s.Commits.Count)
	require.Less(t, s.Groups.Count-before.Groups.Count, uint64(3), "they shared a commit")
	require.GreaterOrEqual(t, s.Holds.Count-before.Holds.Count, uint64(4))
	require.Positive(t, s.Commits.Sum)
}

// TestStatsCountFailures: a transaction that cannot be begun, because another
// program writes.
func TestStatsCountFailures(t *testing.T) {
	db := open(t, store.Options{BusyTimeout: time.Millisecond})
	outsider, err := store.OpenOutsider(db.Path(), time.Second)
	require.NoError(t, err)
	defer outsider.Close()
	_, err = outsider.Exec(`BEGIN IMMEDIATE`) // its pool has one connection
	require.NoError(t, err)
	require.Error(t, db.Update(t.Context(), func(tx *store.Tx) error { return insert(tx, 1) }))
	_, err = outsider.Exec(`ROLLBACK`)
	require.NoError(t, err)
	require.Equal(t, int64(1), db.Stats().Failed)
}
