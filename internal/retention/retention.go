// Package retention prunes the log: it finds what a rule lets go and nobody
// needs, archives it, and deletes it in small steps between the other writers'
// transactions.
//
// What may be deleted at all is decided by outbox.Log.Prune, in the transaction
// that deletes; this package only decides what is not wanted any more, and how
// fast. Start reading at Prune; loop.go is what a running node does.
package retention

import (
	"context"
	"errors"
	"fmt"
	"time"

	"outlog/consumer"
	"outlog/internal/archive"
	"outlog/outbox"
	"outlog/relay"
	"outlog/store"
)

const (
	// chunkRows is how many events a transaction deletes at most; fewer when
	// they take longer than chunkTime, because everybody who writes waits for it.
	chunkRows    = 1000
	chunkRowsMin = 20
	chunkTime    = 2 * time.Millisecond
	// rest is how much longer than a transaction the pause after it is.
	rest = 19
	// chunkPages is how many free pages a transaction gives back.
	chunkPages = 200

	// What one archive file holds at most.
	fileRows  = 100_000
	fileBytes = 64 << 20
)

// Options say what to prune and how.
type Options struct {
	Rule
	Needs outbox.Needs
	// Archive, when set, gets the events before they are deleted.
	Archive *archive.Dir
	// MinArchive is how many events are worth a file; fewer stay in the log.
	MinArchive int
	// DryRun only looks.
	DryRun bool
	// Failpoint, when set, is called at the named points; an error ends the run
	// there. For tests only.
	Failpoint func(point string) error
}

// Result is what was pruned, or would be.
type Result struct {
	DryRun  bool            `json:"dry_run"`
	From    int64           `json:"from"`           // the horizon before
	Through int64           `json:"pruned_through"` // and after
	Events  int64           `json:"events"`         // deleted
	Bytes   int64           `json:"bytes"`          // of their payloads and headers
	Held    []outbox.Holder `json:"held_by"`        // who keeps the next expired event, the first in the log first
	Files   []string        `json:"archived"`       // files written
}

// run is one Prune.
type run struct {
	Options
	db       *store.DB
	log      *outbox.Log
	sizer    *sizer
	rows     int             // of the next chunk
	verified map[string]bool // archive files known to hold the log's events
	result   Result
}

// Prune removes the events that the rule lets go and nobody needs, the oldest
// first. It can be ended at any time and goes on from there when it is called
// again. Beside others that prune the same log it is safe.
//
// Errors: ErrNoRule, archive.ErrNotStored, archive.ErrConflict, ctx's, or the
// store's. The Result is true in any case.
func Prune(ctx context.Context, db *store.DB, log *outbox.Log, o Options) (Result, error) {
	return prune(ctx, db, log, o, &sizer{log: log})
}

func prune(ctx context.Context, db *store.DB, log *outbox.Log, o Options, s *sizer) (Result, error) {
	r := &run{Options: o, db: db, log: log, sizer: s, rows: 100, verified: map[string]bool{},
		result: Result{DryRun: o.DryRun, Held: []outbox.Holder{}, Files: []string{}}}
	err := r.check()
	if err == nil {
		err = r.all(ctx)
	}
	if err != nil {
		err = fmt.Errorf("prune: %w", err)
	}
	return r.result, err
}

func (r *run) all(ctx context.Context) error {
	var size int64
	var err error
	if r.MaxBytes > 0 {
		if size, err = r.sizer.size(ctx); err != nil {
			return err
		}
	}
	if r.result.From, err = r.log.Horizon(ctx); err != nil {
		return err
	}
	r.result.Through = r.result.From
	for {
		events, err := r.gather(ctx, size)
		if err != nil || len(events) == 0 {
			return errors.Join(err, r.giveBack(ctx))
		}
		if r.Archive != nil && !r.DryRun {
			if events, err = r.archive(ctx, events); err != nil || len(events) == 0 {
				return errors.Join(err, r.giveBack(ctx))
			}
		}
		before := r.result.Through
		if err := r.delete(ctx, events); err != nil {
			return err
		}
		for _, e := range events {
			if e.Position <= r.result.Through {
				size -= e.Bytes + eventBytes
			}
		}
		if r.result.Through == before { // held since it was looked at
			return nil
		}
	}
}

// gather returns the oldest events that have expired and that nobody needs:
// one page, or for an archive one file.
func (r *run) gather(ctx context.Context, size int64) (events []outbox.Extent, err error) {
	after, bytes := r.result.Through, int64(0)
	for {
		page, err := r.log.Extents(ctx, after, chunkRows)
		if err != nil {
			return nil, err
		}
		free, err := r.expired(ctx, r.log, page, size, r.db.Now())
		if err == nil {
			free, err = r.unneeded(ctx, after, free)
		}
		if err != nil {
			return nil, err
		}
		events = append(events, free...)
		for _, e := range free {
			bytes += e.Bytes
			size -= e.Bytes + eventBytes
		}
		if len(free) < chunkRows || r.Archive == nil || len(events) >= fileRows || bytes >= fileBytes {
			return events, nil
		}
		after = events[len(events)-1].Position
	}
}

// unneeded cuts events before the first that somebody needs.
func (r *run) unneeded(ctx context.Context, after int64, events []outbox.Extent) ([]outbox.Extent, error) {
	if len(events) == 0 {
		return nil, nil
	}
	held, err := outbox.Holders(ctx, r.db.Reader(), after, events[len(events)-1].Position, r.db.Now(), r.Needs)
	if err != nil || len(held) == 0 {
		return events, err
	}
	r.result.Held = held
	return before(events, held[0].Position), nil
}

// before returns the leading events up to a position.
func before(events []outbox.Extent, through int64) []outbox.Extent {
	n := 0
	for n < len(events) && events[n].Position <= through {
		n++
	}
	return events[:n]
}

// delete removes events in as many transactions as it takes, or fewer events
// when somebody has come to need one.
func (r *run) delete(ctx context.Context, events []outbox.Extent) error {
	for len(events) > 0 {
		n := min(r.rows, len(events))
		took := time.Duration(0)
		if !r.DryRun {
			var err error
			took, err = r.chunk(ctx, events[:n])
			if held, is := errors.AsType[*outbox.HeldError](err); is {
				r.result.Held = []outbox.Holder{held.By}
				if events = before(events[:n], held.By.Position); len(events) == 0 {
					return nil
				}
				continue
			}
			if errors.Is(err, outbox.ErrHorizonMoved) { // somebody else did our work
				r.sizer.known = false
				r.result.Through, err = r.log.Horizon(ctx)
				return err
			}
			if err != nil {
				return err
			}
		}
		r.count(events[:n])
		events = events[n:]
		if err := r.pause(ctx, took, n); err != nil {
			return err
		}
	}
	return nil
}

// chunk is one transaction. A power cut may take it back, whole.
func (r *run) chunk(ctx context.Context, events []outbox.Extent) (took time.Duration, err error) {
	first, last := events[0].Position, events[len(events)-1].Position
	err = r.db.UpdateLazy(ctx, func(tx *store.Tx) error {
		start := time.Now()
		defer func() { took = time.Since(start) }()
		if err := consumer.Forget(ctx, tx, first-1, last); err != nil {
			return err
		}
		if err := r.log.Prune(ctx, tx, events, r.Needs); err != nil {
			return err
		}
		if err := relay.Forget(ctx, tx, last); err != nil {
			return err
		}
		_, err := tx.GiveBack(chunkPages)
		return err
	})
	return took, err
}

func (r *run) count(events []outbox.Extent) {
	r.result.Through = events[len(events)-1].Position
	r.result.Events += int64(len(events))
	for _, e := range events {
		r.result.Bytes += e.Bytes
	}
	if !r.DryRun {
		r.sizer.pruned(events)
	}
}

// pause leaves the database to others for most of the time, and finds out how
// many events can be deleted without holding them up for long.
func (r *run) pause(ctx context.Context, took time.Duration, events int) error {
	if r.DryRun || took == 0 {
		return ctx.Err()
	}
	r.rows = min(max(int(int64(events)*int64(chunkTime)/int64(took)), r.rows/2, chunkRowsMin), 2*r.rows, chunkRows)
	return sleep(ctx, rest*took)
}

// giveBack makes the file shorter by what was freed and is not used again.
func (r *run) giveBack(ctx context.Context) error {
	for left := int64(1); left > 0 && r.result.Events > 0 && !r.DryRun; {
		var took time.Duration
		err := r.db.UpdateLazy(ctx, func(tx *store.Tx) (err error) {
			start := time.Now()
			left, err = tx.GiveBack(chunkPages)
			took = time.Since(start)
			return err
		})
		if err == nil && left > 0 {
			err = r.pause(ctx, took, r.rows)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
