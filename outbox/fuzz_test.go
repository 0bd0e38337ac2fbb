package outbox_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/outbox"
	"outlog/store"
)

// FuzzAppend: any event is refused with a typed error, or stored and read back
// byte for byte; and the log is intact either way.
//
//	go test ./outbox -run - -fuzz FuzzAppend -fuzztime 20s
func FuzzAppend(f *testing.F) {
	f.Add("order", "1", "Placed", "application/json", []byte(`{"a":1}`), "k", "v", int64(0), 1)
	f.Add("", "a\x00b", "x\r\ny", "text/plain", []byte{0xff, 0}, "", "\xff", int64(-1), -5)
	f.Add("a.b *>", "🎈 é", "%", "application/x+json;q=1", []byte(`nope`), "CE-ID", "ü\r\n", int64(1), 1_000_001)
	f.Add("order", "1", "P", "x", []byte(nil), "a", "b", int64(1<<62), 0)
	db, err := store.Open(f.Context(), store.Options{Path: filepath.Join(f.TempDir(), "outlog.db"), Synchronous: "NORMAL"})
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, db.Close()) })
	log, err := outbox.Open(f.Context(), db)
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, aggregateType, aggregateID, typ, contentType string, payload []byte, name, value string, version int64, schema int) {
		e := outbox.Event{AggregateType: aggregateType, AggregateID: aggregateID, Type: typ, ContentType: contentType, Payload: payload,
			Headers: map[string]string{name: value}, Version: version, SchemaVersion: schema}
		before, err := log.Head(t.Context())
		require.NoError(t, err)
		out, err := add(t, db, log, e)
		after, herr := log.Head(t.Context())
		require.NoError(t, herr)
		if err != nil {
			if !errors.Is(err, outbox.ErrInvalidEvent) && !errors.Is(err, outbox.ErrVersionConflict) {
				t.Fatalf("untyped error: %v", err)
			}
			require.Equal(t, before, after, "a refused event must leave nothing")
			return
		}
		r, err := log.Get(t.Context(), out[0].ID)
		require.NoError(t, err)
		require.Equal(t, []any{aggregateType, aggregateID, typ, string(payload)}, []any{r.AggregateType, r.AggregateID, r.Type, string(r.Payload)})
		headers, err := r.Headers()
		require.NoError(t, err)
		require.Equal(t, e.Headers, headers)
		chain, err := log.Aggregate(t.Context(), r.Aggregate())
		require.NoError(t, err)
		require.Equal(t, out[0].Version, int64(len(chain)))
	})
}
