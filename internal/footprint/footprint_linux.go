package footprint

import (
	"bytes"
	"fmt"
	"os"
	"time"
)

// tick is the unit of times in /proc: 100 a second on every architecture that
// Go runs on.
const tick = 10 * time.Millisecond

// Of returns the footprint of a process; ok is false if there is none.
func Of(pid int) (f Footprint, ok bool) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return f, false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return f, false
	}
	f = memory(status)
	f.CPU = processorTime(stat)
	return f, true
}

// memory reads the two sizes out of the status file.
func memory(status []byte) (f Footprint) {
	for line := range bytes.Lines(status) {
		var kib int64
		if _, err := fmt.Sscanf(string(line), "VmRSS: %d kB", &kib); err == nil {
			f.RSS = kib << 10
		}
		if _, err := fmt.Sscanf(string(line), "VmHWM: %d kB", &kib); err == nil {
			f.Peak = kib << 10
		}
	}
	return f
}

// processorTime reads fields 14 and 15 of the stat file. The second field is the
// program's name in parentheses, which may have anything in it.
func processorTime(stat []byte) time.Duration {
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	var user, system int64
	if len(fields) > 12 {
		_, _ = fmt.Sscan(string(fields[11]), &user)
		_, _ = fmt.Sscan(string(fields[12]), &system)
	}
	return time.Duration(user+system) * tick
}
