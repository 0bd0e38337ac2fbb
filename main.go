// Outlog runs the order service with its outbox, relay, broker and consumers
// in one process, and the tools around it.
package main

import (
	"os"

	"outlog/internal/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr)) }
