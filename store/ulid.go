package store

import (
	"crypto/rand"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
)

// idSource makes ULIDs that rise strictly within the process: a clock that
// steps back, or more ids in a millisecond than there is entropy for, raise
// the last id instead. Order never comes from ids; rising ones only keep the
// indexes on them dense.
type idSource struct {
	now func() time.Time

	mu      sync.Mutex
	last    ulid.ULID
	entropy *ulid.MonotonicEntropy
}

func newIDSource(now func() time.Time) *idSource {
	return &idSource{now: now, entropy: ulid.Monotonic(rand.Reader, 0)}
}

func (s *idSource) next() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ms := max(ulid.Timestamp(s.now()), s.last.Time())
	id, err := ulid.New(ms, s.entropy)
	if err != nil { // entropy of this millisecond is used up
		id, _ = ulid.New(ms+1, s.entropy)
	}
	s.last = id
	return id.String()
}
