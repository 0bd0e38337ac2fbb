package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"outlog/store"
)

// faultKind is something that is done to the service.
type faultKind struct {
	name, what string
	do         func(*torment, context.Context, *rand.Rand) error
	impossible func() error // why it cannot be done here; nil: it always can
}

// faultKinds are all kinds; the first ends every schedule.
var faultKinds = []faultKind{
	{"kill", "SIGKILL and a new start", (*torment).restart, nil},
	{"pause", "SIGSTOP, some time, SIGCONT", (*torment).freeze, freezeImpossible},
	{"disk_full", "no space left for some time", (*torment).fillDisk, fillDiskImpossible},
	{"stream_deleted", "the stream's directory is gone at a start", damage((*torment).deleteStream), nil},
	{"stream_deleted_live", "it is deleted under the running service", (*torment).deleteStreamLive, nil},
	{"tail_cut", "a file of the stream has lost its end at a start", damage((*torment).cutTail), nil},
	{"bit_flip", "bits of a file of the stream are wrong at a start", damage((*torment).flipBits), nil},
	{"stream_restored", "an older copy of the stream is there at a start", (*torment).restoreStream, nil},
	{"database_restored", "an older copy of the database is there at a start", (*torment).restoreDatabase, nil},
}

// down ends the service: mostly as SIGKILL does, sometimes in order.
func (t *torment) down(ctx context.Context, random *rand.Rand) error {
	if random.IntN(4) == 0 {
		return t.server.stop(ctx)
	}
	t.server.kill()
	return nil
}

func (t *torment) restart(ctx context.Context, _ *rand.Rand) error {
	t.server.kill()
	return t.server.start(ctx)
}

// freeze stops the process and lets it go on, as a laptop's lid does.
func (t *torment) freeze(ctx context.Context, random *rand.Rand) error {
	p, _ := t.server.current()
	if err := p.freeze(); err != nil {
		return err
	}
	pause(ctx, between(random, 50*time.Millisecond, 2*time.Second))
	return p.thaw()
}

// damage makes a fault of something that is done to the stream's files while
// the service is down.
func damage(do func(*torment, *rand.Rand) error) func(*torment, context.Context, *rand.Rand) error {
	return func(t *torment, ctx context.Context, random *rand.Rand) error {
		if err := t.down(ctx, random); err != nil {
			return err
		}
		if err := do(t, random); err != nil {
			return err
		}
		return t.server.start(ctx)
	}
}

func (t *torment) deleteStream(*rand.Rand) error { return os.RemoveAll(t.stream()) }

// deleteStreamLive deletes while the server may be adding files.
func (t *torment) deleteStreamLive(ctx context.Context, _ *rand.Rand) error {
	for range 100 {
		if os.RemoveAll(t.stream()) == nil {
			return nil
		}
	}
	return os.RemoveAll(t.stream())
}

// cutTail cuts off the end of a file.
func (t *torment) cutTail(random *rand.Rand) error {
	name, size, err := t.pick(random)
	if err != nil || name == "" {
		return err
	}
	cut := 1 + random.Int64N(size)
	t.log.Info("cut", "file", name, "size", size, "cut", cut)
	return os.Truncate(name, size-cut)
}

// flipBits flips one to eight bits of a file.
func (t *torment) flipBits(random *rand.Rand) error {
	name, size, err := t.pick(random)
	if err != nil || name == "" {
		return err
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	for range 1 + random.IntN(8) {
		at, bit, b := random.Int64N(size), byte(1)<<random.IntN(8), []byte{0}
		if _, err := f.ReadAt(b, at); err != nil {
			return errors.Join(err, f.Close())
		}
		b[0] ^= bit
		if _, err := f.WriteAt(b, at); err != nil {
			return errors.Join(err, f.Close())
		}
		t.log.Info("flip", "file", name, "size", size, "at", at, "bit", bit)
	}
	return f.Close()
}

// pick chooses a file of the stream that is not empty: as often a file of
// messages as any other. "" if there is none.
func (t *torment) pick(random *rand.Rand) (name string, size int64, err error) {
	sizes := map[string]int64{}
	var blocks, others []string
	err = filepath.WalkDir(t.stream(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		st, err := d.Info()
		if err != nil || st.Size() == 0 {
			return err
		}
		sizes[path] = st.Size()
		if filepath.Ext(path) == ".blk" {
			blocks = append(blocks, path)
		} else {
			others = append(others, path)
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) || len(sizes) == 0 {
		return "", 0, nil
	}
	from := others
	if len(blocks) > 0 && (len(others) == 0 || random.IntN(2) == 0) {
		from = blocks
	}
	name = from[random.IntN(len(from))]
	return name, sizes[name], err
}

// restoreStream copies the stream's directory, lets more be published, and puts
// the copy back.
func (t *torment) restoreStream(ctx context.Context, random *rand.Rand) error {
	older := filepath.Join(t.copies, "jetstream")
	if err := t.down(ctx, random); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(older), copyDir(t.stream(), older)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := t.server.start(ctx); err != nil {
		return err
	}
	if _, err := t.awaitOrder(ctx); err != nil {
		return err
	}
	pause(ctx, between(random, 100*time.Millisecond, time.Second))
	if err := t.down(ctx, random); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(t.stream()), os.Rename(older, t.stream())); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return t.server.start(ctx)
}

// restoreDatabase copies the database beside the running service, lets more be
// accepted, and puts the copy back; or puts back the copy of the last time.
func (t *torment) restoreDatabase(ctx context.Context, random *rand.Rand) error {
	older := filepath.Join(t.copies, "database.db")
	if t.lastCopy == nil || random.IntN(3) > 0 {
		if err := t.copyDatabase(ctx, older); err != nil {
			return fmt.Errorf("copy the database: %w", err)
		}
		pause(ctx, between(random, 100*time.Millisecond, time.Second))
	}
	if err := t.down(ctx, random); err != nil {
		return err
	}
	t.server.mu.Lock()
	r := *t.lastCopy
	r.run = t.server.runs
	t.server.mu.Unlock()
	t.restores = append(t.restores, r)
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(t.database() + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := copyFile(older, t.database()); err != nil {
		return err
	}
	return t.server.start(ctx)
}

// copyDatabase makes a consistent copy and notes what is in it.
func (t *torment) copyDatabase(ctx context.Context, path string) error {
	r := restore{copied: time.Now(), holds: map[string]bool{}}
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	db, err := store.OpenReader(ctx, t.database())
	if err != nil {
		return err
	}
	if err := errors.Join(db.Backup(ctx, path), db.Close()); err != nil {
		return err
	}
	copied, err := store.OpenReader(ctx, path)
	if err != nil {
		return err
	}
	err = eachRow(ctx, copied.Reader(), `SELECT event_id FROM outbox`, func(scan func(...any) error) error {
		var id string
		err := scan(&id)
		r.holds[id] = true
		return err
	})
	t.lastCopy = &r
	return errors.Join(err, copied.Close())
}

// between is a time from low to high.
func between(random *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(random.Int64N(int64(high-low)))
}

// copyDir copies a directory of files and directories.
func copyDir(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(to, rel), 0o700)
		}
		return copyFile(path, filepath.Join(to, rel))
	})
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o600)
}
