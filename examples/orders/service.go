package orders

import (
	"context"
	"embed"
	"io/fs"
	"log/slog"

	"outlog/outbox"
	"outlog/store"
)

// Outlog is what the service needs of a *node.Node.
type Outlog interface {
	Update(ctx context.Context, fn func(tx *store.Tx) error) error
	Append(ctx context.Context, tx outbox.Execer, events ...outbox.Event) ([]outbox.Appended, error)
	WaitApplied(ctx context.Context, consumer string, position int64) error
	Store() *store.DB
}

// Service places, cancels and shows orders.
type Service struct {
	n   Outlog
	log *slog.Logger
}

// New returns the service on n, whose store must have the Migrations. log
// receives what clients are not told; nil: nothing.
func New(n Outlog, log *slog.Logger) *Service {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Service{n: n, log: log}
}

//go:embed migrations/*.sql
var files embed.FS

// Migrations returns the service's tables.
func Migrations() store.Migrations {
	sub, err := fs.Sub(files, "migrations")
	if err != nil {
		panic(err) // the directory is compiled in
	}
	return store.Migrations{Table: "orders_migrations", FS: sub}
}

// Receipt says what a request did.
type Receipt struct {
	OrderID  string `json:"order_id"` // ULID
	EventID  string `json:"event_id"` // ULID
	Position int64  `json:"position"` // of the event in the log
}
