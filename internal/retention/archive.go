package retention

import (
	"context"
	"fmt"

	"outlog/internal/archive"
	"outlog/outbox"
)

// archive makes sure that events are in a file, and returns those that are:
// fewer when a file ends among them, none when they are not worth one yet.
//
// A file that holds the first of them is of a run that was cut short. It must
// hold the events that the log holds, and then what is in it needs no other.
func (r *run) archive(ctx context.Context, events []outbox.Extent) ([]outbox.Extent, error) {
	f, have, err := r.Archive.Covers(events[0].Position)
	if err != nil {
		return nil, err
	}
	if have {
		events = before(events, f.Last)
		return events, r.compare(f, events)
	}
	if len(events) < r.MinArchive {
		return nil, nil
	}
	if f, err = r.write(ctx, events); err != nil {
		return nil, err
	}
	r.result.Files = append(r.result.Files, f.Path)
	r.verified[f.Path] = true
	if r.Failpoint != nil {
		err = r.Failpoint("retention.after-archive")
	}
	return events, err
}

// readPage bounds what is read at a time, so that no read is long.
var readPage = outbox.Page{Rows: 500, Bytes: 8 << 20}

// write stores events in a new file.
func (r *run) write(ctx context.Context, events []outbox.Extent) (archive.File, error) {
	w, err := r.Archive.Create()
	if err != nil {
		return archive.File{}, err
	}
	page := readPage
	page.Through = events[len(events)-1].Position
	after, n := events[0].Position-1, 0
	for after < page.Through && err == nil {
		var rows []outbox.Record
		if rows, err = r.log.Read(ctx, after, page); err != nil {
			break
		}
		if len(rows) == 0 || n+len(rows) > len(events) || rows[0].EventID != events[n].EventID {
			err = outbox.ErrHorizonMoved // somebody else prunes the same events
			break
		}
		after, n = rows[len(rows)-1].Position, n+len(rows)
		if err = w.Add(rows); err == nil {
			err = ctx.Err()
		}
	}
	if err != nil {
		_ = w.Abort()
		return archive.File{}, err
	}
	return w.Commit()
}

// compare makes sure that a file holds events.
func (r *run) compare(f archive.File, events []outbox.Extent) error {
	if r.verified[f.Path] {
		return nil
	}
	n := 0
	err := archive.Read(f.Path, func(e outbox.Record) error {
		switch {
		case n == len(events) || e.Position < events[0].Position:
			return nil
		case e.Position != events[n].Position || e.EventID != events[n].EventID:
			return fmt.Errorf("%w: %s has event %s at position %d, the log has %s at position %d", archive.ErrConflict,
				f.Path, e.EventID, e.Position, events[n].EventID, events[n].Position)
		}
		n++
		return nil
	})
	if err == nil && n < len(events) {
		err = fmt.Errorf("%w: %s lacks the event at position %d", archive.ErrConflict, f.Path, events[n].Position)
	}
	if err == nil && events[len(events)-1].Position == f.Last {
		r.verified[f.Path] = true
	}
	return err
}
