package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/alecthomas/kong"
)

// Exit statuses.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// commands is the grammar of the command line.
type commands struct {
	Serve     serveCmd     `cmd:"" help:"Run the order service with relay, broker, consumers and HTTP."`
	Demo      demoCmd      `cmd:"" help:"Place orders, kill the service again and again, and show that every promise is kept."`
	Torture   tortureCmd   `cmd:"" help:"Hurt the service in every way for a time, and check from outside that every promise was kept."`
	Verify    verifyCmd    `cmd:"" help:"Check that log, stream, consumers and orders agree."`
	Status    statusCmd    `cmd:"" help:"Show how far relay and consumers are behind the log."`
	Events    eventsCmd    `cmd:"" help:"Show events of the log."`
	Dead      deadCmd      `cmd:"" help:"List, show, redrive and discard dead letters."`
	Consumers consumersCmd `cmd:"" help:"List, pause, resume, reset and remove consumers."`
	Prune     pruneCmd     `cmd:"" help:"Remove old events that nobody needs any more, after archiving them if told to."`
	Version   versionCmd   `cmd:"" help:"Show the version of this program and of what is in it."`
}

// output is where a command writes: documents to Out, words to Err.
type output struct {
	Out, Err io.Writer
}

// errReported ends a command with status 1 when its output has said why.
var errReported = errors.New("failed")

// Main runs the command line and returns the exit status.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, stop := untilSignal()
	defer stop()
	return run(ctx, args, output{stdout, stderr})
}

func run(ctx context.Context, args []string, out output) (status int) {
	// --help prints, then exits in the middle of parsing.
	type exited int
	defer func() {
		if p := recover(); p != nil {
			code, ok := p.(exited)
			if !ok {
				panic(p)
			}
			status = int(code)
		}
	}()
	parser, err := kong.New(&commands{},
		kong.Name("outlog"),
		kong.Description("A transactional outbox in one process: SQLite holds the truth, NATS JetStream carries it, consumers apply it once."),
		kong.Writers(out.Out, out.Err),
		kong.Exit(func(code int) { panic(exited(code)) }),
		kong.DefaultEnvars("OUTLOG"),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(out),
	)
	if err != nil {
		panic(err) // the grammar is wrong
	}
	command, err := parser.Parse(args)
	if err != nil {
		return usage(parser, err, out)
	}
	switch err := command.Run(); {
	case err == nil:
		return exitOK
	case errors.Is(err, errReported):
		return exitFailed
	default:
		fmt.Fprintf(out.Err, "outlog: %v\n", withHint(err))
		return exitFailed
	}
}

// usage prints how the command is used, and what was wrong.
func usage(parser *kong.Kong, err error, out output) int {
	parser.Stdout = out.Err
	if wrong, ok := errors.AsType[*kong.ParseError](err); ok {
		_ = wrong.Context.PrintUsage(true)
	}
	fmt.Fprintf(out.Err, "\noutlog: %v\n", err)
	return exitUsage
}
