package admin_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/internal/admin"
	"outlog/outbox"
	"outlog/store"
)

// TestReadStatus puts cursors at known places and reads what is behind them.
func TestReadStatus(t *testing.T) {
	ctx := t.Context()
	clock := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	db, err := store.Open(ctx, store.Options{Path: filepath.Join(t.TempDir(), "outlog.db"), Synchronous: "NORMAL",
		Now: func() time.Time { return clock }})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	log, err := outbox.Open(ctx, db)
	require.NoError(t, err)

	s, err := admin.ReadStatus(ctx, db)
	require.NoError(t, err)
	require.Equal(t, admin.Status{LogID: log.ID(), Consumers: []admin.Consumer{}}, s)

	for _, eventType := range []string{"Created", "Created", "Renamed", "Created", "Renamed"} {
		require.NoError(t, db.Update(ctx, func(tx *store.Tx) error {
			_, err := log.Append(ctx, tx, outbox.Event{AggregateType: "thing", AggregateID: "1", Type: eventType, Data: 1})
			return err
		}))
		clock = clock.Add(time.Second)
	}
	require.NoError(t, db.Update(ctx, func(tx *store.Tx) error {
		for _, stmt := range []string{
			`UPDATE outlog_relay SET position = 3, stream_seq = 3, token = 7`,
			`INSERT INTO outlog_consumers (name, position, start_position, paused, types, created_at, updated_at) VALUES
				('renames', 2, 0, 1, '["Renamed"]', 0, 0), ('all', 5, 0, 0, '["Created","Renamed"]', 0, 0)`,
			`INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at) VALUES
				('all', 'a', 1, 'thing', '1', 'dead', 0), ('all', 'b', 2, 'thing', '1', 'blocked', 0),
				('all', 'c', 3, 'thing', '1', 'blocked', 0), ('relay', 'a', 1, 'thing', '1', 'retrying', 0)`,
		} {
			if _, err := tx.ExecContext(ctx, stmt); err != nil {
				return err
			}
		}
		return nil
	}))

	s, err = admin.ReadStatus(ctx, db)
	require.NoError(t, err)
	require.Equal(t, admin.Status{
		LogID:  log.ID(),
		Head:   5,
		HeldBy: &outbox.Holder{Kind: "parked", Name: "all", Position: 0},
		Relay:  admin.Relay{Position: 3, StreamSeq: 3, Token: 7, Backlog: admin.Backlog{LagEvents: 2, LagSeconds: 2, Parked: 1}},
		Consumers: []admin.Consumer{
			{Name: "all", Position: 5, Generation: 1, Backlog: admin.Backlog{Parked: 2, Dead: 1}},
			{Name: "renames", Position: 2, Generation: 1, Paused: true, Backlog: admin.Backlog{LagEvents: 2, LagSeconds: 3}},
		},
	}, s)
}
