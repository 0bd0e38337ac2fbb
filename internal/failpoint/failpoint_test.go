package failpoint_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/internal/failpoint"
)

// childFlag makes the test binary reach StoreAfterCommit three times under the
// spec behind it.
const childFlag = "-fail-at"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == childFlag {
		spec, err := failpoint.Parse(os.Args[2])
		if err != nil {
			panic(err)
		}
		hook := spec.Hook()
		for i := range 3 {
			fmt.Println(i+1, hook(failpoint.StoreAfterCommit))
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child returns what a child process printed and how it ended.
func child(t *testing.T, spec failpoint.Spec) (string, *os.ProcessState) {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, childFlag, spec.String())
	out, err := cmd.Output()
	if _, ok := errors.AsType[*exec.ExitError](err); !ok {
		require.NoError(t, err)
	}
	return string(out), cmd.ProcessState
}

func TestActionsInChild(t *testing.T) {
	at := func(a failpoint.Action) failpoint.Spec {
		return failpoint.Spec{Point: failpoint.StoreAfterCommit, Hit: 2, Action: a}
	}
	out, state := child(t, at(failpoint.ActionError))
	require.Equal(t, "1 <nil>\n2 store.after-commit: injected failure\n3 <nil>\n", out)
	require.Zero(t, state.ExitCode())

	out, state = child(t, at(failpoint.ActionExit))
	require.Equal(t, "1 <nil>\n", out)
	require.Equal(t, failpoint.ExitStatus, state.ExitCode())

	out, state = child(t, at(failpoint.ActionKill))
	require.Equal(t, "1 <nil>\n", out)
	if runtime.GOOS != "windows" {
		require.Equal(t, "signal: killed", state.String())
	}
}

func TestEveryTime(t *testing.T) {
	boom := errors.New("boom")
	hook := failpoint.At(failpoint.RelayAfterPublish, 0, failpoint.Fail(boom))
	require.Equal(t, boom, hook(failpoint.RelayAfterPublish))
	require.Equal(t, boom, hook(failpoint.RelayAfterPublish))
	require.NoError(t, hook(failpoint.StoreAfterCommit))
}

func TestAllStopsAtTheFirstError(t *testing.T) {
	var calls int
	count := func(string) error { calls++; return nil }
	hook := failpoint.All(count, failpoint.At(failpoint.StoreBeforeCommit, 1, failpoint.Fail(failpoint.ErrInjected)), count)
	require.ErrorIs(t, hook(failpoint.StoreBeforeCommit), failpoint.ErrInjected)
	require.Equal(t, 1, calls)
	require.NoError(t, hook(failpoint.StoreBeforeCommit))
	require.Equal(t, 3, calls)
}

func TestGate(t *testing.T) {
	gate := failpoint.NewGate()
	hook := failpoint.At(failpoint.ConsumerAfterHandler, 2, gate.Wait)
	require.NoError(t, hook(failpoint.ConsumerAfterHandler))
	passed := make(chan error)
	go func() { passed <- hook(failpoint.ConsumerAfterHandler) }()
	<-gate.Reached()
	select {
	case <-passed:
		t.Fatal("went through a closed gate")
	default:
	}
	gate.Open()
	gate.Open()
	require.NoError(t, <-passed)
	require.NoError(t, gate.Wait())
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"", "store.after-commit", "store.after-commit:1", "store.after-comit:1:kill",
		"store.after-commit:x:kill", "store.after-commit:-1:kill", "store.after-commit:1:die"} {
		_, err := failpoint.Parse(text)
		require.Error(t, err, text)
	}
	for _, point := range failpoint.Points {
		for _, action := range failpoint.Actions {
			want := failpoint.Spec{Point: point, Hit: 3, Action: action}
			got, err := failpoint.Parse(want.String())
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
	}
}
