package outbox

import (
	"context"
	"slices"
	"sort"
	"sync"
)

// tailPages and tailBytes bound what the tail keeps.
const (
	tailPages = 64
	tailBytes = 8 << 20
)

// recordBytes is what a record takes apart from its payload and headers,
// roughly.
const recordBytes = 400

// tail keeps the pages that were read last. Relay and consumers follow the log
// at about the same place, so the relay reads a row and the consumers find it here. The
// log never changes above a cursor, so a page needs no freshness: it holds
// every row that there will ever be between its ends.
type tail struct {
	mu    sync.Mutex
	pages []page // the last one is the newest
	bytes int
}

// page holds all rows of the log after one position and up to another.
type page struct {
	after, through int64
	rows           []Record
	bytes          int
}

// Follow is Read for those who follow the log: what somebody has just read, they
// get without the database. It may return fewer events than p allows, but none
// only where there are none.
func (l *Log) Follow(ctx context.Context, after int64, p Page) ([]Record, error) {
	if rows := l.tail.find(after, p); len(rows) > 0 {
		return rows, nil
	}
	return l.Read(ctx, after, p)
}

// find returns what the pages hold of p, none if the first row is not there.
func (t *tail) find(after int64, p Page) []Record {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, have := range slices.Backward(t.pages) {
		if after < have.after || after >= have.through {
			continue
		}
		rows := have.rows[sort.Search(len(have.rows), func(i int) bool { return have.rows[i].Position > after }):]
		return rows[:p.take(rows)]
	}
	return nil
}

// take is how many leading rows the page takes.
func (p Page) take(rows []Record) (n int) {
	bytes := 0
	for n < len(rows) && (p.Rows <= 0 || n < p.Rows) && (p.Through <= 0 || rows[n].Position <= p.Through) {
		bytes += len(rows[n].Payload) + len(rows[n].RawHeaders)
		n++
		if p.Bytes > 0 && bytes >= p.Bytes {
			break
		}
	}
	return n
}

func (t *tail) add(after int64, rows []Record) {
	if len(rows) == 0 {
		return
	}
	have := page{after: after, through: rows[len(rows)-1].Position, rows: rows}
	for i := range rows {
		have.bytes += recordBytes + len(rows[i].Payload) + len(rows[i].RawHeaders)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages = append(t.pages, have)
	t.bytes += have.bytes
	for t.bytes > tailBytes || len(t.pages) > tailPages {
		t.bytes -= t.pages[0].bytes
		t.pages = slices.Delete(t.pages, 0, 1)
	}
}
