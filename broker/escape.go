package broker

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

const upperHex = "0123456789ABCDEF"

// escape writes every byte that keep does not want as %XX. What it returns is
// printable ASCII without space, so it can hold no CR, LF or NUL.
func escape(s string, keep *[256]bool) string {
	n := 0
	for i := 0; i < len(s); i++ {
		if !keep[s[i]] {
			n++
		}
	}
	if n == 0 {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 2*n)
	for i := 0; i < len(s); i++ {
		if c := s[i]; keep[c] {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(upperHex[c>>4])
			b.WriteByte(upperHex[c&15])
		}
	}
	return b.String()
}

// unescape turns %XX back into bytes. A '%' that no two hex digits follow
// stands for itself: that is somebody else's text.
func unescape(s string) string {
	i := strings.IndexByte(s, '%')
	if i < 0 {
		return s
	}
	var b strings.Builder
	b.Grow(len(s))
	b.WriteString(s[:i])
	for ; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			hi, lo := unhex(s[i+1]), unhex(s[i+2])
			if hi < 16 && lo < 16 {
				b.WriteByte(hi<<4 | lo)
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func unhex(c byte) byte {
	switch {
	case '0' <= c && c <= '9':
		return c - '0'
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10
	}
	return 0xff
}

// headerSafe are the bytes that stand for themselves in a CloudEvents header
// value: printable ASCII without space, '"' and '%'.
var headerSafe = safeSet(func(c byte) bool { return c > ' ' && c < 0x7f && c != '"' && c != '%' })

// jsonSafe is headerSafe with '"', for the one header that holds JSON.
var jsonSafe = safeSet(func(c byte) bool { return c > ' ' && c < 0x7f && c != '%' })

// tokenSafe are the bytes that stand for themselves in a subject token, a
// consumer name or a segment of ce-source.
var tokenSafe = safeSet(func(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_'
})

func safeSet(safe func(byte) bool) *[256]bool {
	var set [256]bool
	for c := range 256 {
		set[c] = safe(byte(c))
	}
	return &set
}

// token turns any string into a valid NATS token of at most limit bytes. Two
// strings never share one: letters, digits, '-' and '_' stand for themselves,
// other bytes become %XX, the empty string becomes a lone '%', and what is
// longer than limit is cut and ends in '~' and 128 bits of its SHA-256.
func token(s string, limit int) string {
	if s == "" {
		return "%"
	}
	t := escape(s, tokenSafe)
	if len(t) <= limit {
		return t
	}
	sum := sha256.Sum256([]byte(s))
	return t[:limit-33] + "~" + hex.EncodeToString(sum[:16])
}
