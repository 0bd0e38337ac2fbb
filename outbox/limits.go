package outbox

import (
	"encoding/json"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/oklog/ulid/v2"
)

// Limits of an event. Together they keep every message under the broker's
// 1 MiB, headers included, however its names have to be escaped.
const (
	MaxNameBytes        = 128       // AggregateType, Type, ContentType, a header's name
	MaxAggregateIDBytes = 512       // AggregateID
	MaxHeaderBytes      = 16 << 10  // all headers as JSON; escaped for the broker they may become three times as long, and it takes 64 KiB
	MaxEventBytes       = 768 << 10 // payload and headers
	maxAhead            = time.Hour // how far in the future a supplied id's time may be
	maxSchemaVersion    = 1_000_000 // anything above is a mistake
	jsonContentType     = "application/json"
)

// prepared is an Event that passed the limits, ready to be stored.
type prepared struct {
	Event
	headers string
}

// prepare fills in defaults and checks every limit.
func prepare(e Event, now time.Time) (prepared, error) {
	if e.SchemaVersion == 0 {
		e.SchemaVersion = 1
	}
	if e.ContentType == "" {
		e.ContentType = jsonContentType
	}
	if e.Payload == nil && e.Data != nil {
		b, err := json.Marshal(e.Data)
		if err != nil {
			return prepared{}, refuse("Data", "", "cannot be marshalled: %v", err)
		}
		e.Payload = b
	}
	if e.Payload == nil {
		e.Payload = []byte{}
	}
	for _, f := range []struct {
		field, value string
		limit        int
	}{
		{"AggregateType", e.AggregateType, MaxNameBytes},
		{"AggregateID", e.AggregateID, MaxAggregateIDBytes},
		{"Type", e.Type, MaxNameBytes},
		{"ContentType", e.ContentType, MaxNameBytes},
	} {
		if err := checkName(f.field, f.value, f.limit); err != nil {
			return prepared{}, err
		}
	}
	switch {
	case e.Version < 0:
		return prepared{}, refuse("Version", "", "is negative")
	case e.SchemaVersion < 1 || e.SchemaVersion > maxSchemaVersion:
		return prepared{}, refuse("SchemaVersion", "", "is %d, must be 1 to %d", e.SchemaVersion, maxSchemaVersion)
	}
	if e.ID != "" {
		id, err := ulid.ParseStrict(strings.ToUpper(e.ID))
		if err != nil {
			return prepared{}, refuse("ID", e.ID, "is not a ULID: %v", err)
		}
		if ulid.Time(id.Time()).After(now.Add(maxAhead)) {
			return prepared{}, refuse("ID", e.ID, "lies more than %v in the future", maxAhead)
		}
		e.ID = id.String()
	}
	headers, err := encodeHeaders(e.Headers)
	if err != nil {
		return prepared{}, err
	}
	if n := len(e.Payload) + len(headers); n > MaxEventBytes {
		return prepared{}, refuse("Payload", "", "and headers have %d bytes, the limit is %d", n, MaxEventBytes)
	}
	if isJSON(e.ContentType) && !json.Valid(e.Payload) {
		return prepared{}, refuse("Payload", string(e.Payload), "is not valid JSON, which ContentType %q declares", e.ContentType)
	}
	return prepared{e, headers}, nil
}

func checkName(field, value string, limit int) error {
	switch {
	case value == "":
		return refuse(field, value, "is empty")
	case len(value) > limit:
		return refuse(field, value, "has %d bytes, the limit is %d", len(value), limit)
	case !utf8.ValidString(value):
		return refuse(field, value, "is not valid UTF-8")
	case strings.ContainsFunc(value, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return refuse(field, value, "contains a control character")
	}
	return nil
}

// encodeHeaders gives the one JSON form of the headers: names sorted.
func encodeHeaders(h map[string]string) (string, error) {
	if len(h) == 0 {
		return "{}", nil
	}
	for name, value := range h {
		if err := checkName("Headers", name, MaxNameBytes); err != nil {
			return "", err
		}
		if !utf8.ValidString(value) {
			return "", refuse("Headers", name, "has a value that is not valid UTF-8")
		}
	}
	b, err := json.Marshal(h)
	if err != nil {
		return "", refuse("Headers", "", "cannot be marshalled: %v", err)
	}
	if len(b) > MaxHeaderBytes {
		return "", refuse("Headers", "", "have %d bytes as JSON, the limit is %d", len(b), MaxHeaderBytes)
	}
	return string(b), nil
}

func isJSON(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	return media == jsonContentType || strings.HasSuffix(media, "+json")
}
