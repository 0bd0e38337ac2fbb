// Package admin is what an operator sees of a database and does to it: the same
// code with and without a running node, because it works on the tables.
//
// Everything here reads one snapshot and stays out of the writer's way.
package admin
