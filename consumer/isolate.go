package consumer

import (
	"context"
	"errors"
	"slices"
	"time"

	"outlog/outbox"
	"outlog/store"
)

// An event whose handler ends the whole process (out of memory, a fatal
// signal, os.Exit) would end it again at every start. After suspectAfter
// unclean ends at the same cursor, the events that could have done it run one
// per transaction, each under a marker that is committed before it runs. The
// event whose marker is found killAttempts times is dead without being run.

const (
	suspectAfter = 2 // unclean ends in a row without progress
	killAttempts = 3 // ends of the process by one event alone
)

// errKilledProcess is why such an event is dead.
var errKilledProcess = errors.New("the process ended three times while this event alone was being handled")

// isolated runs one event under a marker, and nothing else beside it.
func (c *Consumer) isolated(ctx context.Context, rows []outbox.Record) (progress, error) {
	m, err := c.mark(ctx, rows)
	if err != nil {
		return progress{}, err
	}
	if m.id != "" {
		if err := c.hook("consumer.after-mark"); err != nil {
			return progress{}, err
		}
	}
	var failed *failure
	if m.exits >= killAttempts {
		failed = newFailure(m.id, Permanent(errKilledProcess), "")
	}
	p, err := c.batch(ctx, rows[:m.rows], limits{items: 1, effects: 1, alone: true, only: m.id}, failed)
	if err != nil {
		return p, err
	}
	p.more = p.more || m.rows < len(rows)
	c.committed(p)
	for !c.effects.Load().idle(ctx, time.Minute) { // an external effect is as suspect
		if ctx.Err() != nil {
			return p, nil // its handler may still be at work: the marker stays
		}
	}
	if m.id == "" {
		return p, nil
	}
	c.isolate--
	if len(p.effects) == 0 {
		return p, nil // the batch has taken the marker away
	}
	return p, c.db.UpdateLazy(ctx, func(tx *store.Tx) error { return c.unmark(ctx, tx) })
}

// unmark notes that the marked event has not ended the process.
func (c *Consumer) unmark(ctx context.Context, tx *store.Tx) error {
	_, err := tx.ExecContext(ctx, `UPDATE outlog_consumers SET suspect = '', suspect_exits = 0, unclean_exits = 0 WHERE name = ?`, c.opts.Name)
	return err
}

// marked is the event that runs next: a parked one that is due, with no row of
// the log, or the last of the rows.
type marked struct {
	id    string // "" if none of the rows has a handler
	rows  int    // of the log, up to the event
	exits int    // how often the process has ended while it was marked
}

// mark commits the id of the event that runs next. The commit is lazy: it has
// to survive the process, not the machine, and the shorter the time between it
// and the batch, the less often an innocent event is found marked after a kill
// that came from outside.
func (c *Consumer) mark(ctx context.Context, rows []outbox.Record) (m marked, err error) {
	if c.dueNow() {
		err = c.db.UpdateLazy(ctx, func(tx *store.Tx) error {
			due, err := dueEvents(ctx, tx, c.opts.Name, tx.Now(), 1)
			if m = (marked{}); err == nil && len(due) > 0 {
				m.id = due[0].EventID
				m.exits, err = c.countMark(ctx, tx, m.id)
			}
			return err
		})
	}
	if err != nil || m.id != "" {
		return m, err
	}
	i := slices.IndexFunc(rows, func(r outbox.Record) bool { _, routed := c.routes[r.Type]; return routed })
	if i < 0 {
		return marked{rows: len(rows)}, nil
	}
	m = marked{id: rows[i].EventID, rows: i + 1}
	err = c.db.UpdateLazy(ctx, func(tx *store.Tx) (err error) {
		m.exits, err = c.countMark(ctx, tx, m.id)
		return err
	})
	return m, err
}

// countMark marks an event. Only begin counts an end of the process against it:
// marking it again, after trouble of the database, says nothing.
func (c *Consumer) countMark(ctx context.Context, tx *store.Tx, id string) (exits int, err error) {
	err = tx.QueryRowContext(ctx, `UPDATE outlog_consumers SET suspect_exits = CASE WHEN suspect = ?1 THEN suspect_exits ELSE 0 END, suspect = ?1
		WHERE name = ?2 RETURNING suspect_exits`, id, c.opts.Name).Scan(&exits)
	return exits, err
}
