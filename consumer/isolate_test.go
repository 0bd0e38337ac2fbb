package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/consumer"
	"outlog/outbox"
	"outlog/store"
)

// The crash tests run this test binary again as a child whose handler ends the
// process.

const childDB, childKind, killerStatus = "OUTLOG_TEST_DB", "OUTLOG_TEST_KIND", 7

func TestMain(m *testing.M) {
	if path := os.Getenv(childDB); path != "" {
		if err := child(path, os.Getenv(childKind)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child runs the consumer until it has come to the end of the log.
func child(path, kind string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	db, err := store.Open(ctx, store.Options{Path: path, Synchronous: "NORMAL"})
	if err != nil {
		return err
	}
	log, err := outbox.Open(ctx, db)
	if err != nil {
		return err
	}
	handler := failing("c", func(e consumer.Event[string]) error {
		switch e.AggregateID {
		case "killer":
			os.Exit(killerStatus)
		case "dead":
			return consumer.Permanent(errors.New("dead"))
		}
		return nil
	})
	o := options("c", handler)
	if kind == "do" {
		o.Routes = []consumer.Route{consumer.Do("Placed", func(_ context.Context, e consumer.Event[string]) error {
			if e.AggregateID == "killer" {
				os.Exit(killerStatus)
			}
			return nil
		})}
	}
	c, err := consumer.New(db, log, down{}, o)
	if err != nil {
		return err
	}
	runCtx, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- c.Run(runCtx) }()
	for {
		var resting bool
		err := db.Reader().QueryRowContext(ctx, `SELECT position = (SELECT max(position) FROM outbox) AND
			NOT EXISTS (SELECT 1 FROM outlog_parked WHERE state IN ('running', 'retrying')) FROM outlog_consumers UNION ALL SELECT 0 LIMIT 1`).Scan(&resting)
		if err != nil {
			return err
		}
		if resting {
			break
		}
		select {
		case <-time.After(time.Millisecond):
		case err := <-done:
			return fmt.Errorf("the consumer ended: %w", err)
		}
	}
	stop()
	return errors.Join(<-done, db.Close())
}

// TestEventThatEndsTheProcessIsIsolated: two unclean ends, three more of that
// event alone, and it is dead without being run; all the others are applied.
func TestEventThatEndsTheProcessIsIsolated(t *testing.T) {
	for kind, events := range map[string][]string{
		"apply":         {"a", "b", "killer", "c", "killer", "d"},
		"do":            {"a", "b", "killer", "c", "killer", "d"},
		"first":         {"killer", "a"},
		"behind-ailing": {"dead", "a", "dead", "killer", "dead", "b"},
	} {
		t.Run(kind, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "outlog.db")
			db, err := store.Open(t.Context(), store.Options{Path: path, Synchronous: "NORMAL"})
			require.NoError(t, err)
			log, err := outbox.Open(t.Context(), db)
			require.NoError(t, err)
			r := &rig{t: t, db: db, log: log}
			r.exec(`CREATE TABLE effects (n INTEGER PRIMARY KEY AUTOINCREMENT, consumer TEXT, event_id TEXT, aggregate TEXT, version INTEGER) STRICT`)
			r.append(events...)
			require.NoError(t, db.Close())
			ends := 0
			for ; ends < 20; ends++ {
				cmd := exec.CommandContext(t.Context(), os.Args[0])
				cmd.Env = append(os.Environ(), childDB+"="+path, childKind+"="+kind)
				out, err := cmd.CombinedOutput()
				if err == nil {
					break
				}
				require.Equal(t, killerStatus, cmd.ProcessState.ExitCode(), "%s", out)
			}
			require.LessOrEqual(t, ends, 6)
			require.GreaterOrEqual(t, ends, 4, "three of them alone, after unclean ends")
			db, err = store.Open(t.Context(), store.Options{Path: path, Synchronous: "NORMAL"})
			require.NoError(t, err)
			defer db.Close()
			db.Register(consumer.Checks...)
			results, err := db.Verify(t.Context())
			require.NoError(t, err)
			require.True(t, results[len(results)-1].OK, "%v", results)
			var dead, attempts, inbox int
			require.NoError(t, db.Reader().QueryRow(`SELECT count(*), coalesce(max(attempts), 0), (SELECT count(*) FROM outlog_inbox) FROM outlog_parked
				WHERE state = 'dead' AND last_error LIKE '%ended three times%'`).Scan(&dead, &attempts, &inbox))
			require.Equal(t, []int{1, 1}, []int{dead, attempts})
			others := 0
			for _, e := range events {
				if e != "killer" && e != "dead" {
					others++
				}
			}
			require.Equal(t, others, inbox)
		})
	}
}

// TestCleanStopsAreNoSuspicion: stopping in order, however often, isolates and
// kills nothing.
func TestCleanStopsAreNoSuspicion(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a")
	for range 6 {
		c, stop := r.run(down{}, options("c", failing("c", fine)))
		require.NoError(t, r.wait(c, last))
		stop()
		r.eventually("0 0 ", `SELECT running || ' ' || unclean_exits || ' ' || suspect FROM outlog_consumers`)
	}
}

// TestTroubleIsNoEndOfTheProcess: while events run one by one after unclean
// ends, database trouble must not count as another end.
func TestTroubleIsNoEndOfTheProcess(t *testing.T) {
	r := newRig(t, store.Options{})
	last := r.append("a", "b")
	c, stop := r.run(down{}, options("c", failing("c", fine)))
	require.NoError(t, r.wait(c, last))
	stop()
	last = r.append("a", "b")
	r.exec(`UPDATE outlog_consumers SET running = 1, unclean_exits = 1, run_position = position`)
	var calls atomic.Int64
	c, stop = r.run(down{}, options("c", failing("c", func(consumer.Event[string]) error {
		if calls.Add(1) <= 6 {
			return store.ErrUnavailable
		}
		return nil
	})))
	require.NoError(t, r.wait(c, last))
	stop()
	require.Equal(t, "a1 b1 a2 b2", r.effects("c"))
	r.eventually("0", `SELECT suspect_exits FROM outlog_consumers`)
}
