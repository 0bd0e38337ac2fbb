package consumer

import (
	"context"
	"errors"

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

// isolated runs one event under a marker.
func (c *Consumer) isolated(ctx context.Context, rows []outbox.Record) (progress, error) {
	id, exits, err := c.mark(ctx, rows)
	if err != nil {
		return progress{}, err
	}
	var failed *failure
	if exits > killAttempts {
		failed = &failure{id, Permanent(errKilledProcess), ""}
	}
	p, err := c.batch(ctx, rows, limits{items: 1, effects: 1}, failed)
	if err != nil {
		return p, err
	}
	c.committed(p)
	p.effects = nil
	c.effects.wg.Wait() // an external effect is as suspect
	err = c.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE outlog_consumers SET suspect = '', suspect_exits = 0, unclean_exits = 0 WHERE name = ?`, c.opts.Name)
		return err
	})
	if err == nil {
		c.isolate--
	}
	return p, err
}

// mark commits the id of the event that runs next, and returns how often it
// has been marked since it last ended well.
func (c *Consumer) mark(ctx context.Context, rows []outbox.Record) (id string, exits int, err error) {
	err = c.db.Update(ctx, func(tx *store.Tx) error {
		due, err := dueEvents(ctx, tx, c.opts.Name, tx.Now(), 1)
		if err != nil {
			return err
		}
		id, exits = "", 0
		if len(due) > 0 {
			id = due[0].EventID
		} else {
			for i := range rows {
				if _, routed := c.routes[rows[i].Type]; routed {
					id = rows[i].EventID
					break
				}
			}
		}
		if id == "" {
			return nil
		}
		return tx.QueryRowContext(ctx, `UPDATE outlog_consumers SET suspect_exits = CASE WHEN suspect = ?1 THEN suspect_exits + 1 ELSE 1 END, suspect = ?1
			WHERE name = ?2 RETURNING suspect_exits`, id, c.opts.Name).Scan(&exits)
	})
	return id, exits, err
}
