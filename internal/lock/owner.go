package lock

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Owner is who holds a database.
type Owner struct {
	PID       int       `json:"pid"`
	Address   string    `json:"http,omitempty"` // host:port of its HTTP server, if it has one
	StartedAt time.Time `json:"started_at"`     // UTC
}

// HeldError is returned when the database has an owner already.
type HeldError struct {
	Path  string // the database
	Owner Owner  // zero when it has not said who it is
}

func (e *HeldError) Error() string {
	var by strings.Builder
	by.WriteString("another process")
	if e.Owner.PID != 0 {
		fmt.Fprintf(&by, " (pid %d", e.Owner.PID)
		if e.Owner.Address != "" {
			fmt.Fprintf(&by, ", http://%s", e.Owner.Address)
		}
		fmt.Fprintf(&by, ", since %s)", e.Owner.StartedAt.Format(time.RFC3339))
	}
	return fmt.Sprintf("%s is in use by %s; stop it, use another directory, or wait for it with `outlog serve --standby`", e.Path, by.String())
}

func ownerFile(path string) string { return path + ".owner" }

// writeOwner replaces the owner file in one step: readers see the old one or
// the new one.
func writeOwner(path string, o Owner) error {
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(ownerFile(path))+".*") // mode 0600
	if err != nil {
		return fmt.Errorf("write owner file: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), ownerFile(path))
	}
	if err != nil {
		return fmt.Errorf("write owner file: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// readOwner returns the zero Owner when there is no owner file.
func readOwner(path string) (Owner, error) {
	b, err := os.ReadFile(ownerFile(path))
	if errors.Is(err, fs.ErrNotExist) {
		return Owner{}, nil
	}
	var o Owner
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	if err != nil {
		return Owner{}, fmt.Errorf("read %s: %w", ownerFile(path), err)
	}
	return o, nil
}
