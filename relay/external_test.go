package relay_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/relay"
)

// TestExternalStreamIsNotDeleted: on a server that is not the relay's alone it
// repairs what costs no message, and leaves the rest as it is until a person
// has decided; then it goes on by itself.
func TestExternalStreamIsNotDeleted(t *testing.T) {
	recreate := func(first uint64) func(r *rig, s *memory) {
		return func(r *rig, s *memory) { require.NoError(r.t, s.Recreate(r.t.Context(), first)) }
	}
	stray := func(r *rig, s *memory) {
		_, err := s.Append(r.t.Context(), s.last(), []relay.Message{{}})
		require.NoError(r.t, err)
	}
	for _, tc := range []struct {
		name    string
		refused string // the reason, "" when it is repaired
		breakIt func(r *rig, s *memory)
	}{
		{"equal", "", func(*rig, *memory) {}},
		{"ahead", "", func(r *rig, _ *memory) {
			r.exec(`UPDATE outlog_relay SET position = 0, event_id = '', stream_seq = 0`)
			r.exec(`DELETE FROM outlog_publications`)
		}},
		{"lost tail", "", func(_ *rig, s *memory) { s.cut(7) }},
		{"gone", "", func(_ *rig, s *memory) { *s = memory{} }},
		{"recreated empty", "", recreate(1)},
		{"crash after it was made anew", "", recreate(5000)},
		{"a stray message at the tail", "message 31 is not of this log", stray},
		{"a stray message alone", "no longer knows", func(r *rig, s *memory) {
			recreate(1)(r, s)
			stray(r, s)
			r.exec(`UPDATE outlog_publications SET first_stream_seq = first_stream_seq + 5, last_stream_seq = last_stream_seq + 5`)
			r.exec(`UPDATE outlog_relay SET stream_seq = stream_seq + 5`)
		}},
		{"an older log beside a newer stream", "not what the log holds", func(r *rig, s *memory) {
			s.msgs[25].Record.EventID = "an event that the log has lost"
			r.exec(`UPDATE outlog_relay SET position = 20, event_id = (SELECT event_id FROM outbox WHERE position = 20), stream_seq = 20`)
			r.exec(`DELETE FROM outlog_publications`)
			r.exec(`INSERT INTO outlog_publications VALUES (1, 20, 1, 20, 0)`)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, s := newLog(t), &memory{}
			r.append(30)
			r.relay(s, relay.Options{External: true})
			tc.breakIt(r, s)
			r.append(5)
			if tc.refused == "" {
				r.relay(s, relay.Options{External: true})
				require.Len(t, r.stream(s), 35)
				return
			}
			before, err := s.Tail(t.Context())
			require.NoError(t, err)
			var log lines
			re, stop := r.start(s, relay.Options{Stream: "OUTLOG_x", External: true, BackoffMax: time.Millisecond, Logger: log.logger()})
			require.Eventually(t, func() bool { return re.Status().LastError != "" }, 10*time.Second, time.Millisecond)
			text := re.Status().LastError
			require.Contains(t, text, tc.refused)
			require.Contains(t, text, "`outlog reconcile --dry-run`")
			require.False(t, re.Status().OutageSince.IsZero())
			after, err := s.Tail(t.Context())
			require.NoError(t, err)
			require.Equal(t, before, after, "nothing may be deleted or published")
			require.NoError(t, s.Recreate(t.Context(), 1)) // the person decides
			require.Eventually(t, func() bool { return re.Status().Position == int64(r.appended) && re.Status().LastError == "" }, 10*time.Second, time.Millisecond)
			stop()
			require.Len(t, r.stream(s), 35)
			require.Equal(t, 1, log.with("until a person decides"))
			require.Equal(t, 1, log.with("relay goes on"))
		})
	}
}

// TestTakenOverOwnerTouchesNoStream: an owner that was taken over while it did
// nothing learns it before it compares the stream with its old cursor, and
// deletes nothing.
func TestTakenOverOwnerTouchesNoStream(t *testing.T) {
	r, s := newLog(t), &memory{}
	r.append(3)
	re, err := relay.New(r.db, r.log, s, relay.Options{Poll: 10 * time.Millisecond})
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- re.Run(t.Context()) }()
	require.Eventually(t, func() bool { return re.Status().Position == 3 && s.stored() == 3 }, 10*time.Second, time.Millisecond)
	r.eventually(3, `SELECT position FROM outlog_relay`)
	r.exec(`UPDATE outlog_relay SET token = token + 1`)
	require.ErrorIs(t, <-done, relay.ErrFenced)
	require.Equal(t, 3, s.stored())
}
