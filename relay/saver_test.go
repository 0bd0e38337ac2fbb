package relay

import (
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/internal/failpoint"
	"outlog/outbox"
	"outlog/store"
)

// TestFencedSaverIsToldTwice: more is handed over while the write that finds
// another owner is under way.
func TestFencedSaverIsToldTwice(t *testing.T) {
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "outlog.db")})
	require.NoError(t, err)
	defer db.Close()
	log, err := outbox.Open(t.Context(), db)
	require.NoError(t, err)
	r, err := New(db, log, nil, Options{})
	require.NoError(t, err)
	r.token = 7 // the database says 0
	s := newSaver(r)
	s.add(t.Context(), Cursor{Position: 1}, nil)
	done := make(chan error, 1)
	require.NoError(t, db.Update(t.Context(), func(*store.Tx) error {
		go func() { done <- s.write(t.Context()) }()
		for s.unwritten() { // until the write has begun; it waits for this transaction
			runtime.Gosched()
		}
		s.add(t.Context(), Cursor{Position: 2}, nil)
		return nil
	}))
	require.ErrorIs(t, <-done, ErrFenced)
	require.ErrorIs(t, s.flush(t.Context()), ErrFenced)
	require.ErrorIs(t, s.write(t.Context()), ErrFenced)
}

func (s *saver) unwritten() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dirty
}

// TestSaverAfterACommitThatReportedAnError: the cursor and its publication are
// stored although the write was told that it failed. The next try, which has more
// to store, succeeds.
func TestSaverAfterACommitThatReportedAnError(t *testing.T) {
	hook := failpoint.At(failpoint.StoreAfterCommit, 1, failpoint.Fail(failpoint.ErrInjected))
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "outlog.db"), Failpoint: hook})
	require.NoError(t, err)
	defer db.Close()
	log, err := outbox.Open(t.Context(), db)
	require.NoError(t, err)
	r, err := New(db, log, nil, Options{})
	require.NoError(t, err)
	s := newSaver(r)
	window := func(first, last int64) []publication {
		return []publication{{firstPosition: first, lastPosition: last, firstSeq: uint64(first), lastSeq: uint64(last), joins: first > 1}}
	}
	s.add(t.Context(), Cursor{Position: 3, StreamSeq: 3}, window(1, 3))
	require.ErrorIs(t, s.write(t.Context()), failpoint.ErrInjected)
	s.add(t.Context(), Cursor{Position: 5, StreamSeq: 5}, window(4, 5))
	require.NoError(t, s.write(t.Context()))
	var stored string
	require.NoError(t, db.Reader().QueryRow(`SELECT (SELECT position FROM outlog_relay) || ': ' || group_concat(first_position || '-' || last_position, ', ')
		FROM outlog_publications`).Scan(&stored))
	require.Equal(t, "5: 1-5", stored)

	s.add(t.Context(), Cursor{Position: 5, StreamSeq: 9}, []publication{{firstPosition: 1, lastPosition: 5, firstSeq: 5, lastSeq: 9}})
	require.ErrorContains(t, s.write(t.Context()), "position 1 is on the stream at another sequence than 5")
}
