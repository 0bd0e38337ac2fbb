package outbox_test

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/stretchr/testify/require"

	"outlog/outbox"
	"outlog/store"
)

func open(t testing.TB, o store.Options) (*store.DB, *outbox.Log) {
	if o.Path == "" {
		o.Path = filepath.Join(t.TempDir(), "outlog.db")
	}
	db, err := store.Open(t.Context(), o)
	require.NoError(t, err)
	log, err := outbox.Open(t.Context(), db)
	require.NoError(t, err)
	t.Cleanup(func() {
		results, err := db.Verify(context.Background())
		require.NoError(t, err)
		for _, r := range results {
			require.True(t, r.OK, "%s: %s", r.Name, r.Detail)
		}
		require.NoError(t, db.Close())
	})
	return db, log
}

func event(id string) outbox.Event {
	return outbox.Event{AggregateType: "order", AggregateID: id, Type: "Placed", Data: map[string]int{"n": 1}}
}

// add appends in a transaction of its own.
func add(t testing.TB, db *store.DB, log *outbox.Log, events ...outbox.Event) (out []outbox.Appended, err error) {
	err = db.Update(t.Context(), func(tx *store.Tx) (err error) {
		out, err = log.Append(t.Context(), tx, events...)
		return err
	})
	return out, err
}

func exec(t testing.TB, db *store.DB, query string, args ...any) error {
	return db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), query, args...)
		return err
	})
}

func TestAppendAndRead(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 678901000, time.FixedZone("Asia/Kolkata", 19800))
	db, log := open(t, store.Options{Now: func() time.Time { return now }})
	e := outbox.Event{AggregateType: "order", AggregateID: "o 1.*>é", Type: "Placed", SchemaVersion: 3, ContentType: "text/plain",
		Payload: []byte("not json \x00\xff"), Headers: map[string]string{"traceparent": "00-é-01", "a": "b\r\nc"}}
	out, err := add(t, db, log, event("x"), e, event("x"))
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2, 3}, []int64{out[0].Position, out[1].Position, out[2].Position})
	require.Equal(t, []int64{1, 1, 2}, []int64{out[0].Version, out[1].Version, out[2].Version})

	rows, err := log.Read(t.Context(), 1, outbox.Page{Rows: 1})
	require.NoError(t, err)
	require.Len(t, rows, 1)
	got := rows[0]
	require.Equal(t, outbox.Record{Position: 2, EventID: out[1].ID, AggregateType: "order", AggregateID: "o 1.*>é", AggregateVersion: 1,
		Type: "Placed", SchemaVersion: 3, ContentType: "text/plain", Payload: e.Payload, RawHeaders: got.RawHeaders, CreatedAt: now.UTC()}, got)
	headers, err := got.Headers()
	require.NoError(t, err)
	require.Equal(t, e.Headers, headers)

	chain, err := log.Aggregate(t.Context(), outbox.Aggregate{Type: "order", ID: "x"})
	require.NoError(t, err)
	require.Equal(t, []int64{1, 3}, []int64{chain[0].Position, chain[1].Position})
	require.Equal(t, int64(1), chain[1].Previous)
	one, err := log.Get(t.Context(), out[2].ID)
	require.NoError(t, err)
	require.Equal(t, chain[1], one)
	_, err = log.Get(t.Context(), "nothing")
	require.ErrorIs(t, err, outbox.ErrNotFound)
	head, err := log.Head(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(3), head)
}

func TestReadPages(t *testing.T) {
	db, log := open(t, store.Options{})
	for i := range 10 {
		_, err := add(t, db, log, outbox.Event{AggregateType: "a", AggregateID: fmt.Sprint(i), Type: "T", ContentType: "x", Payload: make([]byte, 100)})
		require.NoError(t, err)
	}
	for _, tc := range []struct {
		after int64
		page  outbox.Page
		want  []int64
	}{
		{0, outbox.Page{Rows: 2}, []int64{1, 2}},
		{8, outbox.Page{}, []int64{9, 10}},
		{10, outbox.Page{Rows: 5}, nil},
		{3, outbox.Page{Through: 5}, []int64{4, 5}},
		{0, outbox.Page{Bytes: 250}, []int64{1, 2, 3}},
		{0, outbox.Page{Bytes: 1}, []int64{1}},
	} {
		rows, err := log.Read(t.Context(), tc.after, tc.page)
		require.NoError(t, err)
		var got []int64
		for _, r := range rows {
			got = append(got, r.Position)
		}
		require.Equal(t, tc.want, got, "%+v", tc)
	}
}

// TestAppendRefuses checks each limit from both sides. A refused event leaves
// the caller's transaction usable.
func TestAppendRefuses(t *testing.T) {
	long := func(n int) string { return strings.Repeat("x", n) }
	for _, tc := range []struct {
		name  string
		field string // "" means accepted
		edit  func(*outbox.Event)
	}{
		{"plain", "", func(*outbox.Event) {}},
		{"no aggregate type", "AggregateType", func(e *outbox.Event) { e.AggregateType = "" }},
		{"no aggregate id", "AggregateID", func(e *outbox.Event) { e.AggregateID = "" }},
		{"no type", "Type", func(e *outbox.Event) { e.Type = "" }},
		{"longest type", "", func(e *outbox.Event) { e.Type = long(outbox.MaxNameBytes) }},
		{"long type", "Type", func(e *outbox.Event) { e.Type = long(outbox.MaxNameBytes + 1) }},
		{"longest id", "", func(e *outbox.Event) { e.AggregateID = long(outbox.MaxAggregateIDBytes) }},
		{"long id", "AggregateID", func(e *outbox.Event) { e.AggregateID = long(outbox.MaxAggregateIDBytes + 1) }},
		{"5000 characters", "AggregateID", func(e *outbox.Event) { e.AggregateID = long(5000) }},
		{"subject characters", "", func(e *outbox.Event) { e.Type, e.AggregateType = "a.b *>", "🎈" }},
		{"NUL", "AggregateID", func(e *outbox.Event) { e.AggregateID = "a\x00b" }},
		{"CR/LF", "Type", func(e *outbox.Event) { e.Type = "a\r\nb" }},
		{"not UTF-8", "AggregateID", func(e *outbox.Event) { e.AggregateID = "\xff" }},
		{"negative version", "Version", func(e *outbox.Event) { e.Version = -1 }},
		{"negative schema version", "SchemaVersion", func(e *outbox.Event) { e.SchemaVersion = -1 }},
		{"not a ULID", "ID", func(e *outbox.Event) { e.ID = "123" }},
		{"id of tomorrow", "ID", func(e *outbox.Event) {
			e.ID = ulid.MustNew(ulid.Timestamp(time.Now().Add(24*time.Hour)), ulid.DefaultEntropy()).String()
		}},
		{"invalid JSON", "Payload", func(e *outbox.Event) { e.Payload = []byte(`{"a":`) }},
		{"invalid +json", "Payload", func(e *outbox.Event) { e.Payload, e.ContentType = []byte(`x`), "application/vnd.a+json; charset=utf-8" }},
		{"other content", "", func(e *outbox.Event) { e.Payload, e.ContentType = []byte(`x`), "text/plain" }},
		{"cannot be marshalled", "Data", func(e *outbox.Event) { e.Data = func() {} }},
		{"empty payload", "", func(e *outbox.Event) { e.Data, e.ContentType = nil, "text/plain" }},
		{"largest", "", func(e *outbox.Event) { e.Payload, e.ContentType = make([]byte, outbox.MaxEventBytes-2), "b" }},
		{"too large", "Payload", func(e *outbox.Event) { e.Payload, e.ContentType = make([]byte, outbox.MaxEventBytes-1), "b" }},
		{"headers count", "Payload", func(e *outbox.Event) {
			e.Payload, e.ContentType, e.Headers = make([]byte, outbox.MaxEventBytes-2), "b", map[string]string{"a": "b"}
		}},
		{"large headers", "Headers", func(e *outbox.Event) { e.Headers = map[string]string{"a": long(outbox.MaxHeaderBytes)} }},
		{"header without name", "Headers", func(e *outbox.Event) { e.Headers = map[string]string{"": "x"} }},
		{"header not UTF-8", "Headers", func(e *outbox.Event) { e.Headers = map[string]string{"a": "\xff"} }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			db, log := open(t, store.Options{Synchronous: "NORMAL"})
			e := event("1")
			tc.edit(&e)
			require.NoError(t, db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := log.Append(t.Context(), tx, e)
				if tc.field == "" {
					require.NoError(t, err)
				} else {
					var invalid *outbox.InvalidEventError
					require.ErrorAs(t, err, &invalid)
					require.ErrorIs(t, err, outbox.ErrInvalidEvent)
					require.Equal(t, tc.field, invalid.Field)
					require.Less(t, len(err.Error()), 400)
				}
				_, err = log.Append(t.Context(), tx, event("2"))
				return err
			}))
			rows, err := log.Read(t.Context(), 0, outbox.Page{})
			require.NoError(t, err)
			require.Equal(t, "2", rows[len(rows)-1].AggregateID)
			require.Equal(t, tc.field == "", len(rows) == 2)
		})
	}
}

func TestAppendSameID(t *testing.T) {
	db, log := open(t, store.Options{})
	a, b := event("1"), event("2")
	a.ID, b.ID = db.NewID(), db.NewID()
	second, err := add(t, db, log, b) // in any order of time
	require.NoError(t, err)
	first, err := add(t, db, log, a)
	require.NoError(t, err)
	for range 2 {
		again, err := add(t, db, log, a, b)
		require.NoError(t, err)
		require.Equal(t, []outbox.Appended{first[0], second[0]}, again)
	}
	lower := a
	lower.ID = strings.ToLower(a.ID)
	again, err := add(t, db, log, lower)
	require.NoError(t, err)
	require.Equal(t, first, again)
	for name, edit := range map[string]func(*outbox.Event){
		"payload": func(e *outbox.Event) { e.Payload = []byte(`{"n":2}`) },
		"type":    func(e *outbox.Event) { e.Type = "Other" },
		"headers": func(e *outbox.Event) { e.Headers = map[string]string{"a": "b"} },
		"id":      func(e *outbox.Event) { e.AggregateID = "3" },
		"version": func(e *outbox.Event) { e.Version = 9 },
	} {
		other := a
		edit(&other)
		_, err := add(t, db, log, other)
		require.ErrorIs(t, err, outbox.ErrEventConflict, name)
	}
	rows, err := log.Read(t.Context(), 0, outbox.Page{})
	require.NoError(t, err)
	require.Len(t, rows, 2)
}

// prune removes the log's first events.
func prune(t testing.TB, db *store.DB, log *outbox.Log, through int64) {
	t.Helper()
	require.NoError(t, tryPrune(t, db, log, through, outbox.Needs{}))
}

func tryPrune(t testing.TB, db *store.DB, log *outbox.Log, through int64, n outbox.Needs) error {
	t.Helper()
	events, err := log.Extents(t.Context(), 0, int(through))
	require.NoError(t, err)
	for len(events) > 0 && events[len(events)-1].Position > through {
		events = events[:len(events)-1]
	}
	return db.Update(t.Context(), func(tx *store.Tx) error { return log.Prune(t.Context(), tx, events, n) })
}

func TestAppendTooOld(t *testing.T) {
	db, log := open(t, store.Options{})
	old := event("1")
	old.ID = db.NewID()
	_, err := add(t, db, log, old)
	require.NoError(t, err)
	prune(t, db, log, 1)
	_, err = add(t, db, log, old)
	require.ErrorIs(t, err, outbox.ErrEventTooOld)
}

func TestVersionsOutlivePruning(t *testing.T) {
	db, log := open(t, store.Options{})
	_, err := add(t, db, log, event("1"), event("1"))
	require.NoError(t, err)
	prune(t, db, log, 2)
	e := event("1")
	e.Version = 1
	_, err = add(t, db, log, e)
	require.ErrorIs(t, err, outbox.ErrVersionConflict)
	e.Version = 3
	out, err := add(t, db, log, e)
	require.NoError(t, err)
	require.Equal(t, int64(3), out[0].Version)
	chain, err := log.Aggregate(t.Context(), outbox.Aggregate{Type: "order", ID: "1"})
	require.NoError(t, err)
	require.Len(t, chain, 1)
}

// TestSequenceOutlivesPruning prunes everything and loses SQLite's own
// sequence, as a copy of the tables into a new file does.
func TestSequenceOutlivesPruning(t *testing.T) {
	for name, lose := range map[string]string{"row gone": `DELETE FROM sqlite_sequence`, "set back": `UPDATE sqlite_sequence SET seq = 1`, "kept": `SELECT 1`} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "outlog.db")
			db, err := store.Open(t.Context(), store.Options{Path: path})
			require.NoError(t, err)
			log, err := outbox.Open(t.Context(), db)
			require.NoError(t, err)
			_, err = add(t, db, log, event("1"), event("2"), event("3"))
			require.NoError(t, err)
			prune(t, db, log, 3)
			require.NoError(t, exec(t, db, lose))
			require.NoError(t, db.Close())

			db, log = open(t, store.Options{Path: path})
			out, err := add(t, db, log, event("4"))
			require.NoError(t, err)
			require.Equal(t, int64(4), out[0].Position)
		})
	}
}

// TestGuards tries to break the log with plain SQL, as another program might.
func TestGuards(t *testing.T) {
	insert := func(cols, vals string) string {
		return `INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, previous_position, type, payload, created_at` + cols + `) VALUES ` + vals
	}
	id := func(c string) string { return "'" + strings.Repeat(c, 26) + "'" }
	for name, query := range map[string]string{
		"update":            `UPDATE outbox SET type = 'X'`,
		"update position":   `UPDATE outbox SET position = 99 WHERE position = 2`,
		"delete":            `DELETE FROM outbox WHERE position = 2`,
		"version gap":       insert("", `(`+id("A")+`, 'order', '1', 3, 1, 'T', x'', 0)`),
		"version again":     insert("", `(`+id("A")+`, 'order', '1', 1, 0, 'T', x'', 0)`),
		"wrong previous":    insert("", `(`+id("A")+`, 'order', '1', 2, 2, 'T', x'', 0)`),
		"first is not 1":    insert("", `(`+id("A")+`, 'order', 'new', 2, 0, 'T', x'', 0)`),
		"same id":           insert("", `((SELECT event_id FROM outbox LIMIT 1), 'order', 'new', 1, 0, 'T', x'', 0)`),
		"same id, replace":  strings.Replace(insert("", `((SELECT event_id FROM outbox LIMIT 1), 'order', 'new', 1, 0, 'T', x'', 0)`), "INSERT", "INSERT OR REPLACE", 1),
		"same position":     strings.Replace(insert(", position", `(`+id("A")+`, 'order', 'new', 1, 0, 'T', x'', 0, 2)`), "INSERT", "INSERT OR REPLACE", 1),
		"low position":      insert(", position", `(`+id("A")+`, 'order', 'new', 1, 0, 'T', x'', 0, 1)`),
		"zero position":     insert(", position", `(`+id("A")+`, 'order', 'new', 1, 0, 'T', x'', 0, 0)`),
		"negative position": insert(", position", `(`+id("A")+`, 'order', 'new', 1, 0, 'T', x'', 0, -5)`),
		"far position":      insert(", position", `(`+id("A")+`, 'order', 'new', 1, 0, 'T', x'', 0, 9223372036854775807)`),
		"falling positions": insert(", position", `(`+id("A")+`, 'order', 'new', 1, 0, 'T', x'', 0, 20), (`+id("B")+`, 'order', 'newer', 1, 0, 'T', x'', 0, 10)`),
		"short id":          insert("", `('A', 'order', 'new', 1, 0, 'T', x'', 0)`),
		"empty type":        insert("", `(`+id("A")+`, 'order', 'new', 1, 0, '', x'', 0)`),
		"text where int":    insert("", `(`+id("A")+`, 'order', 'new', 'one', 0, 'T', x'', 0)`),
		"view, empty":       `INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload) VALUES ('order', '', 'T', '{}')`,
		"view, same id":     `INSERT INTO outbox_append (event_id, aggregate_type, aggregate_id, type, payload) VALUES ((SELECT event_id FROM outbox LIMIT 1), 'order', 'n', 'T', '{}')`,
	} {
		t.Run(name, func(t *testing.T) {
			db, log := open(t, store.Options{Synchronous: "NORMAL"})
			_, err := add(t, db, log, event("1"), event("2"))
			require.NoError(t, err)
			before, err := log.Read(t.Context(), 0, outbox.Page{})
			require.NoError(t, err)
			err = exec(t, db, query)
			require.Error(t, err)
			require.True(t, store.IsConstraint(err), "%v", err)
			after, err := log.Read(t.Context(), 0, outbox.Page{})
			require.NoError(t, err)
			require.Equal(t, before, after)
		})
	}
}

// TestAppendByPlainSQL appends through the view, as another program does.
func TestAppendByPlainSQL(t *testing.T) {
	db, log := open(t, store.Options{})
	_, err := add(t, db, log, event("1"))
	require.NoError(t, err)
	before := time.Now()
	require.NoError(t, exec(t, db, `INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload)
		VALUES ('order', '1', 'Shipped', '{"by":"sql"}'), ('order', '2', 'Placed', '{}'), ('order', '1', 'Paid', '{}')`))
	rows, err := log.Read(t.Context(), 1, outbox.Page{})
	require.NoError(t, err)
	require.Len(t, rows, 3)
	require.Equal(t, []int64{2, 1, 3}, []int64{rows[0].AggregateVersion, rows[1].AggregateVersion, rows[2].AggregateVersion})
	require.Equal(t, `{"by":"sql"}`, string(rows[0].Payload))
	ids := map[string]bool{}
	for _, r := range rows {
		id, err := ulid.ParseStrict(r.EventID)
		require.NoError(t, err)
		require.WithinDuration(t, before, ulid.Time(id.Time()), 10*time.Second)
		require.WithinDuration(t, before, r.CreatedAt, 10*time.Second)
		ids[r.EventID] = true
	}
	require.Len(t, ids, 3)
}

func TestStatusView(t *testing.T) {
	db, log := open(t, store.Options{})
	for i := range 6 {
		_, err := add(t, db, log, event(fmt.Sprint(i)))
		require.NoError(t, err)
	}
	require.NoError(t, exec(t, db, `INSERT INTO outlog_publications VALUES (1, 2, 11, 12, 100), (4, 5, 13, 14, 200)`))
	require.NoError(t, exec(t, db, `UPDATE outlog_relay SET position = 5, stream_seq = 14`))
	require.NoError(t, exec(t, db, `INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at)
		SELECT 'relay', event_id, position, aggregate_type, aggregate_id, 'dead', 0 FROM outbox WHERE position = 3`))
	rows, err := db.Reader().Query(`SELECT position || ' ' || state || ' ' || coalesce(stream_seq, '-') || ' ' || coalesce(published_at, '-') FROM outbox_status ORDER BY position`)
	require.NoError(t, err)
	defer rows.Close()
	var got []string
	for rows.Next() {
		var s string
		require.NoError(t, rows.Scan(&s))
		got = append(got, s)
	}
	require.Equal(t, []string{"1 published 11 100", "2 published 12 100", "3 dead - -", "4 published 13 200", "5 published 14 200", "6 pending - -"}, got)
}

func TestCheckFindsRemovedEvents(t *testing.T) {
	for position, want := range map[int]string{1: "position 2", 2: "position 4", 4: "position 4", 3: "position 3"} {
		t.Run(fmt.Sprint(position), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "outlog.db")
			db, err := store.Open(t.Context(), store.Options{Path: path})
			require.NoError(t, err)
			defer db.Close()
			log, err := outbox.Open(t.Context(), db)
			require.NoError(t, err)
			_, err = add(t, db, log, event("1"), event("1"), event("2"), event("1"))
			require.NoError(t, err)
			require.NoError(t, exec(t, db, `DROP TRIGGER outbox_no_delete`))
			require.NoError(t, exec(t, db, `DELETE FROM outbox WHERE position = ?`, position))
			results, err := db.Verify(t.Context())
			require.NoError(t, err)
			r := results[len(results)-1]
			require.Equal(t, "contiguous versions", r.Name)
			require.False(t, r.OK)
			require.Contains(t, r.Detail, want)
		})
	}
}

// TestCorruptHeadersHarmOnlyTheirReader: a row that another program damaged is
// still read.
func TestCorruptHeadersHarmOnlyTheirReader(t *testing.T) {
	db, log := open(t, store.Options{})
	require.NoError(t, exec(t, db, `INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload, headers) VALUES ('a', '1', 'T', '{}', '{broken')`))
	rows, err := log.Read(t.Context(), 0, outbox.Page{})
	require.NoError(t, err)
	_, err = rows[0].Headers()
	var syntax *json.SyntaxError
	require.ErrorAs(t, err, &syntax)
}
