package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"outlog/store"
)

// makeDir makes the data directory, and what is missing above it, with mode
// 0700. Their names are on the disk when it returns: what is acknowledged in
// the directory must not be lost with its name.
func makeDir(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	parent := filepath.Dir(dir)
	if _, err := os.Stat(parent); errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(parent); err != nil {
			return err
		}
	}
	err = os.Mkdir(dir, 0o700)
	made := err == nil
	if errors.Is(err, fs.ErrExist) {
		var st fs.FileInfo
		if st, err = os.Stat(dir); err == nil && !st.IsDir() {
			err = &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
		}
	}
	if err != nil {
		return err
	}
	// One that was there may have been made by a process that died here. Whether
	// its parent lets us look is not ours to say.
	if err := store.SyncDir(parent); err != nil && made {
		return fmt.Errorf("sync %s: %w", parent, err)
	}
	return nil
}
