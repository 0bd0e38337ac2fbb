package archive_test

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"
	"github.com/stretchr/testify/require"

	"outlog/internal/archive"
	"outlog/outbox"
)

const logID = "0123456789abcdef"

func records(first, n int) []outbox.Record {
	out := make([]outbox.Record, n)
	for i := range out {
		p := int64(first + i)
		out[i] = outbox.Record{
			Position: p, EventID: fmt.Sprintf("%026d", p), AggregateType: "order", AggregateID: fmt.Sprint("o", p), AggregateVersion: 2,
			Previous: p - 1, Type: "Placed", SchemaVersion: 3, ContentType: "application/json", RawHeaders: `{"a":"ä"}`,
			CreatedAt: time.UnixMicro(1_700_000_000_000_000 + p).UTC(), Payload: []byte(`{"n": 1, "s": "</x>\u2028"}`),
		}
	}
	return out
}

func open(t *testing.T, path string, f archive.Format) *archive.Dir {
	d, err := archive.Open(path, logID, f)
	require.NoError(t, err)
	return d
}

func write(t *testing.T, d *archive.Dir, rs ...outbox.Record) archive.File {
	t.Helper()
	w, err := d.Create()
	require.NoError(t, err)
	for len(rs) > 0 {
		n := min(len(rs), 7000)
		require.NoError(t, w.Add(rs[:n]))
		rs = rs[n:]
	}
	f, err := w.Commit()
	require.NoError(t, err)
	return f
}

func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestEventsComeBackAsTheyWere(t *testing.T) {
	for _, f := range []archive.Format{archive.NDJSON, archive.Parquet} {
		t.Run(string(f), func(t *testing.T) {
			want := records(5, 25_000)
			want[1].Payload, want[1].ContentType = []byte{0, 0xff, '\n', 1}, "application/octet-stream"
			want[2].Payload = []byte{}
			want[3].AggregateID = "not \xff text" // of another program
			want[3].RawHeaders = "{damaged"
			file := write(t, open(t, t.TempDir(), f), want...)
			require.Equal(t, int64(5), file.First)
			require.Equal(t, int64(25_004), file.Last)
			var got []outbox.Record
			require.NoError(t, archive.Read(file.Path, func(r outbox.Record) error { got = append(got, r); return nil }))
			require.Len(t, got, len(want))
			for i := range got {
				if len(want[i].Payload) == 0 {
					require.Empty(t, got[i].Payload)
					got[i].Payload = want[i].Payload
				}
				require.Equal(t, want[i], got[i])
			}
		})
	}
}

// TestOtherToolsReadNDJSON reads a file with nothing of ours.
func TestOtherToolsReadNDJSON(t *testing.T) {
	rs := records(1, 3)
	rs[2].Payload = []byte{0xff}
	file := write(t, open(t, t.TempDir(), archive.NDJSON), rs...)
	require.True(t, strings.HasSuffix(file.Path, "/outlog-0123456789abcdef-0000000000000000001-0000000000000000003.ndjson.zst"), file.Path)
	f, err := os.Open(file.Path)
	require.NoError(t, err)
	defer f.Close()
	z, err := zstd.NewReader(f)
	require.NoError(t, err)
	defer z.Close()
	var lines []map[string]any
	for in := bufio.NewScanner(z); in.Scan(); {
		var m map[string]any
		require.NoError(t, json.Unmarshal(in.Bytes(), &m))
		lines = append(lines, m)
	}
	require.Len(t, lines, 3)
	require.Equal(t, map[string]any{
		"position": 1.0, "event_id": "00000000000000000000000001", "aggregate_type": "order", "aggregate_id": "o1", "aggregate_version": 2.0,
		"previous_position": 0.0, "type": "Placed", "schema_version": 3.0, "content_type": "application/json", "headers": `{"a":"ä"}`,
		"created_at": "2023-11-14T22:13:20.000001Z", "payload": string(rs[0].Payload),
	}, lines[0])
	require.Equal(t, base64.StdEncoding.EncodeToString([]byte{0xff}), lines[2]["payload_base64"])
	require.NotContains(t, lines[2], "payload")
}

// TestOtherToolsReadParquet reads a file by the schema that is in it.
func TestOtherToolsReadParquet(t *testing.T) {
	file := write(t, open(t, t.TempDir(), archive.Parquet), records(1, 3)...)
	f, err := os.Open(file.Path)
	require.NoError(t, err)
	defer f.Close()
	st, err := f.Stat()
	require.NoError(t, err)
	p, err := parquet.OpenFile(f, st.Size())
	require.NoError(t, err)
	types := map[string]string{}
	for _, field := range p.Schema().Fields() {
		require.True(t, field.Required() && field.Leaf(), field.Name())
		types[field.Name()] = field.Type().String()
	}
	require.Equal(t, map[string]string{
		"position": "INT(64,true)", "aggregate_version": "INT(64,true)", "previous_position": "INT(64,true)", "schema_version": "INT(64,true)",
		"event_id": "STRING", "aggregate_type": "STRING", "aggregate_id": "STRING", "type": "STRING", "content_type": "STRING", "headers": "STRING",
		"created_at": "TIMESTAMP(isAdjustedToUTC=true,unit=MICROS)", "payload": "BYTE_ARRAY",
	}, types)
	in := parquet.NewGenericReader[map[string]any](f, p.Schema())
	defer in.Close()
	rows := []map[string]any{{}, {}, {}}
	n, err := in.Read(rows)
	if err != io.EOF {
		require.NoError(t, err)
	}
	require.Equal(t, 3, n)
	require.EqualValues(t, 2, rows[1]["position"])
	require.EqualValues(t, "o2", rows[1]["aggregate_id"])
}

func TestFilesArePrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "archive")
	file := write(t, open(t, dir, archive.NDJSON), records(1, 1)...)
	for path, mode := range map[string]os.FileMode{dir: 0o700, file.Path: 0o600} {
		st, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, mode, st.Mode().Perm(), path)
	}
}

// TestNeverHalfAFile: one that cannot be written to its end leaves nothing, at
// whatever byte it fails, and says so with its cause.
func TestNeverHalfAFile(t *testing.T) {
	for _, f := range []archive.Format{archive.NDJSON, archive.Parquet} {
		for _, after := range []int{0, 3, 100, 5000} {
			dir := t.TempDir()
			d := open(t, dir, f)
			d.FailAfter(after, syscall.ENOSPC)
			w, err := d.Create()
			if err == nil {
				_ = w.Add(records(1, 30_000))
				_, err = w.Commit()
			}
			require.ErrorIs(t, err, archive.ErrNotStored, "%s after %d bytes", f, after)
			require.ErrorIs(t, err, syscall.ENOSPC)
			require.Empty(t, list(t, dir), "%s after %d bytes", f, after)
		}
	}
}

func TestAbortLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	w, err := open(t, dir, archive.NDJSON).Create()
	require.NoError(t, err)
	require.NoError(t, w.Add(records(1, 10)))
	require.NoError(t, w.Abort())
	require.Empty(t, list(t, dir))
	w, err = open(t, dir, archive.NDJSON).Create()
	require.NoError(t, err)
	_, err = w.Commit()
	require.ErrorIs(t, err, archive.ErrNotStored, "an archive of nothing")
	require.Empty(t, list(t, dir))
}

func TestCovers(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, archive.NDJSON)
	write(t, d, records(1, 10)...)
	write(t, open(t, dir, archive.Parquet), records(5, 10)...)
	other, err := archive.Open(dir, "another", archive.NDJSON)
	require.NoError(t, err)
	write(t, other, records(1, 100)...)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "README"), nil, 0o600))
	for position, last := range map[int64]int64{1: 10, 4: 10, 5: 14, 14: 14, 15: 0, 50: 0} {
		f, ok, err := d.Covers(position)
		require.NoError(t, err)
		require.Equal(t, last != 0, ok)
		require.Equal(t, last, f.Last, "position %d", position)
	}
	_, err = archive.Open(dir, logID, "csv")
	require.ErrorIs(t, err, archive.ErrFormat)
}
