// Package consumer applies the events of a log to handlers: each once, in
// order per aggregate.
//
// # Model
//
// The stream says how far, the log says what. A delivery from the stream only
// tells that the log has come to some position; the events themselves are read
// from the log, after the consumer's own cursor. So a message that the log
// does not have is never applied, whatever the stream holds, and a stream that
// is down does not stop the consumer: after Options.Poll it looks by itself.
//
// A batch is one transaction: inbox rows, the handlers' effects, and the
// cursor commit together, and only then are the deliveries acked.
//
// An event is applied when no parked row says otherwise and its inbox row
// exists or the cursor is past it.
//
// # Invariants, each with its guard
//
//  1. The cursor is past an event only if it is applied, parked, discarded, left
//     out by a reset, or of a type without a route (check "consumers agree").
//  2. An event with an inbox row is never handled again (TestRedeliveryIsNotASecondEffect).
//  3. While an event is parked, no later event of its aggregate is handled
//     (TestParkedAggregateWaitsInOrder, TestMixedRoutesKeepOrder).
//  4. A batch commits only if the consumer's row is unchanged
//     (TestTwoInstancesApplyOnce, TestStaleBatchIsNotApplied).
//  5. Only deliveries that are finished are acked (TestAckComesAfterCommit).
//  6. Only a handler that failed counts as an attempt: no outage, no trouble of
//     the database, no stop, no crash (TestOutageInTheMiddleOfABatch,
//     TestDatabaseTroubleIsNoAttemptWhateverTheHandlerSays, TestStopCountsNoAttempt).
//  7. A row in state running has an effect under way, or is made due within
//     Options.Poll (TestCommitThatReportsAnErrorLeavesNothingRunning).
//
// TestModel plays random histories against a model of all of them.
//
// Start reading at batch.go; park.go is what happens to failures.
package consumer
