package relay

import (
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

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
