package outbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"outlog/store"
)

// Execer is a write transaction on the log's database: *store.Tx, *sql.Tx, or
// anything else with these two methods.
type Execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Log is the append-only event log in the table outbox.
type Log struct {
	db   *store.DB
	id   string
	tail tail
}

// Open returns the log of db, makes sure that no position can be given out
// again, and registers the log's checks.
func Open(ctx context.Context, db *store.DB) (*Log, error) {
	l, err := OpenReader(ctx, db)
	if err != nil {
		return nil, err
	}
	var floor, seq int64
	err = db.Reader().QueryRowContext(ctx, floorSQL).Scan(&floor, &seq)
	if err == nil && floor > seq {
		err = db.Update(ctx, func(tx *store.Tx) error { return raiseSequence(ctx, tx, floor) })
	}
	if err != nil {
		return nil, fmt.Errorf("raise the log's sequence: %w", err)
	}
	return l, nil
}

// OpenReader returns the log of db for reading, and registers its checks.
func OpenReader(ctx context.Context, db *store.DB) (*Log, error) {
	l := &Log{db: db}
	if err := db.Reader().QueryRowContext(ctx, `SELECT log_id FROM outlog_meta`).Scan(&l.id); err != nil {
		return nil, fmt.Errorf("read the log's id: %w", err)
	}
	db.Register(checks...)
	return l, nil
}

// floorSQL reads the highest position anybody remembers, and the sequence.
const floorSQL = `
SELECT max((SELECT pruned_through FROM outlog_meta),
           coalesce((SELECT max(position) FROM outlog_relay), 0),
           coalesce((SELECT max(position) FROM outlog_consumers), 0),
           coalesce((SELECT max(last_position) FROM outlog_publications), 0)),
       coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0)`

// raiseSequence makes the next position floor+1. The table has no unique key,
// and no row before the first append.
func raiseSequence(ctx context.Context, tx *store.Tx, floor int64) error {
	r, err := tx.ExecContext(ctx, `UPDATE sqlite_sequence SET seq = ?1 WHERE name = 'outbox' AND seq < ?1`, floor)
	if err != nil {
		return err
	}
	if n, err := r.RowsAffected(); err != nil || n > 0 {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO sqlite_sequence (name, seq)
		SELECT 'outbox', ?1 WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'outbox')`, floor)
	return err
}

// ID identifies this log on a stream: 16 hexadecimal digits, made once.
func (l *Log) ID() string { return l.id }

// Append puts events into the log, in order, in the caller's transaction: they
// are there if and only if it commits. The result has one element per event.
//
// An event with an ID that the log holds already with the same content is not
// appended again; its first position is returned. An *InvalidEventError,
// ErrVersionConflict, ErrEventConflict or ErrEventTooOld leaves the
// transaction usable; events before the refused one are in it.
//
// Cost: two statements per event, about 20 µs, plus a look-up if it has an ID.
func (l *Log) Append(ctx context.Context, tx Execer, events ...Event) ([]Appended, error) {
	now := l.db.Now()
	if t, ok := tx.(interface{ Now() time.Time }); ok {
		now = t.Now()
	}
	out := make([]Appended, 0, len(events))
	for i, e := range events {
		a, isNew, err := l.append(ctx, tx, e, now)
		if err != nil {
			return nil, fmt.Errorf("append event %d of %d (%s): %w", i+1, len(events), e.Type, err)
		}
		if t, ok := tx.(interface{ Appended(first, last int64) }); ok && isNew {
			t.Appended(a.Position, a.Position)
		}
		out = append(out, a)
	}
	return out, nil
}

func (l *Log) append(ctx context.Context, tx Execer, e Event, now time.Time) (a Appended, isNew bool, err error) {
	p, err := prepare(e, now)
	if err != nil {
		return a, false, err
	}
	in := inputOf(ctx)
	derived := p.ID == "" && in != nil
	if derived {
		p.ID = in.derivedID()
	}
	if p.ID == "" {
		p.ID = l.db.NewID()
	} else if a, found, err := l.seen(ctx, tx, p, derived); err != nil || found {
		return a, false, err
	}
	if in != nil { // a reset of such a consumer has to be forced
		if _, err := tx.ExecContext(ctx, `UPDATE outlog_consumers SET appends = 1 WHERE name = ? AND appends = 0`, in.consumer); err != nil {
			return a, false, err
		}
	}
	a, err = l.insert(ctx, tx, p, now)
	return a, err == nil, err
}

// insert appends an event that the log does not hold.
func (l *Log) insert(ctx context.Context, tx Execer, p prepared, now time.Time) (Appended, error) {
	version, previous, err := lastOf(ctx, tx, p.AggregateType, p.AggregateID)
	if err != nil {
		return Appended{}, err
	}
	version++
	if p.Version != 0 && p.Version != version {
		return Appended{}, fmt.Errorf("%w: %s %s is at version %d, the event says %d", ErrVersionConflict,
			p.AggregateType, p.AggregateID, version-1, p.Version)
	}
	r, err := tx.ExecContext(ctx, `INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, previous_position,
			type, schema_version, content_type, payload, headers, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		p.ID, p.AggregateType, p.AggregateID, version, previous,
		p.Type, p.SchemaVersion, p.ContentType, p.Payload, p.headers, now.UnixMicro())
	if err != nil {
		return Appended{}, err
	}
	position, err := r.LastInsertId()
	return Appended{ID: p.ID, Position: position, Version: version}, err
}

// lastOf returns an aggregate's last version and its position, 0 if it has no
// event. A store.Tx gives the driver's values, at half the cost of a sql.Row.
func lastOf(ctx context.Context, tx Execer, aggregateType, id string) (version, position int64, err error) {
	const query = `SELECT version, last_position FROM outlog_aggregates WHERE aggregate_type = ? AND aggregate_id = ?`
	if tx, ok := tx.(*store.Tx); ok {
		err = tx.Scan(ctx, query, []any{aggregateType, id}, func(v []driver.Value) bool {
			version, _ = v[0].(int64)
			position, _ = v[1].(int64)
			return true
		})
		return version, position, err
	}
	err = tx.QueryRowContext(ctx, query, aggregateType, id).Scan(&version, &position)
	if errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	return version, position, err
}

// seen looks whether the log holds an event under p's id. A derived id bears
// the time of its input, which may be older than what the log remembers.
func (l *Log) seen(ctx context.Context, tx Execer, p prepared, derived bool) (Appended, bool, error) {
	r, err := scanRecord(tx.QueryRowContext(ctx, selectRecord+` WHERE event_id = ?`, p.ID))
	switch {
	case errors.Is(err, sql.ErrNoRows) && derived:
		return Appended{}, false, nil
	case errors.Is(err, sql.ErrNoRows):
		var horizon int64
		if err := tx.QueryRowContext(ctx, `SELECT pruned_created_at FROM outlog_meta`).Scan(&horizon); err != nil {
			return Appended{}, false, err
		}
		if t := idTime(p.ID); t.UnixMicro() <= horizon {
			return Appended{}, false, fmt.Errorf("%w: %s is of %s, the log remembers back to %s", ErrEventTooOld,
				p.ID, t.Format(time.RFC3339), time.UnixMicro(horizon).UTC().Format(time.RFC3339))
		}
		return Appended{}, false, nil
	case err != nil:
		return Appended{}, false, err
	}
	same := r.AggregateType == p.AggregateType && r.AggregateID == p.AggregateID && r.Type == p.Type &&
		r.SchemaVersion == p.SchemaVersion && r.ContentType == p.ContentType && r.RawHeaders == p.headers &&
		string(r.Payload) == string(p.Payload) && (p.Version == 0 || p.Version == r.AggregateVersion)
	if !same {
		return Appended{}, false, fmt.Errorf("%w: %s is at position %d", ErrEventConflict, p.ID, r.Position)
	}
	return Appended{ID: r.EventID, Position: r.Position, Version: r.AggregateVersion}, true, nil
}
