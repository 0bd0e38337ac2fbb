package cli

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"outlog/outbox"
)

type eventsCmd struct {
	dataDir
	jsonFlag
	After     int64         `default:"0" placeholder:"POSITION" help:"Start with the first event after this position."`
	Limit     int           `default:"100" placeholder:"N" help:"Show at most this many events; 0: all (${default})."`
	Aggregate *aggregateArg `placeholder:"TYPE/ID" xor:"which" help:"Only the events of this aggregate."`
	ID        string        `name:"id" placeholder:"ULID" xor:"which" help:"Only the event with this id."`
	Type      string        `placeholder:"TYPE" help:"Only events of this type."`
	Payload   bool          `help:"Show payloads."`
}

// aggregateArg is an aggregate as TYPE/ID.
type aggregateArg outbox.Aggregate

var _ encoding.TextUnmarshaler = (*aggregateArg)(nil)

// UnmarshalText splits at the first slash: an id may contain more.
func (a *aggregateArg) UnmarshalText(text []byte) error {
	var ok bool
	if a.Type, a.ID, ok = strings.Cut(string(text), "/"); !ok || a.Type == "" || a.ID == "" {
		return fmt.Errorf("%q is not TYPE/ID", text)
	}
	return nil
}

// Validate refuses what no log can have.
func (c *eventsCmd) Validate() error {
	if c.After < 0 || c.Limit < 0 {
		return errors.New("--after and --limit are not negative")
	}
	return nil
}

// Run prints the events that the flags select, in log order.
func (c *eventsCmd) Run(ctx context.Context, out output) error {
	db, err := c.openReader(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	log, err := outbox.OpenReader(ctx, db)
	if err != nil {
		return err
	}
	if c.JSON {
		return c.each(ctx, log, func(r *outbox.Record) error { return writeJSON(out.Out, c.document(r)) })
	}
	return c.printTable(ctx, log, out.Out)
}

// pageRows is how many events are read at a time, so that a long log neither
// fills the memory nor keeps the WAL from being reset.
const pageRows = 500

// each calls show for every selected event, in log order.
func (c *eventsCmd) each(ctx context.Context, log *outbox.Log, show func(*outbox.Record) error) error {
	after, shown := c.After, 0
	for {
		page, last, err := c.page(ctx, log, after)
		if err != nil {
			return err
		}
		for i := range page {
			r := &page[i]
			after = r.Position
			if r.Position <= c.After || c.Type != "" && r.Type != c.Type {
				continue
			}
			if err := show(r); err != nil {
				return err
			}
			if shown++; shown == c.Limit {
				return nil
			}
		}
		if last || ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// page reads the next events; last: there are no more.
func (c *eventsCmd) page(ctx context.Context, log *outbox.Log, after int64) (page []outbox.Record, last bool, err error) {
	switch {
	case c.ID != "":
		r, err := log.Get(ctx, strings.ToUpper(c.ID))
		return []outbox.Record{r}, true, err
	case c.Aggregate != nil:
		page, err = log.Aggregate(ctx, outbox.Aggregate(*c.Aggregate))
		return page, true, err
	default:
		page, err = log.Read(ctx, after, outbox.Page{Rows: pageRows, Bytes: 8 << 20})
		return page, len(page) == 0, err
	}
}

func (c *eventsCmd) printTable(ctx context.Context, log *outbox.Log, w io.Writer) error {
	t := newTable(w)
	fmt.Fprint(t, "POSITION\tCREATED\tID\tTYPE\tAGGREGATE\tVERSION")
	if c.Payload {
		fmt.Fprint(t, "\tPAYLOAD")
	}
	fmt.Fprintln(t)
	err := c.each(ctx, log, func(r *outbox.Record) error {
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s/%s\t%d", r.Position, stamp(r.CreatedAt), r.EventID,
			printable(r.Type), printable(r.AggregateType), printable(r.AggregateID), r.AggregateVersion)
		if c.Payload {
			fmt.Fprintf(t, "\t%s", printable(string(r.Payload)))
		}
		_, err := fmt.Fprintln(t)
		return err
	})
	if err != nil {
		return err
	}
	return t.Flush()
}

// eventDocument is an event as --json prints it. A payload that is JSON is
// printed as it is, any other as base64.
type eventDocument struct {
	Position         int64             `json:"position"`
	EventID          string            `json:"event_id"`
	AggregateType    string            `json:"aggregate_type"`
	AggregateID      string            `json:"aggregate_id"`
	AggregateVersion int64             `json:"aggregate_version"`
	Type             string            `json:"type"`
	SchemaVersion    int               `json:"schema_version"`
	ContentType      string            `json:"content_type"`
	Headers          map[string]string `json:"headers,omitempty"`
	CreatedAt        time.Time         `json:"created_at"`
	Payload          json.RawMessage   `json:"payload,omitempty"`
	PayloadBase64    []byte            `json:"payload_base64,omitempty"`
}

func (c *eventsCmd) document(r *outbox.Record) eventDocument {
	d := eventDocument{
		Position: r.Position, EventID: r.EventID,
		AggregateType: r.AggregateType, AggregateID: r.AggregateID, AggregateVersion: r.AggregateVersion,
		Type: r.Type, SchemaVersion: r.SchemaVersion, ContentType: r.ContentType, CreatedAt: r.CreatedAt,
	}
	d.Headers, _ = r.Headers() // damaged ones must not hide the event
	switch {
	case !c.Payload:
	case json.Valid(r.Payload):
		d.Payload = r.Payload
	default:
		d.PayloadBase64 = r.Payload
	}
	return d
}
