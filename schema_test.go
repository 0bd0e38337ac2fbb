package main

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite" // driver "sqlite", for a file that no code of ours has touched

	"outlog/examples/orders"
	"outlog/internal/admin"
	"outlog/outbox"
	"outlog/store"
)

// migrated opens a fresh database through the migrations.
func migrated(t *testing.T) *store.DB {
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "migrated.db"),
		Synchronous: "NORMAL", Migrations: []store.Migrations{orders.Migrations()}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

// TestSchemaFile proves that schema.sql is what the migrations make.
func TestSchemaFile(t *testing.T) {
	want := schemaOf(t, migrated(t).Reader())

	text, err := os.ReadFile("schema.sql")
	require.NoError(t, err)
	plain, err := sql.Open("sqlite", filepath.Join(t.TempDir(), "plain.db"))
	require.NoError(t, err)
	defer plain.Close()
	_, err = plain.Exec(string(text))
	require.NoError(t, err)
	got := schemaOf(t, plain)

	for name, stmt := range want {
		require.Equal(t, stmt, got[name], "schema.sql lacks %s, or has it differently", name)
	}
	for name := range got {
		require.Contains(t, want, name, "schema.sql has it, the migrations do not")
	}
}

// schemaOf maps each object of a database, and each initial row, to its text.
func schemaOf(t *testing.T, db *sql.DB) map[string]string {
	schema := map[string]string{}
	add := func(query string) {
		rows, err := db.QueryContext(t.Context(), query)
		require.NoError(t, err)
		defer rows.Close()
		for rows.Next() {
			var name, text string
			require.NoError(t, rows.Scan(&name, &text))
			schema[name] = normalSQL(text)
		}
		require.NoError(t, rows.Err())
	}
	add(`SELECT type || ' ' || name, sql FROM sqlite_schema
	      WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite\_%' ESCAPE '\' AND tbl_name NOT LIKE '%\_migrations' ESCAPE '\'`)
	add(`SELECT 'row of outlog_meta', id || ' ' || length(log_id) || ' ' || pruned_through FROM outlog_meta`)
	add(`SELECT 'row of outlog_relay ' || name, position || ' ' || event_id || stream || stream_seq || ' ' || token FROM outlog_relay`)
	return schema
}

// normalSQL drops comments and folds white space outside quotes, so that only
// what SQLite acts on is compared.
func normalSQL(text string) string {
	var b strings.Builder
	space := false
	for i := 0; i < len(text); {
		rest := text[i:]
		n := 1
		switch c := text[i]; {
		case strings.HasPrefix(rest, "--"):
			n, space = lengthThrough(rest, "\n"), true
		case strings.HasPrefix(rest, "/*"):
			n, space = lengthThrough(rest, "*/"), true
		case strings.ContainsRune(" \t\r\n", rune(c)):
			space = true
		case c == '\'' || c == '"':
			n = 1 + lengthThrough(rest[1:], string(c))
			fallthrough
		default:
			last := strings.TrimSuffix(b.String(), " ")
			if space && last != "" && !strings.HasSuffix(last, "(") && !strings.ContainsRune("(),;", rune(c)) {
				b.WriteByte(' ')
			}
			b.WriteString(rest[:n])
			space = c == ','
		}
		i += n
	}
	return b.String()
}

// lengthThrough is the length of s up to and including the first end.
func lengthThrough(s, end string) int {
	if i := strings.Index(s, end); i >= 0 {
		return i + len(end)
	}
	return len(s)
}

func TestNormalSQL(t *testing.T) {
	require.Equal(t, `a(b TEXT DEFAULT ' -- x  ''y''', c)`, normalSQL("a(\n  b  TEXT DEFAULT ' -- x  ''y''', -- why\n/* c2 */ c )"))
	require.NotEqual(t, normalSQL("a INTEGER"), normalSQL("aINTEGER"))
}

// planned is a Querier that notes the plan of every query it runs.
type planned struct {
	t  *testing.T
	db *sql.DB

	plan []string
}

func (p *planned) explain(ctx context.Context, query string, args []any) {
	rows, err := p.db.QueryContext(ctx, "EXPLAIN QUERY PLAN "+query, args...)
	require.NoError(p.t, err)
	defer rows.Close()
	for rows.Next() {
		var id, parent, unused int
		var detail string
		require.NoError(p.t, rows.Scan(&id, &parent, &unused, &detail))
		p.plan = append(p.plan, detail)
	}
	require.NoError(p.t, rows.Err())
}

func (p *planned) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	p.explain(ctx, query, args)
	return p.db.QueryContext(ctx, query, args...)
}

func (p *planned) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	p.explain(ctx, query, args)
	return p.db.QueryRowContext(ctx, query, args...)
}

// TestQueryPlans pins how the log is read: it explains the very statements that
// the code runs.
func TestQueryPlans(t *testing.T) {
	db := migrated(t)
	t.Run("the oldest pending event is the first row after the cursor", func(t *testing.T) {
		p := &planned{t: t, db: db.Reader()}
		_, err := admin.OldestPending(t.Context(), p, 10, db.Now())
		require.NoError(t, err)
		require.Equal(t, []string{"SEARCH outbox USING INTEGER PRIMARY KEY (rowid>?)"}, p.plan)
	})
	t.Run("a history is one look-up by primary key per event", func(t *testing.T) {
		p := &planned{t: t, db: db.Reader()}
		_, err := outbox.AggregateFrom(t.Context(), p, outbox.Aggregate{Type: "order", ID: "1"})
		require.NoError(t, err)
		text := fmt.Sprint(p.plan)
		require.Contains(t, text, "SEARCH outlog_aggregates USING PRIMARY KEY (aggregate_type=? AND aggregate_id=?)")
		require.Contains(t, text, "SEARCH o USING INTEGER PRIMARY KEY (rowid=?)")
		require.Contains(t, text, "SEARCH outbox USING INTEGER PRIMARY KEY (rowid=?)")
		require.NotContains(t, text, "SCAN o")
	})
}
