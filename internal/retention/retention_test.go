package retention_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/internal/archive"
	"outlog/internal/retention"
	"outlog/outbox"
	"outlog/relay"
	"outlog/store"
)

// rig is a log whose clock the test sets.
type rig struct {
	t   testing.TB
	db  *store.DB
	log *outbox.Log
	now atomic.Int64 // µs
}

func newRig(t testing.TB) *rig {
	r := &rig{t: t}
	r.now.Store(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro())
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "outlog.db"), Synchronous: "NORMAL",
		Now: func() time.Time { return time.UnixMicro(r.now.Load()) }})
	require.NoError(t, err)
	log, err := outbox.Open(t.Context(), db)
	require.NoError(t, err)
	db.Register(relay.Checks...)
	db.Register(consumer.Checks...)
	r.db, r.log = db, log
	t.Cleanup(func() {
		results, err := db.Verify(context.Background())
		require.NoError(t, err)
		for _, c := range results {
			require.True(t, c.OK, "%s: %s", c.Name, c.Detail)
		}
		require.NoError(t, db.Close())
	})
	return r
}

func (r *rig) exec(query string, args ...any) {
	r.t.Helper()
	require.NoError(r.t, r.db.Update(context.Background(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(context.Background(), query, args...)
		return err
	}))
}

// append adds n events and then lets time pass.
func (r *rig) append(n int, then time.Duration) {
	r.t.Helper()
	for n > 0 {
		some := min(n, 5000)
		n -= some
		require.NoError(r.t, r.db.Update(context.Background(), func(tx *store.Tx) error {
			for i := range some {
				if _, err := r.log.Append(context.Background(), tx, outbox.Event{AggregateType: "order", AggregateID: fmt.Sprint(i % 100), Type: "Placed", Data: i}); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	r.now.Add(then.Microseconds())
}

// at makes the next events be written by a clock that goes wrong by this much.
func (r *rig) at(wrong time.Duration, n int) {
	r.t.Helper()
	r.now.Add(wrong.Microseconds())
	r.append(n, -wrong)
}

func (r *rig) consumer(name string, position int64) {
	r.t.Helper()
	r.exec(`INSERT INTO outlog_consumers (name, position, start_position, types, created_at, updated_at) VALUES (?1, ?2, 0, '[]', 0, 0)
		ON CONFLICT (name) DO UPDATE SET position = ?2`, name, position)
}

func (r *rig) prune(o retention.Options) retention.Result {
	r.t.Helper()
	res, err := retention.Prune(r.t.Context(), r.db, r.log, o)
	require.NoError(r.t, err)
	return res
}

func (r *rig) left() (n int) {
	r.t.Helper()
	require.NoError(r.t, r.db.Reader().QueryRow(`SELECT count(*) FROM outbox`).Scan(&n))
	return n
}

const day = 24 * time.Hour

func older(d time.Duration) retention.Options {
	return retention.Options{Rule: retention.Rule{OlderThan: d}}
}

// TestRules: each rule prunes what it says, the oldest first, and a dry run
// says the same and prunes nothing.
func TestRules(t *testing.T) {
	for name, c := range map[string]struct {
		rule    retention.Rule
		through int64
	}{
		"older than 3 days":          {retention.Rule{OlderThan: 3 * day}, 2000},
		"older than a week":          {retention.Rule{OlderThan: 7 * day}, 0},
		"through a position":         {retention.Rule{Through: 1234}, 1234},
		"through more than there is": {retention.Rule{Through: 1 << 40}, 4000},
		"either":                     {retention.Rule{Through: 1234, OlderThan: 4 * day}, 1234},
		"or":                         {retention.Rule{Through: 10, OlderThan: 3 * day}, 2000},
		"size":                       {retention.Rule{MaxBytes: 1000 * (3 + 2 + 256)}, 3000},
		"size, none to spare":        {retention.Rule{MaxBytes: 1 << 40}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.append(1000, 2*day)
			r.append(1000, 3*day)
			r.append(1000, day)
			r.append(1000, 0)
			o := retention.Options{Rule: c.rule, DryRun: true}
			planned := r.prune(o)
			require.Equal(t, 4000, r.left())
			o.DryRun = false
			done := r.prune(o)
			if c.rule.MaxBytes > 0 && c.through > 0 { // payloads of one to three digits
				require.InDelta(t, c.through, done.Through, 20)
				c.through = done.Through
			}
			require.Equal(t, c.through, done.Through)
			require.Equal(t, c.through, done.Events)
			require.Equal(t, int(4000-c.through), r.left())
			require.Empty(t, done.Held)
			planned.DryRun = false
			require.Equal(t, done, planned)
			require.Zero(t, r.prune(o).Events, "a second time there is nothing to do")
		})
	}
	for _, rule := range []retention.Rule{{}, {OlderThan: -1}, {Through: -1}} {
		r := newRig(t)
		_, err := retention.Prune(t.Context(), r.db, r.log, retention.Options{Rule: rule})
		require.ErrorIs(t, err, retention.ErrNoRule)
	}
}

// TestWrongClocks: an event from the future keeps nothing behind it, one from
// the past takes nothing with it.
func TestWrongClocks(t *testing.T) {
	r := newRig(t)
	r.append(5, 0)
	r.at(1000*day, 2500) // more than a page
	r.append(5, 2*day)   // through 2510
	r.at(-1000*day, 5)   // their age is right for nobody else
	r.append(5, 0)
	r.at(1000*day, 5)
	require.Equal(t, int64(2515), r.prune(older(day)).Through)
	require.Equal(t, int64(2515), r.prune(older(day)).Through)
	r.append(5, 2*day)
	require.Equal(t, int64(2530), r.prune(older(day)).Through)
}

// TestHeld: what somebody needs stays, whoever it is is named, and when he is
// gone it goes.
func TestHeld(t *testing.T) {
	r := newRig(t)
	r.append(3000, 10*day)
	r.consumer("mail", 1500)
	r.consumer("stock", 2999)
	o := older(day)
	o.DryRun = true
	require.Equal(t, int64(1500), r.prune(o).Events)
	o.DryRun = false
	res := r.prune(o)
	require.Equal(t, int64(1500), res.Through)
	require.Equal(t, []outbox.Holder{{Kind: "consumer", Name: "mail", Position: 1500}}, res.Held[:1])
	require.Zero(t, r.prune(o).Events)
	r.exec(`DELETE FROM outlog_consumers WHERE name = 'mail'`)
	res = r.prune(o)
	require.Equal(t, int64(1499), res.Events)
	require.Equal(t, "stock", res.Held[0].Name)
}

func (r *rig) archive(f archive.Format) (*archive.Dir, string) {
	path := filepath.Join(r.t.TempDir(), "archive")
	d, err := archive.Open(path, r.log.ID(), f)
	require.NoError(r.t, err)
	return d, path
}

// archived are the ids that the files hold, each once, in log order.
func (r *rig) archived(d *archive.Dir) (ids []string) {
	r.t.Helper()
	files, err := d.Files()
	require.NoError(r.t, err)
	last := int64(0)
	for _, f := range files {
		require.NoError(r.t, archive.Read(f.Path, func(e outbox.Record) error {
			require.Greater(r.t, e.Position, last, "%s", f.Path)
			last = e.Position
			ids = append(ids, e.EventID)
			return nil
		}))
	}
	return ids
}

func (r *rig) ids() (ids []string) {
	r.t.Helper()
	events, err := r.log.Extents(r.t.Context(), 0, 1<<20)
	require.NoError(r.t, err)
	for _, e := range events {
		ids = append(ids, e.EventID)
	}
	return ids
}

// TestArchiveBeforeDeletion: the run ends at each point between the file and
// the last deletion; every event is in the archive once, whenever it ended, and
// none is deleted before.
func TestArchiveBeforeDeletion(t *testing.T) {
	for _, f := range []archive.Format{archive.NDJSON, archive.Parquet} {
		t.Run(string(f), func(t *testing.T) {
			r := newRig(t)
			r.append(3000, 10*day)
			r.consumer("mail", 2000)
			d, _ := r.archive(f)
			all := r.ids()
			o := older(day)
			o.Archive = d

			crash := errors.New("crash")
			o.Failpoint = func(string) error { return crash }
			_, err := retention.Prune(t.Context(), r.db, r.log, o)
			require.ErrorIs(t, err, crash)
			require.Equal(t, 3000, r.left(), "nothing is deleted")
			require.Equal(t, all[:2000], r.archived(d), "but all is stored that may be")
			o.Failpoint = nil

			// In the middle of the deletions, which take several transactions.
			ctx, cancel := context.WithCancel(t.Context())
			wake, unsubscribe := r.db.Subscribe()
			defer unsubscribe()
			go func() { <-wake; cancel() }()
			r.append(1, 0)
			res, err := retention.Prune(ctx, r.db, r.log, o)
			if err != nil {
				require.ErrorIs(t, err, context.Canceled)
			}
			require.Empty(t, res.Files, "what is stored already is not stored again")
			require.Equal(t, all[:2000], r.archived(d))

			require.Equal(t, int64(2000), r.prune(o).Through)
			r.consumer("mail", 2500)
			res = r.prune(o)
			require.Equal(t, int64(2500), res.Through)
			require.Len(t, res.Files, 1)
			require.Equal(t, all[:2500], r.archived(d))
		})
	}
}

// TestHolderComesBetweenFileAndDeletion: the events that he needs stay, though
// they are archived, and are not archived again when they go.
func TestHolderComesBetweenFileAndDeletion(t *testing.T) {
	r := newRig(t)
	r.append(1000, 10*day)
	d, _ := r.archive(archive.NDJSON)
	o := older(day)
	o.Archive = d
	o.Failpoint = func(string) error {
		r.consumer("mail", 0)
		r.exec(`UPDATE outlog_consumers SET position = 400`)
		return nil
	}
	all := r.ids()
	res := r.prune(o)
	require.Equal(t, int64(400), res.Through)
	require.Equal(t, "mail", res.Held[0].Name)
	o.Failpoint = nil
	r.consumer("mail", 1000)
	res = r.prune(o)
	require.Equal(t, int64(1000), res.Through)
	require.Empty(t, res.Files)
	require.Equal(t, all, r.archived(d))
}

// TestNotArchivedIsNotDeleted: whatever keeps a file from being written.
func TestNotArchivedIsNotDeleted(t *testing.T) {
	r := newRig(t)
	r.append(100, 10*day)
	d, path := r.archive(archive.NDJSON)
	o := older(day)
	o.Archive = d
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err := retention.Prune(t.Context(), r.db, r.log, o)
	require.Error(t, err)
	require.Equal(t, 100, r.left())

	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Mkdir(path, 0o700))
	other := newRig(t)
	other.append(100, 10*day)
	foreign, err := archive.Open(path, r.log.ID(), archive.NDJSON) // as of a log that was restored from a backup
	require.NoError(t, err)
	fo := older(day)
	fo.Archive = foreign
	other.prune(fo)
	_, err = retention.Prune(t.Context(), r.db, r.log, o)
	require.ErrorIs(t, err, archive.ErrConflict)
	require.Equal(t, 100, r.left())
}

// TestFewEventsAreNotWorthAFile waits for more of them.
func TestFewEventsAreNotWorthAFile(t *testing.T) {
	r := newRig(t)
	r.append(50, 10*day)
	d, _ := r.archive(archive.NDJSON)
	o := older(day)
	o.Archive, o.MinArchive = d, 51
	require.Zero(t, r.prune(o).Events)
	r.append(1, 10*day)
	require.Equal(t, int64(51), r.prune(o).Events)
}

// TestBesideAppendsAndNewConsumers prunes while events are appended, and
// consumers come that want all there is: each gets every event from where it
// began, or is told that it cannot, and no new event is lost.
func TestBesideAppendsAndNewConsumers(t *testing.T) {
	r := newRig(t)
	r.append(4000, 10*day)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			r.append(10, 0)
		}
	})
	var done atomic.Bool
	wg.Go(func() {
		defer done.Store(true)
		for horizon := int64(0); horizon < 4000 && ctx.Err() == nil; {
			require.NoError(t, r.db.Reader().QueryRow(`SELECT pruned_through FROM outlog_meta`).Scan(&horizon))
			if _, err := retention.Prune(ctx, r.db, r.log, older(day)); ctx.Err() == nil {
				require.NoError(t, err)
			}
		}
	})
	began, refused := 0, 0
	for i := 0; !done.Load(); i++ {
		start := consumer.Beginning
		if i%3 == 0 {
			start = consumer.At(int64(i * 10))
		}
		if r.begins(fmt.Sprint("c", i), start) {
			began++
		} else {
			refused++
		}
	}
	cancel()
	wg.Wait()
	require.NotZero(t, began)
	t.Log(began, "consumers began,", refused, "were refused")
	var head, horizon, left int64
	require.NoError(t, r.db.Reader().QueryRow(`SELECT max(position), pruned_through, count(*) FROM outbox, outlog_meta`).Scan(&head, &horizon, &left))
	require.Equal(t, head-horizon, left, "every event above the horizon is there")
}

// begins runs a consumer until it has applied ten events, which must be the ten
// after its start, and removes it.
func (r *rig) begins(name string, start consumer.Start) bool {
	r.t.Helper()
	var got []int64
	var once sync.Once
	enough := make(chan struct{})
	c, err := consumer.New(r.db, r.log, silent{}, consumer.Options{Name: name, Start: start, BatchRows: 10, Routes: []consumer.Route{
		consumer.Apply("Placed", func(_ context.Context, _ *store.Tx, e consumer.Event[int]) error {
			for len(got) > 0 && got[len(got)-1] >= e.Position { // a batch may run again
				got = got[:len(got)-1]
			}
			if got = append(got, e.Position); len(got) == 10 {
				once.Do(func() { close(enough) })
			}
			return nil
		})}})
	require.NoError(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	select {
	case err := <-ended:
		cancel()
		require.ErrorIs(r.t, err, consumer.ErrPruned)
		return false
	case <-enough:
	}
	cancel()
	require.NoError(r.t, <-ended)
	var began int64
	require.NoError(r.t, r.db.Reader().QueryRow(`SELECT start_position FROM outlog_consumers WHERE name = ?`, name).Scan(&began))
	for i, p := range got {
		require.Equal(r.t, began+int64(i)+1, p)
	}
	r.exec(`DELETE FROM outlog_inbox WHERE consumer = ?`, name)
	r.exec(`DELETE FROM outlog_consumers WHERE name = ?`, name)
	return true
}

type silent struct{}

func (silent) Fetch(context.Context, int) ([]consumer.Delivery, error) {
	return nil, errors.New("no stream here")
}

// TestFileShrinks: the space of pruned events goes back to the file system.
func TestFileShrinks(t *testing.T) {
	r := newRig(t)
	r.append(20_000, 10*day)
	before, err := r.db.Space(t.Context())
	require.NoError(t, err)
	r.prune(older(day))
	after, err := r.db.Space(t.Context())
	require.NoError(t, err)
	require.Less(t, after.Pages, before.Pages/2)
}
