package cli_test

import (
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	_ "modernc.org/sqlite" // driver "sqlite", to damage databases past our own code

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
		Setup: func(env *testscript.Env) error {
			env.Values[runningKey] = running{}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"append": scriptAppend,
			"exits":  scriptExits,
			"hold":   scriptHold,
			"http":   scriptHTTP,
			"id":     scriptID,
			"kill":   scriptKill,
			"mode":   scriptMode,
			"murder": scriptMurder,
			"serve":  scriptServe,
			"sql":    scriptSQL,
			"stop":   scriptStop,
			"until":  scriptUntil,
		},
	})
}

// arguments fails the script when a command is used wrongly.
func arguments(ts *testscript.TestScript, neg, ok bool, usage string) {
	if neg || !ok {
		ts.Fatalf("usage: %s", usage)
	}
}

// scriptAppend puts an event into the log of a directory, which it makes if it
// is not there.
func scriptAppend(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 4, "append DIR TYPE/ID EVENT-TYPE PAYLOAD")
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

// scriptExits runs a command that must end with this status.
func scriptExits(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) > 1, "exits STATUS COMMAND [ARG...]")
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

// scriptUntil repeats a command until what it prints matches.
func scriptUntil(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) > 1, "until REGEXP COMMAND [ARG...]")
	want, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	for began := time.Now(); time.Since(began) < 20*time.Second; {
		ts.Check(ts.Exec(args[1], args[2:]...))
		if want.MatchString(ts.ReadFile("stdout")) {
			return
		}
	}
	ts.Fatalf("never printed %s", args[0])
}

// scriptID puts the id of the event at a position into $ID.
func scriptID(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 2, "id DIR POSITION")
	db, err := store.OpenReader(context.Background(), filepath.Join(ts.MkAbs(args[0]), "outlog.db"))
	ts.Check(err)
	var id string
	err = db.Reader().QueryRow(`SELECT event_id FROM outbox WHERE position = ?`, args[1]).Scan(&id)
	ts.Check(errors.Join(err, db.Close()))
	ts.Setenv("ID", id)
}

// scriptHold owns a directory until the script ends.
func scriptHold(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 1, "hold DIR")
	l, err := lock.Acquire(filepath.Join(ts.MkAbs(args[0]), "outlog.db"))
	ts.Check(err)
	ts.Check(l.SetAddress("127.0.0.1:4711"))
	ts.Defer(func() { ts.Check(l.Release()) })
}

// scriptMode checks the permission bits of a file.
func scriptMode(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 2, "mode OCTAL FILE")
	st, err := os.Stat(ts.MkAbs(args[1]))
	ts.Check(err)
	if got := strconv.FormatUint(uint64(st.Mode()&fs.ModePerm), 8); got != args[0] {
		ts.Fatalf("%s has mode %s, want %s", args[1], got, args[0])
	}
}

// scriptMurder kills the owner of a directory that is being tortured, after the
// first fault.
func scriptMurder(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 1, "murder DIR")
	dir := ts.MkAbs(args[0])
	for began := time.Now(); time.Since(began) < 20*time.Second; {
		log, _ := os.ReadFile(filepath.Join(dir, "torture.log"))
		owner, held, err := lock.Holder(filepath.Join(dir, "outlog.db"))
		if err != nil || !held || owner.PID == 0 || !strings.Contains(string(log), "orders are accepted") {
			continue
		}
		p, err := os.FindProcess(owner.PID)
		ts.Check(err)
		ts.Check(p.Kill())
		return
	}
	ts.Fatalf("nobody owns %s", dir)
}

// scriptSQL changes a database behind the service's back.
func scriptSQL(ts *testscript.TestScript, neg bool, args []string) {
	arguments(ts, neg, len(args) == 2, "sql DIR STATEMENTS")
	db, err := sql.Open("sqlite", filepath.Join(ts.MkAbs(args[0]), "outlog.db"))
	ts.Check(err)
	_, err = db.Exec(args[1])
	ts.Check(errors.Join(err, db.Close()))
}
