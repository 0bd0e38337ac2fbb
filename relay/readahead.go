package relay

import (
	"context"
	"sync"

	"outlog/outbox"
)

// nextPage is what was read after a position.
type nextPage struct {
	after int64
	rows  []outbox.Record
}

// readAhead reads what follows a full page while that is being published. It
// returns how to wait for it.
func (r *Relay) readAhead(ctx context.Context, page []outbox.Record) (wait func()) {
	if len(page) < r.opts.WindowRows {
		return func() {} // that was the end of the log
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		r.next.after = page[len(page)-1].Position
		r.next.rows, _ = r.read(ctx, r.next.after) // an error comes again at the next page
	})
	return wg.Wait
}

// page returns the log's next page: the one read ahead, but only once, because
// who looks again waits for what came since.
func (r *Relay) page(ctx context.Context) ([]outbox.Record, error) {
	ahead := r.next
	r.next = nextPage{}
	if len(ahead.rows) > 0 && ahead.after == r.cursor.Position {
		return ahead.rows, nil
	}
	return r.read(ctx, r.cursor.Position)
}

func (r *Relay) read(ctx context.Context, after int64) ([]outbox.Record, error) {
	return r.log.Read(ctx, after, outbox.Page{Rows: r.opts.WindowRows, Bytes: r.opts.WindowBytes})
}
