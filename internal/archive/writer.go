package archive

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"outlog/outbox"
)

// Writer writes one file. Either Commit or Abort ends it.
type Writer struct {
	dir         *Dir
	file        file
	enc         encoder
	first, last int64
	err         error
}

// encoder is a format.
type encoder interface {
	add(records []outbox.Record) error
	close() error
}

// Create begins a file.
func (d *Dir) Create() (*Writer, error) {
	f, err := d.create(d.path, ".outlog-archive-*.tmp")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotStored, err)
	}
	w := &Writer{dir: d, file: f}
	if d.format == Parquet {
		w.enc = newParquet(f)
		return w, nil
	}
	if w.enc, err = newNDJSON(f); err != nil {
		w.fail(err)
		return nil, w.Abort()
	}
	return w, nil
}

// Add writes events, which must follow those before in log order.
func (w *Writer) Add(records []outbox.Record) error {
	if len(records) == 0 || w.err != nil {
		return w.err
	}
	if w.first == 0 {
		w.first = records[0].Position
	}
	w.last = records[len(records)-1].Position
	if err := w.enc.add(records); err != nil {
		return w.fail(err)
	}
	return nil
}

// Commit gives the file its name. When it returns nil the file survives a power
// cut; otherwise there is none, or at worst a whole one.
func (w *Writer) Commit() (File, error) {
	if w.err == nil && w.first == 0 {
		w.fail(errors.New("no events"))
	}
	if w.err != nil {
		return File{}, w.Abort()
	}
	if err := errors.Join(w.enc.close(), w.file.Sync()); err != nil {
		w.fail(err)
		return File{}, w.Abort()
	}
	f := File{filepath.Join(w.dir.path, w.dir.fileName(w.first, w.last)), w.first, w.last}
	err := w.file.Close()
	if err == nil {
		err = os.Rename(w.file.Name(), f.Path)
	}
	if err == nil {
		err = syncDir(w.dir.path)
	}
	if err != nil {
		return File{}, errors.Join(w.fail(err), ignoreMissing(os.Remove(w.file.Name())))
	}
	return f, nil
}

// Abort gives the file up and returns why, if it had failed.
func (w *Writer) Abort() error {
	return errors.Join(w.err, ignoreClosed(w.file.Close()), ignoreMissing(os.Remove(w.file.Name())))
}

func (w *Writer) fail(err error) error {
	w.err = fmt.Errorf("%w: %w", ErrNotStored, err)
	return w.err
}

func ignoreClosed(err error) error {
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}
