// Package cli is the command line: a file per command, and here what they
// share.
//
// Rules for every command: exit status 0 is ok, 1 a failed check or a directory
// that is missing, locked, foreign or newer, 2 wrong usage. With --json, stdout
// has one line per document and nothing else; words for people go to stderr.
// Each flag has a twin in the environment, OUTLOG_ and its name. Only serve and
// demo create a directory.
//
// The scripts in testdata show each command at work.
package cli
