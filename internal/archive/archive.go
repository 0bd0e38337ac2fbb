// Package archive keeps events in files before they are pruned: NDJSON
// compressed with zstd, or Parquet, for other tools to read.
//
// # Model
//
// A file holds the events of one log from a first position to a last one, both
// in its name. It is written under a temporary name, synced, renamed, and the
// directory is synced: under its own name it is whole. Only then may the events
// be deleted, in any number of steps, and never beyond it.
//
// A crash in between leaves events that are in a file and in the log. Covers
// finds that file, so that they are not archived a second time; nothing is ever
// deleted from the directory.
package archive

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"

	"outlog/outbox"
)

// Format is how events are written.
type Format string

// The formats. NDJSON files have the name ending .ndjson.zst, Parquet ones
// .parquet.
const (
	NDJSON  Format = "ndjson"
	Parquet Format = "parquet"
)

var (
	// ErrFormat is returned by Open for a format that is neither NDJSON nor
	// Parquet.
	ErrFormat = errors.New("archive format must be ndjson or parquet")
	// ErrNotStored is returned when a file could not be written to its end, for
	// example on a full disk; nothing of it is left, and the events must not be
	// deleted.
	ErrNotStored = errors.New("events could not be archived, so none was deleted")
	// ErrConflict is returned for a file that should hold the log's events and
	// holds others: of a log that was restored from a backup, most likely. The
	// caller should name another directory.
	ErrConflict = errors.New("the archive holds other events at these positions")
)

// Dir is a directory of archive files of one log.
type Dir struct {
	path   string
	logID  string
	format Format
	create func(dir, pattern string) (file, error)
}

// Open returns the archive in the directory path, which is made with mode 0700
// if it is not there. It may hold the archives of several logs.
func Open(path, logID string, format Format) (*Dir, error) {
	if format != NDJSON && format != Parquet {
		return nil, fmt.Errorf("%w: %q", ErrFormat, format)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("archive directory: %w", err)
	}
	return &Dir{path: path, logID: logID, format: format, create: createTemp}, nil
}

// File is one file of an archive.
type File struct {
	Path        string
	First, Last int64 // positions
}

var fileName = regexp.MustCompile(`^outlog-([A-Za-z0-9_-]+)-([0-9]{19})-([0-9]{19})\.(ndjson\.zst|parquet)$`)

func (d *Dir) fileName(first, last int64) string {
	ending := map[Format]string{NDJSON: "ndjson.zst", Parquet: "parquet"}[d.format]
	return fmt.Sprintf("outlog-%s-%019d-%019d.%s", d.logID, first, last, ending)
}

// Files returns the files of this log, in the order of their first positions.
func (d *Dir) Files() ([]File, error) {
	entries, err := os.ReadDir(d.path) // sorted by name
	if err != nil {
		return nil, fmt.Errorf("read archive: %w", err)
	}
	var files []File
	for _, e := range entries {
		m := fileName.FindStringSubmatch(e.Name())
		if m == nil || m[1] != d.logID {
			continue
		}
		first, _ := strconv.ParseInt(m[2], 10, 64)
		last, _ := strconv.ParseInt(m[3], 10, 64)
		files = append(files, File{filepath.Join(d.path, e.Name()), first, last})
	}
	return files, nil
}

// Covers returns the file that goes furthest of those that hold the event at
// position; ok is false if there is none.
func (d *Dir) Covers(position int64) (f File, ok bool, err error) {
	files, err := d.Files()
	for _, have := range files {
		if have.First <= position && position <= have.Last && have.Last >= f.Last {
			f, ok = have, true
		}
	}
	return f, ok, err
}

// Read calls fn for every event of a file, in log order.
func Read(path string, fn func(outbox.Record) error) error {
	read := readNDJSON
	if strings.HasSuffix(path, ".parquet") {
		read = readParquet
	}
	if err := read(path, fn); err != nil {
		return fmt.Errorf("read archive %s: %w", path, err)
	}
	return nil
}

// syncDir makes a new name in a directory survive a power cut. Windows cannot,
// and need not.
func syncDir(path string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// file is what of *os.File is used for writing; tests put others in its place.
type file interface {
	Write([]byte) (int, error)
	Sync() error
	Close() error
	Name() string
}

func createTemp(dir, pattern string) (file, error) { return os.CreateTemp(dir, pattern) } // mode 0600

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
