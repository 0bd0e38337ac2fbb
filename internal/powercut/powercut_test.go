package powercut_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/internal/powercut"
)

// trace is what strace prints of a program that makes two files and syncs one.
// {f} is the first in hexadecimal digits, {g} the second, {d} the directory.
const trace = `10 mkdirat(AT_FDCWD<{/}>, "{d}", 0700) = 0
10 openat(AT_FDCWD<{/}>, "{f}", O_RDWR|O_CREAT, 0600) = 3<{f}>
10 pwrite64(3<{f}>, "{aaaa}", 4, 0) = 4
10 fsync(3<{f}> <unfinished ...>
11 pwrite64(3<{f}>, "{bb}", 2, 2) = 2
10 <... fsync resumed>) = 0
10 write(1<{pipe:[7]}>, "{ack}", 3) = 3
10 openat(AT_FDCWD<{/}>, "{g}", O_RDWR|O_CREAT, 0600) = 4<{g}>
10 openat(AT_FDCWD<{/}>, "{d}", O_RDONLY) = 5<{d}>
10 fsync(5<{d}>) = 0
10 write(4<{g}>, "{1}", 1) = 1
10 write(4<{g}>, "{2}", 1) = -1 ENOSPC (No space left on device)
10 write(4<{g}>, "{3}", 1 <unfinished ...>
10 <... write resumed>) = 1
10 openat(AT_FDCWD<{/}>, "{/}", O_RDONLY) = 6<{/}>
10 fsync(6<{/}>) = 0
10 renameat(AT_FDCWD<{/}>, "{g}", AT_FDCWD<{/}>, "{d}/h") = 0
10 mmap(NULL, 32768, PROT_READ|PROT_WRITE, MAP_SHARED, 3<{f}>, 0) = 0x7fd57df6e000
10 +++ exited with 0 +++
`

func hexed(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		fmt.Fprintf(&b, `\x%02x`, c)
	}
	return b.String()
}

func load(t *testing.T) *powercut.Recording {
	text := trace
	for old, path := range map[string]string{"d": "/r/d", "f": "/r/d/f", "g": "/r/d/g", "/": "/r"} {
		text = strings.ReplaceAll(text, "{"+old+"}", hexed(path))
	}
	for _, s := range []string{"aaaa", "bb", "pipe:[7]", "ack", "1", "2", "3"} {
		text = strings.ReplaceAll(text, "{"+s+"}", hexed(s))
	}
	text = strings.ReplaceAll(text, `/h"`, hexed("/h")+`"`)
	file := filepath.Join(t.TempDir(), "trace")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	r, err := powercut.Load(file, "/r")
	require.NoError(t, err)
	return r
}

// cut returns the files that a power cut at a moment leaves.
func cut(t *testing.T, r *powercut.Recording, moment int, loss powercut.Loss) map[string]string {
	d, dir := r.Disk(), t.TempDir()
	require.NoError(t, d.Advance(moment))
	require.NoError(t, d.Cut(dir, loss, rand.New(rand.NewPCG(1, 2))))
	files := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			b, err := os.ReadFile(path)
			files[strings.TrimPrefix(path, dir)] = string(b)
			return err
		}
		return err
	}))
	return files
}

// TestCut: what is safe after which call.
func TestCut(t *testing.T) {
	r := load(t)
	require.Equal(t, []powercut.Said{{At: 7, Text: "ack"}}, r.Said)
	require.Equal(t, []string{"d/f"}, r.Mapped)
	for _, c := range []struct {
		moment   int
		loss     powercut.Loss
		expected map[string]string
	}{
		{0, powercut.Nothing, map[string]string{}},
		{3, powercut.Nothing, map[string]string{"/d/f": "aaaa"}},
		{10, powercut.Everything, map[string]string{}},                           // the directory's own name is not safe
		{16, powercut.Everything, map[string]string{"/d/f": "aaaa", "/d/g": ""}}, // what was written during a sync is not
		{16, powercut.Nothing, map[string]string{"/d/f": "aabb", "/d/g": "13"}},
		{19, powercut.Everything, map[string]string{"/d/f": "aaaa", "/d/g": ""}},
		{19, powercut.Nothing, map[string]string{"/d/f": "aabb", "/d/h": "13"}},
	} {
		require.Equal(t, c.expected, cut(t, r, c.moment, c.loss), "%d %v", c.moment, c.loss)
	}
}

// TestLie: the syncs of a lying disk do nothing.
func TestLie(t *testing.T) {
	r := load(t)
	d, dir := r.Disk(), t.TempDir()
	d.Lie(func(name string) bool { return name == "d/f" })
	require.NoError(t, d.Advance(r.Moments()))
	require.NoError(t, d.Cut(dir, powercut.Everything, rand.New(rand.NewPCG(1, 2))))
	st, err := os.Stat(filepath.Join(dir, "d", "f"))
	require.NoError(t, err)
	require.Zero(t, st.Size())
}

// TestRecord records a real program, if that is possible here.
func TestRecord(t *testing.T) {
	if err := powercut.Available(); err != nil {
		t.Skip("NOTHING IS RECORDED: ", err)
	}
	root := t.TempDir()
	file := filepath.Join(t.TempDir(), "trace")
	require.NoError(t, powercut.Record(file, t.Output(), nil, "sh", "-c", `mkdir $0/a && echo one > $0/a/x && mv $0/a/x $0/a/y && echo done`, root))
	r, err := powercut.Load(file, root)
	require.NoError(t, err)
	require.Len(t, r.Said, 1)
	require.Equal(t, "done\n", r.Said[0].Text)
	require.Equal(t, map[string]string{"/a/y": "one\n"}, cut(t, r, r.Moments(), powercut.Nothing))
	require.Empty(t, cut(t, r, r.Moments(), powercut.Everything))
}
