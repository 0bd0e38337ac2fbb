package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// fullDisk is a tmpfs that lies over the data directory while it is small.
type fullDisk struct {
	memory string // where the tmpfs is mounted, "" for nowhere
	over   bool   // it is over the data directory too
}

const roomy = "size=512m"

// fillDiskImpossible tries once whether this process may mount.
var fillDiskImpossible = sync.OnceValue(func() error {
	dir, err := os.MkdirTemp("", "outlog-torture-")
	if err != nil {
		return err
	}
	defer os.Remove(dir)
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		return fmt.Errorf("it needs root, to mount a tmpfs: %w", err)
	}
	return syscall.Unmount(dir, 0)
})

// fillDisk moves the directory to a small disk, takes its space away under load,
// gives it back, waits until orders are accepted, and moves the directory back.
func (t *torment) fillDisk(ctx context.Context, random *rand.Rand) error {
	t.server.kill()
	if err := t.disk.mount(t); err != nil {
		return errors.Join(err, t.disk.unmount(t))
	}
	if err := t.server.start(ctx); err != nil {
		return err
	}
	if _, err := t.awaitOrder(ctx); err != nil {
		return err
	}
	if err := t.disk.squeeze(); err != nil {
		return err
	}
	before := t.load.accepted.Load()
	pause(ctx, between(random, 300*time.Millisecond, 3*time.Second))
	t.log.Info("disk was full", "accepted meanwhile", t.load.accepted.Load()-before)
	if err := t.disk.resize(roomy); err != nil {
		return err
	}
	took, err := t.awaitOrder(ctx)
	if err != nil {
		return fmt.Errorf("with space again: %w", err)
	}
	t.recoveries = append(t.recoveries, took)
	pause(ctx, between(random, 0, time.Second))
	t.server.kill()
	if err := t.disk.unmount(t); err != nil {
		return err
	}
	return t.server.start(ctx)
}

// mount puts a tmpfs with a copy of the directory over the directory.
func (d *fullDisk) mount(t *torment) (err error) {
	if d.memory, err = os.MkdirTemp("", "outlog-torture-disk-"); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", d.memory, "tmpfs", 0, roomy); err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	if err := copyDir(t.dir, d.memory); err != nil {
		return err
	}
	if err := syscall.Mount(d.memory, t.dir, "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount over %s: %w", t.dir, err)
	}
	d.over = true
	return nil
}

func (d *fullDisk) resize(size string) error {
	return syscall.Mount("tmpfs", d.memory, "tmpfs", syscall.MS_REMOUNT, size)
}

// squeeze leaves 64 KiB. The service may take them before the system has agreed.
func (d *fullDisk) squeeze() error {
	var err error
	for range 1000 {
		var st syscall.Statfs_t
		if err = syscall.Statfs(d.memory, &st); err != nil {
			return err
		}
		used := (st.Blocks - st.Bfree) * uint64(st.Bsize)
		if err = d.resize(fmt.Sprintf("size=%d", used+64<<10)); err == nil {
			return nil
		}
	}
	return fmt.Errorf("make the disk small: %w", err)
}

// unmount moves the directory back to where it was.
func (d *fullDisk) unmount(t *torment) error {
	if d.over {
		if err := syscall.Unmount(t.dir, syscall.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", t.dir, err)
		}
		d.over = false
		if err := replaceFiles(d.memory, t.dir); err != nil {
			return err
		}
	}
	if d.memory == "" {
		return nil
	}
	err := errors.Join(syscall.Unmount(d.memory, syscall.MNT_DETACH), os.Remove(d.memory))
	d.memory = ""
	return err
}

// release undoes what a fault that was cut off has left.
func (d *fullDisk) release(t *torment) {
	if d.memory == "" {
		return
	}
	t.server.kill()
	if err := d.unmount(t); err != nil {
		t.log.Error("the small disk is still there", "error", err)
	}
}

// replaceFiles makes a data directory what another is; the log of the torture
// stays.
func replaceFiles(from, to string) error {
	entries, err := os.ReadDir(to)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == tortureLog {
			continue
		}
		if err := os.RemoveAll(filepath.Join(to, e.Name())); err != nil {
			return err
		}
	}
	if err := os.Remove(filepath.Join(from, tortureLog)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return copyDir(from, to)
}
