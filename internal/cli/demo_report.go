package cli

import (
	"fmt"
	"io"
	"strings"

	"outlog/store"
)

// demoDocument is the verdict of demo.
type demoDocument struct {
	OK     bool `json:"ok"`
	Orders int  `json:"orders"` // accepted
	Events int  `json:"events"` // in the log
	Kills  int  `json:"kills"`  // done
	promises
	Recovery  []int64            `json:"recovery_ms"` // per kill, from the kill to ready
	Consumers map[string]applied `json:"consumers"`

	cancelled int
	checks    []store.Result
	cleanStop error // why the last stop was not in order
}

// print writes the summary for people. kept is the directory that is still
// there, "" for none.
func (d *demoDocument) print(w io.Writer, kept string) error {
	t := newTable(w)
	fmt.Fprintf(t, "orders\t%d accepted from %d clients, %d of them cancelled\n", d.Orders, min(clients, d.Orders), d.cancelled)
	fmt.Fprintf(t, "events\t%d in the log\n", d.Events)
	if d.Kills > 0 {
		fmt.Fprintf(t, "kills\t%d with SIGKILL under load, ready again after %s ms\n", d.Kills, joinInts(d.Recovery))
	}
	for _, name := range serviceConsumers {
		fmt.Fprintf(t, "%s\t%d events applied\n", name, d.Consumers[name].Applied)
	}
	d.promises.print(t)
	printFailed(t, d.checks)
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

// print writes a row per promise.
func (p promises) print(t io.Writer) {
	for _, row := range []struct {
		name   string
		broken int
		what   string
	}{
		{"lost", p.Lost, "accepted, and not applied by a consumer or not published"},
		{"duplicated", p.Duplicated, "applied or published more than once"},
		{"out of order", p.OutOfOrder, "version k+1 before k"},
		{"ghosts", p.Ghosts, "applied or published, and not in the log"},
	} {
		verdict := "none"
		if row.broken > 0 {
			verdict = fmt.Sprintf("%d BROKEN", row.broken)
		}
		fmt.Fprintf(t, "%s\t%s\t(%s)\n", row.name, verdict, row.what)
	}
}

// printFailed writes a row per check that failed.
func printFailed(t io.Writer, checks []store.Result) {
	for _, c := range checks {
		if !c.OK {
			fmt.Fprintf(t, "verify\tFAILED\t%s: %s\n", c.Name, printable(c.Detail))
		}
	}
}
