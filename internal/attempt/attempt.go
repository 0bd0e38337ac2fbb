// Package attempt holds what relay and consumers do alike after a failed
// attempt: when to try again, and how to keep and group the error.
package attempt

import (
	"crypto/sha256"
	"encoding/hex"
	"math/rand/v2"
	"regexp"
	"strings"
	"time"
)

// Jitter is the delay after the n-th failed attempt, from 1: anything up to a
// bound that doubles from low to top, so that events that failed together do
// not come back together.
func Jitter(low, top time.Duration, n int) time.Duration {
	bound := top
	if doublings := n - 1; doublings < 63 && low <= top>>doublings {
		bound = low << doublings
	}
	return time.Duration(rand.Int64N(int64(bound) + 1))
}

// MaxErrorBytes bounds the error text that is kept.
const MaxErrorBytes = 8 << 10

// Shorten cuts an error text to MaxErrorBytes and makes it valid UTF-8.
func Shorten(s string) string {
	if len(s) > MaxErrorBytes {
		s = s[:MaxErrorBytes]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// FirstLine is what of an error fits into a line.
func FirstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

var variable = regexp.MustCompile(`"[^"]*"|'[^']*'|0x[0-9a-fA-F]+|[0-9A-Za-z-]*[0-9][0-9A-Za-z-]*`)

// Fingerprint groups errors that differ only in numbers, ids and quoted text:
// 12 hexadecimal digits.
func Fingerprint(err string) string {
	sum := sha256.Sum256([]byte(variable.ReplaceAllString(FirstLine(err), "*")))
	return hex.EncodeToString(sum[:6])
}
