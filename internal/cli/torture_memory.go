package cli

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"outlog/internal/footprint"
)

// memoryWatch looks at the memory of the service.
type memoryWatch struct{ most atomic.Int64 }

func (m *memoryWatch) max() int64 { return m.most.Load() }

// watch looks until ctx ends, and gives up on a service that takes too much: one
// wrong bit in a file must not cost the machine its memory.
func (m *memoryWatch) watch(ctx context.Context, server *child, giveUp func(error)) {
	for pause(ctx, 50*time.Millisecond) {
		p, _ := server.current()
		if p == nil {
			continue
		}
		now, _ := footprint.Of(p.cmd.Process.Pid) // nothing when it has just ended
		m.most.Store(max(m.most.Load(), now.Peak))
		if now.Peak > rssLimit {
			giveUp(fmt.Errorf("the service has taken %d MiB of memory, more than %d", now.Peak>>20, rssLimit>>20))
			return
		}
	}
}
