// Package footprint says what a process takes of the machine.
package footprint

import "time"

// Footprint is what a process has taken so far.
type Footprint struct {
	CPU  time.Duration // user and system time, in steps of 10 ms
	RSS  int64         // resident now, in bytes
	Peak int64         // the most that was ever resident
}
