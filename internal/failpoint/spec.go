package failpoint

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Action is what a Spec does at its point.
type Action string

// The actions. ExitStatus is the status of an exit, to be told from others.
const (
	ActionError Action = "error" // return ErrInjected
	ActionExit  Action = "exit"  // os.Exit(ExitStatus)
	ActionKill  Action = "kill"  // SIGKILL
	ActionFull  Action = "full"  // return ErrFull, fullHits times

	ExitStatus = 86
)

// Actions lists all actions.
var Actions = []Action{ActionError, ActionExit, ActionKill, ActionFull}

// ErrInjected is what ActionError returns.
var ErrInjected = errors.New("injected failure")

// ErrFull is what ActionFull returns: the disk has no space, for a while.
var ErrFull = fmt.Errorf("injected: %w", syscall.ENOSPC)

const fullHits = 3

// Spec is a hook as text, for the argument list of a child process.
type Spec struct {
	Point  string
	Hit    int // from 1; 0: every time
	Action Action
}

// String returns point:hit:action, which Parse reads.
func (s Spec) String() string { return fmt.Sprintf("%s:%d:%s", s.Point, s.Hit, s.Action) }

// Parse reads what String returns. It refuses points and actions it does not
// know, so that a crash test cannot pass because of a typing error.
func Parse(text string) (Spec, error) {
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return Spec{}, fmt.Errorf("failpoint %q: want point:hit:action", text)
	}
	hit, err := strconv.Atoi(parts[1])
	if err != nil || hit < 0 {
		return Spec{}, fmt.Errorf("failpoint %q: %q is not a count of hits", text, parts[1])
	}
	s := Spec{Point: parts[0], Hit: hit, Action: Action(parts[2])}
	if !slices.Contains(Points, s.Point) {
		return Spec{}, fmt.Errorf("failpoint %q: no such point, there are %s", text, strings.Join(Points, ", "))
	}
	if !slices.Contains(Actions, s.Action) {
		return Spec{}, fmt.Errorf("failpoint %q: no such action, there are %v", text, Actions)
	}
	return s, nil
}

// Hook returns the hook.
func (s Spec) Hook() Hook {
	switch s.Action {
	case ActionExit:
		return At(s.Point, s.Hit, Exit(ExitStatus))
	case ActionKill:
		return At(s.Point, s.Hit, Kill())
	case ActionFull:
		hooks := make([]Hook, fullHits)
		for i := range hooks {
			hooks[i] = At(s.Point, s.Hit+i, Fail(fmt.Errorf("%s: %w", s.Point, ErrFull)))
		}
		return All(hooks...)
	default:
		return At(s.Point, s.Hit, Fail(fmt.Errorf("%s: %w", s.Point, ErrInjected)))
	}
}
