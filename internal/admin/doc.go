// Package admin is what an operator sees of a database and does to it: the same
// code with and without a running node, because it works on the tables.
//
// What reads does so in one snapshot and stays out of the writer's way. What
// changes something does it in short immediate transactions, each guarded by
// the state it expects to find, so that it may be repeated, run twice at the
// same time, or run beside the node: a running consumer looks at the tables
// every consumer.Options.Poll, and again in the transaction of every batch.
//
// dead.go and redrive.go are about dead letters, consumers.go and the files
// after it about consumers.
package admin
