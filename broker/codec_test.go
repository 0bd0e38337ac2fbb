package broker

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"outlog/outbox"
	"outlog/relay"
)

// nasty are strings that have broken such systems.
var nasty = []string{
	"", " ", "  padded  ", "a b", "a.b", "*", ">", "a.>", "\x00", "\r\n", "a\r\nce-id: forged", "\n", "\t",
	"%", "%41", "%zz", `"quoted"`, `back\slash`, "größe", "日本語", "😀", "\xff\xfe not UTF-8", "$JS.API", "-", "_", "~",
	"{}", `{"traceparent":"00-ab","name":"Zoë"}`, `{"broken": `, strings.Repeat("ü", 256), strings.Repeat("x", 5000),
}

// wire writes a header as the client library does, and reads it back.
func wire(t testing.TB, h nats.Header) nats.Header {
	t.Helper()
	var b bytes.Buffer
	b.WriteString("NATS/1.0\r\n")
	for name, values := range h {
		for _, v := range values {
			require.False(t, strings.ContainsAny(v, "\r\n\x00 "), "%s: %q", name, v)
			fmt.Fprintf(&b, "%s: %s\r\n", name, v)
		}
	}
	b.WriteString("\r\n")
	back, err := nats.DecodeHeadersMsg(b.Bytes())
	require.NoError(t, err)
	return back
}

func TestHeadersCarryAnyString(t *testing.T) {
	e := newEncoder()
	for _, s := range nasty {
		m := message(7)
		m.Record.AggregateType, m.Record.AggregateID, m.Record.Type = s, s, s
		m.Record.ContentType, m.Record.RawHeaders = s, s
		subject, h := e.encode(&m, "6")
		requireSubject(t, subject)
		require.Equal(t, m, decode(wire(t, h), m.Record.Payload), "%q", s)
	}
}

func TestHeadersFollowTheBinding(t *testing.T) {
	m := message(7)
	m.Record.AggregateType = "big order"
	m.Record.AggregateID = "Euro € 😀"
	m.Record.RawHeaders = `{"correlation_id":"Zoë"}`
	subject, h := newEncoder().encode(&m, "6")
	require.Len(t, wire(t, h), 13, "with Nats-Msg-Size 14, see codec.go")
	require.Equal(t, "outlog.big%20order.OrderCreated", subject)
	require.Equal(t, nats.Header{
		"ce-specversion":              {"1.0"},
		"ce-id":                       {m.Record.EventID},
		"ce-source":                   {"outlog/testlog/big%2520order"},
		"ce-type":                     {"OrderCreated"},
		"ce-subject":                  {"Euro%20%E2%82%AC%20%F0%9F%98%80"},
		"ce-time":                     {"2023-11-14T22:13:20.000007Z"},
		"ce-datacontenttype":          {"application/json"},
		"outlog-log":                  {"testlog"},
		"outlog-position":             {"7"},
		"outlog-prev":                 {"6"},
		"outlog-version":              {"1"},
		"outlog-headers":              {`{"correlation_id":"Zo%C3%AB"}`},
		"Nats-Expected-Last-Sequence": {"6"},
	}, wire(t, h))
}

func TestTimesWithoutRFC3339SurviveTheWire(t *testing.T) {
	for _, at := range []time.Time{
		{}, time.UnixMicro(0), time.UnixMicro(1 << 62), time.UnixMicro(-1 << 62),
		time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC), time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		m := message(1)
		m.Record.CreatedAt = at.UTC()
		_, h := newEncoder().encode(&m, "")
		require.Equal(t, at.UTC(), decode(wire(t, h), nil).Record.CreatedAt)
	}
}

func TestForeignMessagesHaveNoLog(t *testing.T) {
	full := func(change func(nats.Header)) nats.Header {
		m := message(7)
		_, h := newEncoder().encode(&m, "6")
		change(h)
		return h
	}
	for name, h := range map[string]nats.Header{
		"nil":               nil,
		"empty":             {},
		"no values":         {hdrLog: nil, hdrPosition: {}},
		"no log":            full(func(h nats.Header) { delete(h, hdrLog) }),
		"empty log":         full(func(h nats.Header) { h[hdrLog] = []string{""} }),
		"no id":             full(func(h nats.Header) { delete(h, hdrID) }),
		"no position":       full(func(h nats.Header) { delete(h, hdrPosition) }),
		"position 0":        full(func(h nats.Header) { h[hdrPosition] = []string{"0"} }),
		"negative":          full(func(h nats.Header) { h[hdrPosition] = []string{"-1"} }),
		"position overflow": full(func(h nats.Header) { h[hdrPosition] = []string{"99999999999999999999"} }),
		"prev is text":      full(func(h nats.Header) { h[hdrPrev] = []string{"x"} }),
		"version is text":   full(func(h nats.Header) { h[hdrVersion] = []string{"x"} }),
		"no time":           full(func(h nats.Header) { delete(h, hdrTime) }),
		"bad time":          full(func(h nats.Header) { h[hdrTime] = []string{"yesterday"} }),
	} {
		require.Equal(t, relay.Message{}, decode(h, []byte("x")), name)
	}
}

// requireSubject checks that a subject is three valid tokens, and short.
func requireSubject(t testing.TB, subject string) {
	t.Helper()
	require.Less(t, len(subject), 1000)
	tokens := strings.Split(subject, ".")
	require.Len(t, tokens, 3)
	for _, tok := range tokens {
		require.NotEmpty(t, tok)
		for i := 0; i < len(tok); i++ {
			require.True(t, tok[i] > ' ' && tok[i] < 0x7f && tok[i] != '*' && tok[i] != '>', "%q", subject)
		}
	}
}

func TestTokensAreUnambiguous(t *testing.T) {
	seen := map[string]string{}
	for _, s := range append(nasty, "%25", "%2E", "A", "a", strings.Repeat("x", 5001), strings.Repeat("x", maxToken), strings.Repeat("x", maxToken+1)) {
		tok := token(s, maxToken)
		require.LessOrEqual(t, len(tok), maxToken)
		other, taken := seen[tok]
		require.False(t, taken, "%q and %q", s, other)
		seen[tok] = s
	}
	require.Equal(t, strings.Repeat("%C3%BC", 64), token(strings.Repeat("ü", 64), maxToken), "128 bytes always fit")
}

func FuzzHeaders(f *testing.F) {
	for i, s := range nasty {
		f.Add("log", s, nasty[(i+1)%len(nasty)], nasty[(i+2)%len(nasty)], nasty[(i+3)%len(nasty)], nasty[(i+4)%len(nasty)],
			int64(i+1), int64(i), int64(-i), int64(1)<<uint(i))
	}
	f.Fuzz(func(t *testing.T, logID, id, aggregateType, aggregateID, eventType, raw string, position, prev, version, at int64) {
		m := relay.Message{LogID: logID, Prev: prev, Record: outbox.Record{
			Position: position, EventID: id, AggregateType: aggregateType, AggregateID: aggregateID, Type: eventType,
			AggregateVersion: version, SchemaVersion: int(version), ContentType: raw, RawHeaders: raw,
			CreatedAt: time.UnixMicro(at).UTC(),
		}}
		subject, h := newEncoder().encode(&m, "")
		requireSubject(t, subject)
		got := decode(wire(t, h), nil)
		if logID == "" || id == "" || position < 1 || prev < 0 {
			require.Equal(t, relay.Message{}, got)
			return
		}
		require.Equal(t, m, got)
	})
}

func FuzzDecode(f *testing.F) {
	m := message(7)
	_, h := newEncoder().encode(&m, "6")
	for name, v := range h {
		if len(v) > 0 {
			f.Add(name, v[0], "")
			f.Add(name, "", "x")
		}
	}
	f.Add(hdrTime, "0000-00-00T00:00:00.000000Z", "%")
	f.Fuzz(func(t *testing.T, name, value, second string) {
		m := message(7)
		_, h := newEncoder().encode(&m, "6")
		h[name] = []string{value, second}
		got := decode(h, nil)
		require.True(t, got.LogID != "" || got.Record.Position == 0, "half a message")
	})
}
