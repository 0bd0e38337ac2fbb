// Package store is the SQLite database under everything else: one
// group-commit writer, a pool of readers, migrations, and the consistency
// checks that verify runs.
//
// # Model
//
// [DB.Update] runs a callback in a write transaction. Callbacks of concurrent
// callers share one transaction and one fsync; each still succeeds or fails by
// itself (writer.go has the picture). [DB.Reader] is for everything else.
//
// # Invariants, each with its guard
//
//  1. Exactly the callbacks whose Update returned nil are stored
//     (TestUpdateHostileGroup).
//  2. A Tx does nothing after its callback returned (TestTxRevoked).
//  3. No statement runs in autocommit on the writer: a transaction that SQLite
//     ended by itself is dead until the writer begins another
//     (TestUpdateHostileGroup: interrupt, OR ROLLBACK).
//  4. Callbacks cannot commit, roll back or begin (TestTransactionControlRefused).
//  5. Every setting is read back on every connection (TestPragmasReadBack).
//
// With Synchronous FULL a nil Update is durable against power loss. A COMMIT
// that fails in fsync is reported as failed although the disk may have it:
// supply ids if you repeat the work.
//
// Start reading at writer.go; conn.go is what makes it safe.
package store
