package cli

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
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
		now := residentBytes(p.cmd.Process.Pid)
		m.most.Store(max(m.most.Load(), now))
		if now > rssLimit {
			giveUp(fmt.Errorf("the service has taken %d MiB of memory, more than %d", now>>20, rssLimit>>20))
			return
		}
	}
}
