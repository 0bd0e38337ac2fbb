package broker

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// storeDir is the broker's store directory. Its content is a copy of what the
// log holds, so it is thrown away at the first doubt.
type storeDir string

// marker is the file that says a start has begun and not succeeded. It lives in
// the store directory, so that moving the directory away moves it too.
func (d storeDir) marker() string { return filepath.Join(string(d), "starting") }

// quarantined is where a store goes that a start did not survive.
func (d storeDir) quarantined() string { return filepath.Clean(string(d)) + ".bad" }

// prepare makes the directory ready for a start of the server, and returns
// whether the one that was there has been put into quarantine.
func (d storeDir) prepare() (moved bool, err error) {
	if err := d.make(); err != nil {
		return false, err
	}
	if _, err := os.Stat(d.marker()); err == nil {
		if moved, err = d.quarantine(); err != nil {
			return moved, err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("%w: %w", ErrStoreDir, err)
	}
	if err := d.removeIndexes(); err != nil {
		return moved, fmt.Errorf("%w: remove index: %w", ErrStoreDir, err)
	}
	return moved, d.mark()
}

func (d storeDir) make() error {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return fmt.Errorf("%w: %w", ErrStoreDir, err)
	}
	if err := os.Chmod(string(d), 0o700); err != nil {
		return fmt.Errorf("%w: %w", ErrStoreDir, err)
	}
	return nil
}

// mark writes the marker. It reaches the disk before the server reads a byte of
// the store: a start that brings the machine down must be seen too.
func (d storeDir) mark() error {
	f, err := os.OpenFile(d.marker(), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStoreDir, err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("%w: %w", ErrStoreDir, err)
	}
	return nil
}

func (d storeDir) unmark() error {
	if err := os.Remove(d.marker()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrStoreDir, err)
	}
	return nil
}

// quarantine moves the store beside itself and makes an empty one. One is kept,
// the youngest. A store that holds nothing is left where it is, or a second
// death during a start would replace the evidence by an empty directory.
func (d storeDir) quarantine() (moved bool, err error) {
	if held, _ := fs.Glob(os.DirFS(string(d)), "jetstream/*/streams/*"); len(held) == 0 {
		return false, nil
	}
	if err := os.RemoveAll(d.quarantined()); err != nil {
		return false, fmt.Errorf("%w: remove the older quarantine: %w", ErrStoreDir, err)
	}
	if err := os.Rename(string(d), d.quarantined()); err != nil {
		return false, fmt.Errorf("%w: quarantine: %w", ErrStoreDir, err)
	}
	return true, d.make()
}

// removeIndexes removes the server's summary of each stream. The server reads
// the messages themselves then, which costs a moment and cannot hang: a damaged
// message behind an intact index made it fill a hole of 2^60 sequences.
func (d storeDir) removeIndexes() error {
	found, err := fs.Glob(os.DirFS(string(d)), "jetstream/*/streams/*/msgs/index.db")
	if err != nil {
		return err
	}
	for _, name := range found {
		if err := os.Remove(filepath.Join(string(d), name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// messages is the directory that holds a stream's messages.
func (d storeDir) messages(stream string) string {
	return filepath.Join(string(d), "jetstream", "$G", "streams", stream, "msgs")
}
