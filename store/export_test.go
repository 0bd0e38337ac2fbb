package store

import (
	"context"
	"database/sql"
	"time"
)

// SetMaxPages limits the database's size as a full disk would.
func SetMaxPages(db *DB, pages string) error {
	return db.writer.raw(func(k *conn) error { return k.control("PRAGMA max_page_count = " + pages) })
}

// OpenOutsider opens a connection as another program would.
func OpenOutsider(path string, patience time.Duration) (*sql.DB, error) {
	o, err := Options{Path: path, BusyTimeout: patience}.withDefaults()
	if err != nil {
		return nil, err
	}
	return openPool(o, rolePlain, 1), nil
}

// WriterPragma reads a setting of the writer's connection.
func WriterPragma(db *DB, name string) (v string, err error) {
	err = db.writer.raw(func(k *conn) error {
		v, err = k.readPragma(context.Background(), name)
		return err
	})
	return v, err
}

// KnownDurable reports the range of positions that need no sync.
func KnownDurable(db *DB) (from, to int64) { return db.durableFrom, db.durableTo }

// TryPragma opens a connection with one more setting.
func TryPragma(ctx context.Context, path, name, value string) error {
	o, err := Options{Path: path}.withDefaults()
	if err != nil {
		return err
	}
	c := &connector{Connector: mustConnector(dsn(path)), role: rolePlain, pragma: append(o.pragmas(rolePlain), pragma{name, value, value})}
	k, err := c.Connect(ctx)
	if err != nil {
		return err
	}
	return k.Close()
}
