package broker

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"outlog/outbox"
	"outlog/relay"
)

// The headers of a message: the CloudEvents NATS binding in binary mode, and
// beside it what CloudEvents has no attribute for. The body is the payload,
// byte for byte. Values are percent-encoded as the binding says.
//
// A usual message has at most 14 headers when it is delivered, with the two of
// NATS. That is on purpose: a fifteenth makes the client library's header map
// grow once more, and reading a header then takes 1.7 times as long. So the
// aggregate type is in ce-source alone, values that are usual are left out, and
// Record.Previous, which only the log can follow, is not carried.
const (
	hdrSpecVersion = "ce-specversion"     // always "1.0"
	hdrID          = "ce-id"              // the event's ULID
	hdrSource      = "ce-source"          // outlog/<log id>/<aggregate type>, a relative URI
	hdrType        = "ce-type"            // the event type
	hdrSubject     = "ce-subject"         // the aggregate id; absent when empty
	hdrTime        = "ce-time"            // created_at, RFC 3339 in UTC with microseconds
	hdrContentType = "ce-datacontenttype" // a content-type header could be taken for structured mode

	hdrLog       = "outlog-log"            // the log's id: who wrote this
	hdrPosition  = "outlog-position"       // place in the log
	hdrPrev      = "outlog-prev"           // position of the outlog message before it on the stream; absent for the first
	hdrVersion   = "outlog-version"        // aggregate version
	hdrSchema    = "outlog-schema-version" // version of the payload's schema; absent when 1
	hdrHeaders   = "outlog-headers"        // the event's own headers as the log holds them; absent when {}
	hdrCreatedAt = "outlog-created-at"     // microseconds since 1970, only when RFC 3339 has no such year
)

// timeLayout is RFC 3339 with exactly six digits, so that equal times are equal
// bytes.
const timeLayout = "2006-01-02T15:04:05.000000Z07:00"

// maxToken bounds a subject token. A name of 128 bytes, the longest the log
// accepts, always fits: three bytes for each of its own.
const maxToken = 400

// subjectPrefix begins every subject of the stream.
const subjectPrefix = "outlog"

// subject is where a record is published: outlog.<aggregate type>.<event type>.
// It never holds the aggregate id: the server keeps every subject in memory.
func subject(r *outbox.Record) string {
	return subjectPrefix + "." + token(r.AggregateType, maxToken) + "." + token(r.Type, maxToken)
}

// encoder builds messages. It reuses one header map for all of them, because
// building such a map costs more than publishing one message, and
// the client library writes a message out before PublishMsgAsync returns.
type encoder struct {
	header nats.Header
	values [headerCount]string
	slices [headerCount][]string
	// routes remembers escaped names: there are few.
	routes map[routeKey]route
}

const headerCount = 15

var headerNames = [headerCount]string{
	hdrSpecVersion, hdrID, hdrSource, hdrType, hdrSubject, hdrTime, hdrContentType,
	hdrLog, hdrPosition, hdrPrev, hdrVersion, hdrSchema, hdrHeaders, hdrCreatedAt, hdrExpected,
}

type routeKey struct{ logID, aggregateType, eventType string }

type route struct{ subject, source, eventType string }

// maxRoutes bounds the encoder's memory of escaped names.
const maxRoutes = 4096

func newEncoder() *encoder {
	e := &encoder{header: make(nats.Header, headerCount), routes: map[routeKey]route{}}
	for i := range e.slices {
		e.slices[i] = e.values[i : i+1 : i+1]
	}
	return e
}

// encode fills the header for m and returns it with the subject. Both are valid
// until the next call. expect is the value of Nats-Expected-Last-Sequence; ""
// leaves it out.
func (e *encoder) encode(m *relay.Message, expect string) (string, nats.Header) {
	r := &m.Record
	to := e.route(m)
	created := r.CreatedAt.UTC()
	at, micros := created.Format(timeLayout), ""
	if y := created.Year(); y < 0 || y > 9999 {
		at, micros = "", strconv.FormatInt(created.UnixMicro(), 10)
	}
	headers := escape(r.RawHeaders, jsonSafe)
	switch headers {
	case "":
		headers = noHeaders
	case "{}":
		headers = ""
	}
	e.values = [headerCount]string{
		"1.0",
		escape(r.EventID, headerSafe),
		to.source,
		to.eventType,
		escape(r.AggregateID, headerSafe),
		at,
		escape(r.ContentType, headerSafe),
		escape(m.LogID, headerSafe),
		strconv.FormatInt(r.Position, 10),
		omit(m.Prev, 0),
		strconv.FormatInt(r.AggregateVersion, 10),
		omit(int64(r.SchemaVersion), 1),
		headers,
		micros,
		expect,
	}
	for i, name := range headerNames {
		if e.values[i] == "" {
			e.header[name] = nil // written as no line at all
		} else {
			e.header[name] = e.slices[i]
		}
	}
	return to.subject, e.header
}

// noHeaders stands for RawHeaders that are empty, because an absent header stands
// for the usual {}. No other text is written like it: the '%' of a text becomes
// %25.
const noHeaders = "%"

// omit writes n, or nothing where n is what an absent header means.
func omit(n, absent int64) string {
	if n == absent {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

func (e *encoder) route(m *relay.Message) route {
	key := routeKey{m.LogID, m.Record.AggregateType, m.Record.Type}
	if to, ok := e.routes[key]; ok {
		return to
	}
	if len(e.routes) >= maxRoutes {
		clear(e.routes)
	}
	to := route{
		subject:   subject(&m.Record),
		source:    escape("outlog/"+escape(key.logID, tokenSafe)+"/"+escape(key.aggregateType, tokenSafe), headerSafe),
		eventType: escape(key.eventType, headerSafe),
	}
	e.routes[key] = to
	return to
}

// decode reads a message back. A message that no outlog relay wrote, or that is
// damaged in a field the log needs, comes back empty: its LogID is "". It never
// panics, whatever the header holds. data may be nil.
func decode(h nats.Header, data []byte) relay.Message {
	m, err := decodeHeader(h)
	if err != nil {
		return relay.Message{}
	}
	m.Record.Payload = data
	return m
}

func decodeHeader(h nats.Header) (m relay.Message, err error) {
	text := func(name string) string {
		if v := h[name]; len(v) > 0 {
			return unescape(v[0])
		}
		return ""
	}
	number := func(name string, least int64) int64 {
		v := h[name]
		if len(v) == 0 {
			if least > 0 {
				err = fmt.Errorf("no %s", name)
			}
			return 0
		}
		n, bad := strconv.ParseInt(v[0], 10, 64)
		if bad != nil || n < least {
			err = fmt.Errorf("%s is %q", name, v[0])
		}
		return n
	}
	m.LogID = text(hdrLog)
	m.Prev = number(hdrPrev, 0)
	m.Record = outbox.Record{
		Position:         number(hdrPosition, 1),
		EventID:          text(hdrID),
		AggregateType:    aggregateType(text(hdrSource)),
		AggregateID:      text(hdrSubject),
		AggregateVersion: number(hdrVersion, -1<<63),
		Type:             text(hdrType),
		SchemaVersion:    1,
		ContentType:      text(hdrContentType),
		RawHeaders:       rawHeaders(h),
	}
	if len(h[hdrSchema]) > 0 {
		m.Record.SchemaVersion = int(number(hdrSchema, -1<<63))
	}
	if m.LogID == "" || m.Record.EventID == "" {
		return m, fmt.Errorf("no %s or %s", hdrLog, hdrID)
	}
	if err != nil {
		return m, err
	}
	m.Record.CreatedAt, err = decodeTime(h)
	return m, err
}

// aggregateType returns the decoded last segment of a ce-source.
func aggregateType(source string) string {
	return unescape(source[strings.LastIndexByte(source, '/')+1:])
}

func rawHeaders(h nats.Header) string {
	v := h[hdrHeaders]
	switch {
	case len(v) == 0:
		return "{}"
	case v[0] == noHeaders:
		return ""
	}
	return unescape(v[0])
}

func decodeTime(h nats.Header) (time.Time, error) {
	if v := h[hdrTime]; len(v) > 0 {
		t, err := time.Parse(timeLayout, v[0])
		return t.UTC(), err
	}
	if v := h[hdrCreatedAt]; len(v) > 0 {
		n, err := strconv.ParseInt(v[0], 10, 64)
		return time.UnixMicro(n).UTC(), err
	}
	return time.Time{}, fmt.Errorf("no %s", hdrTime)
}
