// Package relay follows the event log and puts it on a stream, in log order.
//
// # Model
//
// The relay remembers how far it has come (its cursor: position, event id and
// stream sequence). It reads a window of rows after the cursor and publishes
// them with compare-and-append: message i is accepted only as the stream's
// sequence base+i. So when one message is refused, lost or times out, none
// behind it is stored, and of two relays exactly one wins. There is one
// publishing path; a wake-up is only a nudge.
//
//	read page ─► Durable ─► Append(base, window) ─► cursor in memory ─► saver ─► outlog_relay
//	   ▲                          │ any doubt                                  + outlog_publications
//	   └──── reconcile ◄──────────┘
//
// # Recovery
//
// At start and after every doubt the relay looks at the end of the stream and
// compares it with its cursor, first by sequence, then by content
// (reconcile.go). A time-out proves nothing: the relay never retries blindly.
//
// # What cannot be published
//
// An event that the broker refuses is parked, and its aggregate with it; the
// rest of the log goes on (park.go). An outage is nobody's fault: what counts
// as an attempt, and what does not, is in refusal.go. A parked event comes late:
// at a higher sequence than events after it (publication.go). Local consumers
// read the log and do not notice.
//
// # Invariants, each with its guard
//
//  1. Stream order is log order, but for parked aggregates
//     (TestStreamOrderIsLogOrder); within an aggregate always, unless a dead
//     event is skipped by policy (TestRandomFaults).
//  2. Nothing is published before it is committed and on disk (store.Durable).
//  3. Cursor, publications and parked events change only under this owner's
//     token (TestFenced).
//  4. After reconcile the stream ends exactly at the cursor (TestReconcile).
//  5. Each event up to the cursor is in one publication, parked, discarded, or
//     was too old when the stream was rebuilt (check "published or pending").
//  6. An outage uses up no attempts (TestOutageIsNobodysAttempt).
//
// Start reading at relay.go.
package relay
