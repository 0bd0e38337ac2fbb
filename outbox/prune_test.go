package outbox_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/stretchr/testify/require"

	"outlog/outbox"
	"outlog/store"
)

// TestPruneKeepsWhatIsNeeded: whoever needs an event is named, nothing is
// deleted, and the event before it can go.
func TestPruneKeepsWhatIsNeeded(t *testing.T) {
	const consumer = `INSERT INTO outlog_consumers (name, position, start_position, types, created_at, updated_at) VALUES ('%s', %d, 0, '[]', 0, 0)`
	const parked = `INSERT INTO outlog_parked (consumer, event_id, position, aggregate_type, aggregate_id, state, parked_at)
		SELECT '%s', event_id, position, aggregate_type, aggregate_id, '%s', 0 FROM outbox WHERE position = %d`
	const relay = `UPDATE outlog_relay SET position = %d, token = 1`
	publication := func(first, last, seq int64, age time.Duration) string {
		return fmt.Sprintf(`INSERT INTO outlog_publications VALUES (%d, %d, %d, %d, %d)`, first, last, seq, seq+last-first, time.Now().Add(-age).UnixMicro())
	}
	for name, c := range map[string]struct {
		setup []string
		held  outbox.Holder // "" in Kind: nobody
		needs outbox.Needs
	}{
		"nobody":                   {},
		"a consumer's cursor":      {setup: []string{fmt.Sprintf(consumer, "mail", 3), fmt.Sprintf(consumer, "stock", 9)}, held: outbox.Holder{Kind: "consumer", Name: "mail", Position: 3}},
		"a consumer that is past":  {setup: []string{fmt.Sprintf(consumer, "mail", 5)}},
		"a paused consumer":        {setup: []string{fmt.Sprintf(consumer, "mail", 3), `UPDATE outlog_consumers SET paused = 1`}, held: outbox.Holder{Kind: "consumer", Name: "mail", Position: 3}},
		"an event that failed":     {setup: []string{fmt.Sprintf(consumer, "mail", 9), fmt.Sprintf(parked, "mail", "retrying", 4)}, held: outbox.Holder{Kind: "parked", Name: "mail", Position: 3}},
		"a dead one at the relay":  {setup: []string{fmt.Sprintf(relay, 9), fmt.Sprintf(parked, "relay", "dead", 5)}, held: outbox.Holder{Kind: "parked", Name: "relay", Position: 4}},
		"one parked behind it all": {setup: []string{fmt.Sprintf(consumer, "mail", 9), fmt.Sprintf(parked, "mail", "blocked", 6)}},
		"the relay's cursor":       {setup: []string{fmt.Sprintf(relay, 2)}, held: outbox.Holder{Kind: "relay", Name: "main", Position: 2}},
		"a relay that nobody runs": {setup: []string{fmt.Sprintf(relay, 2)}, needs: outbox.Needs{NoRelay: true}},
		"what was just published":  {setup: []string{fmt.Sprintf(relay, 9), publication(1, 2, 1, time.Hour), publication(3, 9, 3, time.Second)}, held: outbox.Holder{Kind: "stream", Name: "main", Position: 2}},
		"what was published":       {setup: []string{fmt.Sprintf(relay, 9), publication(1, 9, 1, 2*time.Minute)}},
		"a late one":               {setup: []string{fmt.Sprintf(relay, 9), publication(1, 2, 1, time.Hour), publication(4, 9, 3, time.Hour), publication(3, 3, 9, time.Second)}, held: outbox.Holder{Kind: "stream", Name: "main", Position: 2}},
		"a wrong clock's":          {setup: []string{fmt.Sprintf(relay, 9), publication(1, 5, 1, -1000*time.Hour), publication(6, 9, 6, time.Hour)}},
		"a wrong clock's, the last": {setup: []string{fmt.Sprintf(relay, 9), publication(1, 9, 1, -1000*time.Hour)},
			held: outbox.Holder{Kind: "stream", Name: "main", Position: 0}},
	} {
		t.Run(name, func(t *testing.T) {
			db, log := open(t, store.Options{})
			for i := range 9 {
				_, err := add(t, db, log, event(fmt.Sprint(i)))
				require.NoError(t, err)
			}
			for _, q := range c.setup {
				require.NoError(t, exec(t, db, q))
			}
			err := tryPrune(t, db, log, 5, c.needs)
			if c.held.Kind == "" {
				require.NoError(t, err)
				return
			}
			var held *outbox.HeldError
			require.ErrorAs(t, err, &held)
			require.Equal(t, c.held, held.By)
			require.NotEmpty(t, err.Error())
			left, err := log.Extents(t.Context(), 0, 100)
			require.NoError(t, err)
			require.Len(t, left, 9, "nothing may be deleted")
			require.NoError(t, tryPrune(t, db, log, c.held.Position, c.needs), "what is before it")
			horizon, err := log.Horizon(t.Context())
			require.NoError(t, err)
			require.Equal(t, c.held.Position, horizon)
		})
	}
}

// TestPruneTakesTheOldest: not events that are gone already, nor any out of the
// middle.
func TestPruneTakesTheOldest(t *testing.T) {
	db, log := open(t, store.Options{})
	for i := range 6 {
		_, err := add(t, db, log, event(fmt.Sprint(i)))
		require.NoError(t, err)
	}
	events, err := log.Extents(t.Context(), 0, 10)
	require.NoError(t, err)
	take := func(events []outbox.Extent) error {
		return db.Update(t.Context(), func(tx *store.Tx) error { return log.Prune(t.Context(), tx, events, outbox.Needs{}) })
	}
	require.ErrorIs(t, take(events[1:3]), outbox.ErrHorizonMoved)
	require.NoError(t, take(events[:2]))
	require.ErrorIs(t, take(events[:2]), outbox.ErrHorizonMoved)
	require.Error(t, take([]outbox.Extent{events[2], events[4]}), "one between them was not named")
	require.NoError(t, take(nil))
	left, err := log.Extents(t.Context(), 0, 10)
	require.NoError(t, err)
	require.Equal(t, events[2:], left)
}

// TestPrunedIDIsNotTakenForNew: a client's clock may be ahead of ours. Its id
// is refused when the event is pruned, although it is younger than the time at
// which the event was appended; and an id of an absurd time is not what others
// are measured by.
func TestPrunedIDIsNotTakenForNew(t *testing.T) {
	db, log := open(t, store.Options{})
	id := func(in time.Duration) string {
		return ulid.MustNew(ulid.Timestamp(time.Now().Add(in)), ulid.DefaultEntropy()).String()
	}
	ahead := event("1")
	ahead.ID = id(30 * time.Minute)
	_, err := add(t, db, log, ahead)
	require.NoError(t, err)
	require.NoError(t, exec(t, db, `INSERT INTO outbox_append (event_id, aggregate_type, aggregate_id, type, payload) VALUES (?, 'order', '2', 'Placed', '{}')`, id(10*365*24*time.Hour)))
	require.NoError(t, exec(t, db, `INSERT INTO outbox_append (event_id, aggregate_type, aggregate_id, type, payload) VALUES ('not a ULID, but as long as', 'order', '3', 'Placed', '{}')`))
	prune(t, db, log, 3)
	_, err = add(t, db, log, ahead)
	require.ErrorIs(t, err, outbox.ErrEventTooOld)
	later := event("1")
	later.ID = id(31 * time.Minute)
	_, err = add(t, db, log, later)
	require.NoError(t, err)
}
