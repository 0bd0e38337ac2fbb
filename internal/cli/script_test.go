package cli_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"outlog/internal/cli"
	"outlog/internal/lock"
	"outlog/outbox"
	"outlog/store"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"outlog": func() { os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr)) },
	})
}

// TestScripts runs testdata/*.txtar, which also document the commands.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"append": appendEvent,
			"exits":  exits,
			"hold":   hold,
		},
	})
}

// appendEvent is: append DIR TYPE/ID EVENT-TYPE PAYLOAD. It makes the database if it
// is not there.
func appendEvent(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 4 {
		ts.Fatalf("usage: append DIR TYPE/ID EVENT-TYPE PAYLOAD")
	}
	dir := ts.MkAbs(args[0])
	ts.Check(os.MkdirAll(dir, 0o700))
	ctx := context.Background()
	db, err := store.Open(ctx, store.Options{Path: filepath.Join(dir, "outlog.db")})
	ts.Check(err)
	log, err := outbox.Open(ctx, db)
	ts.Check(err)
	aggregateType, id, _ := strings.Cut(args[1], "/")
	ts.Check(db.Update(ctx, func(tx *store.Tx) error {
		_, err := log.Append(ctx, tx, outbox.Event{AggregateType: aggregateType, AggregateID: id, Type: args[2],
			Payload: []byte(args[3]), Headers: map[string]string{"correlation_id": "c1"}})
		return err
	}))
	ts.Check(db.Close())
}

// exits is: exits STATUS COMMAND [ARG…]. It runs a command that must end with this
// status.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits STATUS COMMAND [ARG...]")
	}
	status := 0
	err := ts.Exec(args[1], args[2:]...)
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if strconv.Itoa(status) != args[0] {
		ts.Fatalf("%s exits with status %d, want %s", args[1], status, args[0])
	}
}

// hold is: hold DIR. The script owns the directory from there to its end.
func hold(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: hold DIR")
	}
	l, err := lock.Acquire(filepath.Join(ts.MkAbs(args[0]), "outlog.db"))
	ts.Check(err)
	ts.Check(l.SetAddress("127.0.0.1:4711"))
	ts.Defer(func() { ts.Check(l.Release()) })
}
