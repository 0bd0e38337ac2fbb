package store

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
)

// Space is how the pages of the database are used.
type Space struct {
	PageBytes int64
	Pages     int64 // of the database
	Free      int64 // of them unused: the next rows go there
	GivesBack bool  // the file can shrink: it was made with auto_vacuum
}

// Space reads how the database is used.
func (db *DB) Space(ctx context.Context) (s Space, err error) {
	var auto int
	err = db.reader.QueryRowContext(ctx, `SELECT page_size, page_count, freelist_count, auto_vacuum
		FROM pragma_page_size, pragma_page_count, pragma_freelist_count, pragma_auto_vacuum`).Scan(&s.PageBytes, &s.Pages, &s.Free, &auto)
	s.GivesBack = auto == 2
	return s, err
}

// keptFree is how many free pages stay in the file: giving back what the next
// transactions take again would be work for nothing.
const keptFree = 256

// GiveBack takes up to pages free pages off the end of the file and reports how
// many more it could: 0 when few enough are free, or the database was made
// without auto_vacuum. The file itself becomes shorter with the next
// checkpoint. Cost: each page given back is one page written.
func (tx *Tx) GiveBack(pages int64) (left int64, err error) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.done {
		return 0, ErrTxDone
	}
	err = tx.conn.Raw(func(dc any) error {
		k := dc.(*conn)
		if k.dead {
			return k.aborted()
		}
		left, err = k.giveBack(pages)
		k.note(err)
		return err
	})
	return left, err
}

func (k *conn) giveBack(pages int64) (left int64, err error) {
	spare, err := k.spare()
	if err != nil || spare == 0 {
		return 0, err
	}
	k.internal = true
	defer func() { k.internal = false }()
	// One row per page: a statement that is not read to its end frees one page.
	rows, err := k.sqliteConn.QueryContext(context.Background(), fmt.Sprintf("PRAGMA incremental_vacuum(%d)", min(pages, spare)), nil)
	if err != nil {
		return 0, err
	}
	dest := make([]driver.Value, len(rows.Columns()))
	for err == nil {
		err = rows.Next(dest)
	}
	if err = errors.Join(ignoreEOF(err), rows.Close()); err != nil {
		return 0, err
	}
	return k.spare()
}

// spare is how many pages could be given back.
func (k *conn) spare() (int64, error) {
	auto, err := k.readPragma(context.Background(), "auto_vacuum")
	if err != nil || auto != "2" {
		return 0, err
	}
	free, err := k.readPragma(context.Background(), "freelist_count")
	if err != nil {
		return 0, err
	}
	var n int64
	if _, err := fmt.Sscan(free, &n); err != nil {
		return 0, fmt.Errorf("freelist_count: %w", err)
	}
	return max(0, n-keptFree), nil
}

func ignoreEOF(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}
