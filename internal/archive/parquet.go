package archive

import (
	"errors"
	"io"
	"os"
	"time"

	"github.com/parquet-go/parquet-go"

	"outlog/outbox"
)

// row is an event as a row of a Parquet file: strings, 64-bit integers, a
// timestamp of microseconds UTC, and the payload as bytes.
type row struct {
	Position         int64  `parquet:"position"`
	EventID          string `parquet:"event_id"`
	AggregateType    string `parquet:"aggregate_type,dict"`
	AggregateID      string `parquet:"aggregate_id"`
	AggregateVersion int64  `parquet:"aggregate_version"`
	PreviousPosition int64  `parquet:"previous_position"`
	Type             string `parquet:"type,dict"`
	SchemaVersion    int64  `parquet:"schema_version"`
	ContentType      string `parquet:"content_type,dict"`
	Headers          string `parquet:"headers"`
	CreatedAt        int64  `parquet:"created_at,timestamp(microsecond)"`
	Payload          []byte `parquet:"payload"`
}

// rowGroup is how many events lie together, which is also how many are held in
// memory while a file is written.
const rowGroup = 10_000

type parquetFile struct {
	w    *parquet.GenericWriter[row]
	held int
}

func newParquet(w io.Writer) *parquetFile {
	return &parquetFile{w: parquet.NewGenericWriter[row](w, parquet.Compression(&parquet.Zstd), parquet.CreatedBy("outlog", "1", ""))}
}

func (p *parquetFile) add(records []outbox.Record) error {
	rows := make([]row, len(records))
	for i := range records {
		rows[i] = toRow(&records[i])
	}
	if _, err := p.w.Write(rows); err != nil {
		return err
	}
	if p.held += len(rows); p.held < rowGroup {
		return nil
	}
	p.held = 0
	return p.w.Flush()
}

func (p *parquetFile) close() error { return p.w.Close() }

func toRow(r *outbox.Record) row {
	return row{
		Position: r.Position, EventID: r.EventID, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		AggregateVersion: r.AggregateVersion, PreviousPosition: r.Previous, Type: r.Type, SchemaVersion: int64(r.SchemaVersion),
		ContentType: r.ContentType, Headers: r.RawHeaders, CreatedAt: r.CreatedAt.UnixMicro(), Payload: r.Payload,
	}
}

func (r *row) record() outbox.Record {
	return outbox.Record{
		Position: r.Position, EventID: r.EventID, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		AggregateVersion: r.AggregateVersion, Previous: r.PreviousPosition, Type: r.Type, SchemaVersion: int(r.SchemaVersion),
		ContentType: r.ContentType, RawHeaders: r.Headers, CreatedAt: time.UnixMicro(r.CreatedAt).UTC(), Payload: r.Payload,
	}
}

func readParquet(path string, fn func(outbox.Record) error) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	in := parquet.NewGenericReader[row](f)
	defer func() { err = errors.Join(err, in.Close()) }()
	rows := make([]row, 1000)
	for {
		n, err := in.Read(rows)
		for i := range rows[:n] {
			r := rows[i].record()
			r.Payload = append([]byte(nil), r.Payload...) // the reader uses it again
			if err := fn(r); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
