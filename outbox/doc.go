// Package outbox is the event log: the table outbox, written in the same
// transaction as the business rows it tells of.
//
// # Model
//
// position is the rowid and the place in the log. SQLite has one writer at a
// time, so rows become visible in position order: a reader that remembers the
// last position it has seen (a cursor) cannot skip one. This is not true of
// databases with concurrent writers. Positions may have gaps; a gap means
// nothing.
//
// # Invariants, each with its guard
//
//  1. An event is in the log if and only if its transaction committed
//     (TestRollbackExposesNothing).
//  2. Positions are never given out twice, also after everything was pruned
//     (TestSequenceOutlivesPruning; triggers outbox_after_insert).
//  3. Versions of an aggregate are contiguous from 1, also after pruning
//     (trigger outbox_before_insert; check "contiguous versions").
//  4. Rows are never changed, and removed only up to pruned_through
//     (triggers outbox_no_update, outbox_no_delete).
//  5. Append is idempotent per event id (TestAppendSameID).
//
// Start reading at log.go.
package outbox
