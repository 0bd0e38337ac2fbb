package cli

import (
	"fmt"
	"io"
	"strings"

	"outlog/store"
)

// demoDocument is the verdict of demo.
type demoDocument struct {
	OK         bool                   `json:"ok"`
	Orders     int                    `json:"orders"`       // accepted
	Events     int                    `json:"events"`       // in the log
	Kills      int                    `json:"kills"`        // done
	Lost       int                    `json:"lost"`         // events of accepted orders that a consumer has not applied
	Duplicated int                    `json:"duplicated"`   // effects applied more than once
	OutOfOrder int                    `json:"out_of_order"` // effects of version k+1 before k
	Ghosts     int                    `json:"ghosts"`       // applied or published, and not in the log
	Recovery   []int64                `json:"recovery_ms"`  // per kill, from the kill to ready
	Consumers  map[string]demoApplied `json:"consumers"`

	cancelled int
	checks    []store.Result
	cleanStop error // why the last stop was not in order
}

type demoApplied struct {
	Applied int `json:"applied"`
}

// print writes the summary for people. kept is the directory that is still
// there, "" for none.
func (d *demoDocument) print(w io.Writer, kept string) error {
	t := newTable(w)
	fmt.Fprintf(t, "orders\t%d accepted from %d clients, %d of them cancelled\n", d.Orders, min(demoClients, d.Orders), d.cancelled)
	fmt.Fprintf(t, "events\t%d in the log\n", d.Events)
	if d.Kills > 0 {
		fmt.Fprintf(t, "kills\t%d with SIGKILL under load, ready again after %s ms\n", d.Kills, joinInts(d.Recovery))
	}
	for _, name := range demoConsumers {
		fmt.Fprintf(t, "%s\t%d events applied\n", name, d.Consumers[name].Applied)
	}
	promise := func(name string, broken int, what string) {
		verdict := "none"
		if broken > 0 {
			verdict = fmt.Sprintf("%d BROKEN", broken)
		}
		fmt.Fprintf(t, "%s\t%s\t(%s)\n", name, verdict, what)
	}
	promise("lost", d.Lost, "accepted, and not applied by a consumer")
	promise("duplicated", d.Duplicated, "effect applied more than once")
	promise("out of order", d.OutOfOrder, "version k+1 applied before k")
	promise("ghosts", d.Ghosts, "applied or published, and not in the log")
	for _, c := range d.checks {
		if !c.OK {
			fmt.Fprintf(t, "verify\tFAILED\t%s: %s\n", c.Name, printable(c.Detail))
		}
	}
	if d.cleanStop != nil {
		fmt.Fprintf(t, "stop\tFAILED\t%v\n", d.cleanStop)
	}
	if kept != "" {
		fmt.Fprintf(t, "directory\t%s\n", kept)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	verdict := "Every promise was kept."
	if !d.OK {
		verdict = "A promise was broken."
	}
	_, err := fmt.Fprintf(w, "\n%s\n", verdict)
	return err
}

func joinInts(ns []int64) string {
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(ns)), ", "), "[]")
}
