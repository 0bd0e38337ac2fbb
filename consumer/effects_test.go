package consumer

import (
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/outbox"
)

// TestEndOfAnEffectDoesNotForgetTheNext: between storing a result that makes
// its event due at once and the end of its goroutine, the event may have been
// started again. It must stay known, or it would be taken for one that nobody
// runs, and started beside itself.
func TestEndOfAnEffectDoesNotForgetTheNext(t *testing.T) {
	x := &effects{c: &Consumer{nudged: make(chan struct{}, 1)}, pending: map[string]*effect{}, ended: make(chan struct{})}
	first := &effect{item: item{Record: outbox.Record{EventID: "e"}}}
	again := &effect{item: item{Record: outbox.Record{EventID: "e"}}}
	x.pending["e"] = first
	x.pending["e"] = again
	x.end(first)
	require.Same(t, again, x.pending["e"])
	x.end(again)
	require.Empty(t, x.pending)
}
