// Package broker carries the log's events on a JetStream stream inside the
// process. It is the only package of the project that knows NATS; it implements
// relay.Publisher and consumer.Source.
//
// # Model
//
// A Broker supervises one embedded NATS server that listens nowhere. The server
// is started, watched, and started again in process after a failure; two
// connections, one for the relay and one for the consumers, find the server that
// runs now by themselves. The stream is a copy of the log, so the store is never
// trusted: whatever looks damaged is thrown away, and the relay publishes it
// again.
//
//	      start fails, or health fails
//	   ┌──────────── backoff ◄───────────┐
//	   ▼                                 │
//	starting ──► up ── watched ──────────┤
//	   │          └── ctx ends ──► stopped
//	   └── hangs ──► ErrStuck: the process must end; its next start finds the
//	                 marker, and puts the store into quarantine
//
// # Invariants
//
//  1. A message is stored only where the relay said, and none behind the first
//     that was refused: TestAppendAtWrongBaseIsConflict,
//     TestTooLargeMessageLeavesExactPrefix, TestAppendAcrossRestartStoresPrefix.
//     The one exception, another writer inside a window, is never silent:
//     TestIntruderInsideWindowIsConflictWithPrefix.
//  2. Only a message's own fault is a refusal; what is not understood is an
//     outage: TestFailuresByClass.
//  3. A new stream is empty and begins above every sequence used before, also
//     after a restart, and also when the old one's description was damaged:
//     TestRecreateGoesOnAboveFirstSeq, TestOldMessagesThatComeBackAreDeleted.
//  4. A start that hung or died is not tried again on the same store:
//     TestMarkerSendsStoreIntoQuarantine. No index is believed:
//     TestIndexIsRemovedAtStart.
//  5. A server that no longer stores what it acknowledges is replaced:
//     TestDeletedStoreIsNoticed, TestUnansweredPublishesRestartServer. A healthy
//     one is not: TestHealthyServerIsNotRestarted.
//  6. What a header carries comes back byte for byte, and no string can break the
//     protocol or make two subjects one: TestHeadersCarryAnyString,
//     TestTokensAreUnambiguous, FuzzHeaders.
//  7. A message that no relay wrote is never taken for one that it did:
//     TestForeignMessagesHaveNoLog, FuzzDecode.
//  8. A call ends with its context or with the server, and nothing is left behind
//     after Run: TestAppendEndsWithContext, TestFetchFailsWhileBrokerIsDown,
//     TestNothingIsLeftRunning.
//
// # Guarantees and non-guarantees
//
// An acknowledged message survives the death of the process. A power cut may take
// the last second of them; the relay finds that at its next start. Deliveries
// come at least once. A consumer's acknowledgements only move the durable, they
// are no proof that anything was applied. Two processes must never share a store
// directory: the server takes no lock, the caller's lock on the database does it.
//
// Start reading in broker.go (Run), then server.go (start, watch), publisher.go
// (Append) and source.go (Fetch). The wire format is in codec.go.
package broker
