package outbox_test

import (
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/stretchr/testify/require"

	"outlog/outbox"
	"outlog/store"
)

// appendFrom appends events as a consumer does that applies input.
func appendFrom(t *testing.T, db *store.DB, log *outbox.Log, consumer string, input outbox.Record, events ...outbox.Event) (out []outbox.Appended, err error) {
	ctx := outbox.WithInput(t.Context(), consumer, &input)
	err = db.Update(ctx, func(tx *store.Tx) error {
		out, err = log.Append(ctx, tx, events...)
		return err
	})
	return out, err
}

// TestDerivedIDs: the same consumer, input and ordinal give the same id, with
// the input's time, and any other another.
func TestDerivedIDs(t *testing.T) {
	db, log := open(t, store.Options{Synchronous: "NORMAL"})
	_, err := add(t, db, log, event("1"), event("2"))
	require.NoError(t, err)
	inputs, err := log.Read(t.Context(), 0, outbox.Page{})
	require.NoError(t, err)
	first, err := appendFrom(t, db, log, "billing", inputs[0], event("x"), event("y"))
	require.NoError(t, err)
	require.NotEqual(t, first[0].ID, first[1].ID)
	for range 2 { // duplicate input appends nothing
		again, err := appendFrom(t, db, log, "billing", inputs[0], event("x"), event("y"))
		require.NoError(t, err)
		require.Equal(t, first, again)
	}
	otherInput, err := appendFrom(t, db, log, "billing", inputs[1], event("x"), event("y"))
	require.NoError(t, err)
	otherConsumer, err := appendFrom(t, db, log, "mailing", inputs[0], event("x"), event("y"))
	require.NoError(t, err)
	ids := map[string]bool{}
	for _, a := range append(append(first, otherInput...), otherConsumer...) {
		ids[a.ID] = true
		id, err := ulid.ParseStrict(a.ID)
		require.NoError(t, err)
		require.WithinDuration(t, inputs[0].CreatedAt, ulid.Time(id.Time()), time.Second)
	}
	require.Len(t, ids, 6)
	head, err := log.Head(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(8), head)
}

// TestDerivedIDsOfAnOldInput: an input from before the horizon's time may still
// append, and what it says differently the second time is refused.
func TestDerivedIDsOfAnOldInput(t *testing.T) {
	db, log := open(t, store.Options{Synchronous: "NORMAL"})
	input := outbox.Record{EventID: ulid.Make().String(), CreatedAt: time.Now().Add(-1000 * time.Hour)}
	require.NoError(t, exec(t, db, `UPDATE outlog_meta SET pruned_created_at = ?`, time.Now().Add(-time.Hour).UnixMicro()))
	_, err := appendFrom(t, db, log, "billing", input, event("x"))
	require.NoError(t, err)
	other := event("x")
	other.Payload = []byte(`{"n":99}`)
	_, err = appendFrom(t, db, log, "billing", input, other)
	require.ErrorIs(t, err, outbox.ErrEventConflict)
	for _, at := range []time.Time{{}, time.Unix(1<<50, 0)} { // nonsense of another program
		input := outbox.Record{EventID: ulid.Make().String(), CreatedAt: at}
		first, err := appendFrom(t, db, log, "billing", input, event("z"))
		require.NoError(t, err)
		again, err := appendFrom(t, db, log, "billing", input, event("z"))
		require.NoError(t, err)
		require.Equal(t, first, again)
	}
}
