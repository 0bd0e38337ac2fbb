package relay

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/outbox"
)

// TestJudge: a failure counts only between two successes of others with no
// other failure in between. q+ is a success of event q, s- its time-out, s! its
// refusal, q? a conflict, and / an outage that reconcile met.
func TestJudge(t *testing.T) {
	for history, want := range map[string]string{
		"q+ s- r+":       "s",
		"q+ s- s- s- r+": "s",
		"q+ s!":          "", // counted elsewhere
		"q+ s! t- r+":    "t",
		"s- r+":          "", // nothing proves that it went well before
		"q+ s- s+":       "",
		"q+ s- s+ r+":    "",
		"q+ s- t- r+":    "", // not it alone
		"q+ s- t- s- r+": "",
		"q+ t- s- s- r+": "",
		"q+ s- / r+":     "",
		"q+ / s- r+":     "",
		"q+ s- q? r+":    "",
		"q+ q? s- r+":    "",
	} {
		t.Run(history, func(t *testing.T) {
			r := &Relay{}
			for step := range strings.FieldsSeq(history) {
				events := []entry{{Record: outbox.Record{EventID: step[:1]}}}
				switch step[1:] {
				case "+":
					r.judge(events, 1, nil)
				case "-":
					r.judge(events, 0, ErrOutage)
				case "!":
					r.judge(events, 0, &RefusedError{})
				case "?":
					r.judge(events, 0, ErrConflict)
				default:
					r.doubt()
				}
			}
			got := ""
			if r.convicted != nil {
				got = r.convicted.event.EventID
			}
			require.Equal(t, want, got)
		})
	}
}
