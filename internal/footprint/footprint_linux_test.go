package footprint

import (
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOwnFootprint(t *testing.T) {
	block := make([]byte, 64<<20)
	before, ok := Of(os.Getpid())
	require.True(t, ok)
	for i := range block {
		block[i] = 1
	}
	after, ok := Of(os.Getpid())
	require.True(t, ok)
	require.Greater(t, after.RSS, before.RSS+32<<20, "%d touched bytes are resident", len(block))
	require.GreaterOrEqual(t, after.Peak, after.RSS)
	require.Positive(t, after.CPU)
	runtime.KeepAlive(block)
	_, ok = Of(1 << 30)
	require.False(t, ok)
}

func TestProcessorTime(t *testing.T) {
	// A program may call itself anything.
	stat := "17 (a) b (c) S 1 17 17 0 -1 4194304 99 0 0 0 250 150 3 4 20 0 9 0 8845 1 2 3"
	require.Equal(t, 4*time.Second, processorTime([]byte(stat)))
	require.Zero(t, processorTime([]byte("17 (a) S 1")))
}

func TestMemory(t *testing.T) {
	f := memory([]byte("Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"))
	require.Equal(t, Footprint{RSS: 1 << 20, Peak: 2 << 20}, f)
}
