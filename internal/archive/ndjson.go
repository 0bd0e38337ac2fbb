package archive

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"time"
	"unicode/utf8"

	"github.com/klauspost/compress/zstd"

	"outlog/outbox"
)

// line is an event as one line of JSON. A payload that is UTF-8 text, byte for
// byte as it was appended, is in payload; any other is in payload_base64.
type line struct {
	Position         int64     `json:"position"`
	EventID          string    `json:"event_id"`
	AggregateType    string    `json:"aggregate_type"`
	AggregateID      string    `json:"aggregate_id"`
	AggregateVersion int64     `json:"aggregate_version"`
	PreviousPosition int64     `json:"previous_position"`
	Type             string    `json:"type"`
	SchemaVersion    int       `json:"schema_version"`
	ContentType      string    `json:"content_type"`
	Headers          string    `json:"headers"` // the column: a JSON object of strings
	CreatedAt        time.Time `json:"created_at"`
	Payload          *string   `json:"payload,omitempty"`
	PayloadBase64    []byte    `json:"payload_base64,omitempty"`
	// Raw has the fields that another program has filled with something other
	// than text, which JSON cannot hold, as base64.
	Raw map[string][]byte `json:"raw,omitempty"`
}

// texts are the fields of a record that should be text.
func texts(r *outbox.Record) map[string]*string {
	return map[string]*string{"event_id": &r.EventID, "aggregate_type": &r.AggregateType, "aggregate_id": &r.AggregateID,
		"type": &r.Type, "content_type": &r.ContentType, "headers": &r.RawHeaders}
}

type ndjson struct {
	zip *zstd.Encoder
	enc *json.Encoder
}

func newNDJSON(w io.Writer) (*ndjson, error) {
	zip, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	enc := json.NewEncoder(zip)
	enc.SetEscapeHTML(false)
	return &ndjson{zip, enc}, nil
}

func (n *ndjson) add(records []outbox.Record) error {
	for i := range records {
		if err := n.enc.Encode(toLine(&records[i])); err != nil {
			return err
		}
	}
	return nil
}

func (n *ndjson) close() error { return n.zip.Close() }

func toLine(r *outbox.Record) line {
	l := line{
		Position: r.Position, EventID: r.EventID, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		AggregateVersion: r.AggregateVersion, PreviousPosition: r.Previous, Type: r.Type, SchemaVersion: r.SchemaVersion,
		ContentType: r.ContentType, Headers: r.RawHeaders, CreatedAt: r.CreatedAt,
	}
	if utf8.Valid(r.Payload) {
		text := string(r.Payload)
		l.Payload = &text
	} else {
		l.PayloadBase64 = r.Payload
	}
	for name, text := range texts(r) {
		if utf8.ValidString(*text) {
			continue
		}
		if l.Raw == nil {
			l.Raw = map[string][]byte{}
		}
		l.Raw[name] = []byte(*text)
	}
	return l
}

func (l *line) record() outbox.Record {
	r := outbox.Record{
		Position: l.Position, EventID: l.EventID, AggregateType: l.AggregateType, AggregateID: l.AggregateID,
		AggregateVersion: l.AggregateVersion, Previous: l.PreviousPosition, Type: l.Type, SchemaVersion: l.SchemaVersion,
		ContentType: l.ContentType, RawHeaders: l.Headers, CreatedAt: l.CreatedAt, Payload: l.PayloadBase64,
	}
	if l.Payload != nil {
		r.Payload = []byte(*l.Payload)
	}
	fields := texts(&r)
	for name, raw := range l.Raw {
		if text, ok := fields[name]; ok {
			*text = string(raw)
		}
	}
	return r
}

func readNDJSON(path string, fn func(outbox.Record) error) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	zip, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	defer zip.Close()
	for in := bufio.NewReader(zip); ; {
		text, err := in.ReadBytes('\n')
		if err == io.EOF && len(bytes.TrimSpace(text)) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			return err
		}
		if err := fn(l.record()); err != nil {
			return err
		}
	}
}
