package retention_test

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/internal/archive"
	"outlog/internal/retention"
)

// loop runs the loop of a node on r until the bubble's test ends. The rig's
// clock goes with the bubble's.
func (r *rig) loop(o retention.LoopOptions) (log *bytes.Buffer, pass func(time.Duration)) {
	log = &bytes.Buffer{}
	o.Logger = slog.New(slog.NewTextHandler(log, nil))
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { retention.NewLoop(r.db, r.log, o).Run(ctx) })
	r.t.Cleanup(func() { cancel(); wg.Wait() })
	synctest.Wait()
	return log, func(d time.Duration) {
		for range d / time.Minute {
			r.now.Add(time.Minute.Microseconds())
			time.Sleep(time.Minute)
			time.Sleep(time.Second) // pruning pauses
			r.now.Add(time.Second.Microseconds())
			synctest.Wait()
		}
	}
}

// written is how often the database was written to.
func (r *rig) written() (n int64) {
	r.t.Helper()
	conn, err := r.db.Reader().Conn(context.Background())
	require.NoError(r.t, err)
	defer conn.Close()
	require.NoError(r.t, conn.QueryRowContext(context.Background(), `PRAGMA data_version`).Scan(&n))
	return n
}

// TestLoop prunes what expires, inbox and history too, and writes nothing when
// nothing does.
func TestLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.append(3000, 2*day)
		r.append(3000, 0)
		r.consumer("c", 6000)
		r.exec(`INSERT INTO outlog_inbox SELECT 'c', event_id, position, 0 FROM outbox`)
		r.exec(`INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at) VALUES ('c', 'x', 1, 1, 'failed', '', 0)`)
		log, pass := r.loop(retention.LoopOptions{Options: older(3 * day), InboxWindow: 1000, HistoryAge: 90 * day})
		pass(3 * time.Minute)
		require.Equal(t, 6000, r.left())
		require.Equal(t, 1000, r.count(`SELECT count(*) FROM outlog_inbox`))
		require.Zero(t, r.count(`SELECT count(*) FROM outlog_attempts`))
		pass(day + 5*time.Minute)
		require.Equal(t, 3000, r.left())
		require.Contains(t, log.String(), `msg="events pruned" events=`)
		before := r.written()
		pass(5 * time.Minute)
		require.Equal(t, before, r.written())
	})
}

func (r *rig) count(query string) (n int) {
	r.t.Helper()
	require.NoError(r.t, r.db.Reader().QueryRow(query).Scan(&n))
	return n
}

// TestLoopKeepsEverything: that is what it does unless told otherwise.
func TestLoopKeepsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.append(10, 1000*day)
		r.consumer("c", 10)
		r.exec(`INSERT INTO outlog_inbox SELECT 'c', event_id, position, 0 FROM outbox`)
		r.exec(`INSERT INTO outlog_attempts (consumer, event_id, position, attempt, outcome, error, at) VALUES ('c', 'x', 1, 1, 'failed', '', 0)`)
		_, pass := r.loop(retention.LoopOptions{InboxWindow: -1, HistoryAge: -1})
		before := r.written()
		pass(3 * time.Minute)
		require.Equal(t, before, r.written())
		require.Equal(t, 10, r.left())
	})
}

// TestClockStep: when the clock is set by more than an hour, nothing goes for
// its age for an hour; by less, or for its size, it does.
func TestClockStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.append(100, 0)
		log, pass := r.loop(retention.LoopOptions{Options: older(day), InboxWindow: -1, HistoryAge: -1})
		pass(2 * time.Minute)
		r.now.Add((30 * day).Microseconds()) // forward, and a person sees it
		pass(50 * time.Minute)
		require.Equal(t, 100, r.left())
		require.Contains(t, log.String(), "the clock was set")
		r.now.Add(-(30 * day).Microseconds())
		pass(70 * time.Minute)
		require.Equal(t, 100, r.left())
		r.now.Add((30 * day).Microseconds()) // forward, and it stays
		pass(70 * time.Minute)
		require.Zero(t, r.left())

		r.append(100, 0)
		pass(23*time.Hour + 20*time.Minute)
		require.Equal(t, 100, r.left())
		r.now.Add((50 * time.Minute).Microseconds())
		pass(2 * time.Minute)
		require.Zero(t, r.left())
	})
}

// TestLoopArchivesNotEveryMinute: a file is written when there is enough for
// one, or an hour has passed.
func TestLoopArchivesNotEveryMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		d, _ := r.archive(archive.NDJSON)
		o := older(time.Minute)
		o.Archive = d
		r.append(100, 2*time.Minute)
		_, pass := r.loop(retention.LoopOptions{Options: o, InboxWindow: -1, HistoryAge: -1})
		pass(30 * time.Minute)
		require.Equal(t, 100, r.left())
		pass(40 * time.Minute)
		require.Zero(t, r.left())
		r.append(10_000, 2*time.Minute)
		pass(3 * time.Minute)
		require.Zero(t, r.left())
		files, err := d.Files()
		require.NoError(t, err)
		require.Len(t, files, 2)
	})
}
