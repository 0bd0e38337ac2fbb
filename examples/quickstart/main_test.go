package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/node"
)

// TestQuickstart runs the program twice on one directory: the second run adds
// an order, and applies the first one's event no second time.
func TestQuickstart(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	var out strings.Builder
	require.NoError(t, run(ctx, dir, &out))
	require.NoError(t, run(ctx, dir, &out))
	require.Equal(t, "event 1 is applied, 2 tea reserved\nevent 2 is applied, 4 tea reserved\n", out.String())

	n, err := node.Open(ctx, node.Options{Dir: dir})
	require.NoError(t, err)
	defer n.Close()
	results, err := n.Store().Verify(ctx)
	require.NoError(t, err)
	for _, r := range results {
		require.True(t, r.OK, "%s: %s", r.Name, r.Detail)
	}
}
