package node

import (
	"context"
	"database/sql"
	"errors"
)

// published iterates over the events that should be on the stream, by sequence:
// those in publications. One that was parked at the relay comes later than its
// position. It reads the log page by page, so that it holds no snapshot.
type published struct {
	db      *sql.DB
	through uint64 // the relay's stored sequence
	pruned  int64  // events up to this position are not among them
	runs    []publishedRun
	page    []publishedEvent
}

// publishedRun is a publication: its events, counted from the last, have
// sequences without a gap.
type publishedRun struct {
	first, last int64 // positions
	lastSeq     uint64
}

type publishedEvent struct {
	position int64
	eventID  string
	seq      uint64
}

// readPublished reads what was published, in one short transaction. It takes 24
// bytes for each publication, that is for each write of the relay's cursor.
func readPublished(ctx context.Context, db *sql.DB) (*published, error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	p := &published{db: db}
	if err := tx.QueryRowContext(ctx, `SELECT stream_seq, pruned_through FROM outlog_relay, outlog_meta WHERE name = 'main'`).
		Scan(&p.through, &p.pruned); err != nil {
		return nil, err
	}
	rows, err := tx.QueryContext(ctx, `SELECT first_position, last_position, last_stream_seq FROM outlog_publications ORDER BY first_stream_seq`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var r publishedRun
		if err := rows.Scan(&r.first, &r.last, &r.lastSeq); err != nil {
			return nil, err
		}
		p.runs = append(p.runs, r)
	}
	return p, rows.Err()
}

// from leaves out what lies before a sequence.
func (p *published) from(seq uint64) {
	for len(p.runs) > 0 && p.runs[0].lastSeq < seq {
		p.runs = p.runs[1:]
	}
}

// at returns the event that should be at a sequence, and goes on behind it.
func (p *published) at(ctx context.Context, seq uint64) (e publishedEvent, ok bool, err error) {
	if _, _, err := p.skipTo(ctx, seq); err != nil || len(p.page) == 0 || p.page[0].seq != seq {
		return e, false, err
	}
	e, p.page = p.page[0], p.page[1:]
	return e, true, nil
}

// skipTo passes over the events before a sequence, and returns the lowest and
// the highest position among them, 0 if there is none.
func (p *published) skipTo(ctx context.Context, seq uint64) (first, last int64, err error) {
	for {
		for len(p.page) > 0 && p.page[0].seq < seq {
			if e := p.page[0]; first == 0 || e.position < first {
				first = e.position
			}
			last = max(last, p.page[0].position)
			p.page = p.page[1:]
		}
		if len(p.page) > 0 || len(p.runs) == 0 {
			return first, last, nil
		}
		if err := p.read(ctx); err != nil {
			return first, last, err
		}
	}
}

// publishedPage is about how many positions are read at once.
const publishedPage = 4096

// read reads the events of the next runs. Those that lie close together in the
// log are read together.
func (p *published) read(ctx context.Context) error {
	n := 1
	for ; n < len(p.runs); n++ {
		before, next := p.runs[n-1], p.runs[n]
		if next.first < before.last || next.last-p.runs[0].first > publishedPage {
			break
		}
	}
	runs := p.runs[:n]
	rows, err := p.db.QueryContext(ctx, `SELECT position, event_id FROM outbox WHERE position BETWEEN ? AND ? ORDER BY position`,
		runs[0].first, runs[n-1].last)
	if err != nil {
		return err
	}
	defer rows.Close()
	p.page = p.page[:0]
	begin := 0 // of the events of runs[0] in the page
	end := func() {
		for i := begin; i < len(p.page); i++ {
			p.page[i].seq = runs[0].lastSeq - uint64(len(p.page)-1-i)
		}
		begin, runs = len(p.page), runs[1:]
	}
	for rows.Next() {
		var e publishedEvent
		if err := rows.Scan(&e.position, &e.eventID); err != nil {
			return err
		}
		for len(runs) > 0 && e.position > runs[0].last {
			end()
		}
		if len(runs) > 0 && e.position >= runs[0].first {
			p.page = append(p.page, e)
		}
	}
	for len(runs) > 0 {
		end()
	}
	p.runs = p.runs[n:]
	return errors.Join(rows.Err(), rows.Close())
}
