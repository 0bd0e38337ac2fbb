package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// tortureDocument is the verdict of torture.
type tortureDocument struct {
	OK     bool           `json:"ok"`
	Seed   uint64         `json:"seed"`
	Events int            `json:"events"` // in the log
	Faults map[string]int `json:"faults"` // done, by kind
	promises
	Orders     int       `json:"orders"`      // accepted, and not undone by an older copy
	Cancelled  int       `json:"cancelled"`   // of them
	RolledBack int       `json:"rolled_back"` // events accepted, and undone by an older copy
	RSSMaxMB   int64     `json:"rss_max_mb"`  // of the service; 0 where it cannot be measured
	Recovery   recovered `json:"recovery_ms"` // from the end of a fault to the next accepted order
	Reasons    []string  `json:"reasons,omitempty"`

	left []string // kinds of faults that are not possible here, and why
}

// recovered is how long the service took to accept orders again.
type recovered struct {
	P50 int64 `json:"p50"`
	Max int64 `json:"max"`
}

func spread(ds []time.Duration) recovered {
	if len(ds) == 0 {
		return recovered{}
	}
	sorted := slices.Sorted(slices.Values(ds))
	return recovered{sorted[len(sorted)/2].Milliseconds(), sorted[len(sorted)-1].Milliseconds()}
}

// failed notes why the verdict is not ok, if err says so.
func (d *tortureDocument) failed(err error) {
	if err != nil {
		d.Reasons = append(d.Reasons, err.Error())
	}
}

// print writes the summary for people. kept is the directory that is still
// there, "" for none.
func (d *tortureDocument) print(w io.Writer, kept string) error {
	t := newTable(w)
	fmt.Fprintf(t, "orders\t%d accepted from %d clients, %d of them cancelled\n", d.Orders, clients, d.Cancelled)
	fmt.Fprintf(t, "events\t%d in the log, %d more undone by older copies of it\n", d.Events, d.RolledBack)
	for _, k := range faultKinds {
		fmt.Fprintf(t, "%s\t%d\t(%s)\n", strings.ReplaceAll(k.name, "_", " "), d.Faults[k.name], k.what)
	}
	for _, l := range d.left {
		fmt.Fprintf(t, "left out\t%s\n", l)
	}
	fmt.Fprintf(t, "recovery\torders accepted again after %d ms (median), %d ms (longest)\n", d.Recovery.P50, d.Recovery.Max)
	if d.RSSMaxMB > 0 {
		fmt.Fprintf(t, "memory\t%d MiB at most\n", d.RSSMaxMB)
	}
	d.promises.print(t)
	for _, r := range d.Reasons {
		fmt.Fprintf(t, "FAILED\t%s\n", strings.ReplaceAll(r, "\n", "\n\t"))
	}
	if kept != "" {
		fmt.Fprintf(t, "directory\t%s (what was done: %s)\n", kept, tortureLog)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	verdict := "Every promise was kept."
	if !d.OK {
		verdict = fmt.Sprintf("Something is broken. The same faults again: outlog torture --seed %d", d.Seed)
	}
	_, err := fmt.Fprintf(w, "\n%s\n", verdict)
	return err
}
