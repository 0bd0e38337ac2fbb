package relay_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/relay"
)

// TestCheckGrowsWithTheLog lets the log grow to 32 times its size. The check may
// take 32 times as long, or a few times that on a busy machine, but not a thousand
// times, as it does when each publication looks through the rest of the log.
func TestCheckGrowsWithTheLog(t *testing.T) {
	r := newLog(t)
	r.published(400)
	small := r.fastestCheck()
	r.published(31 * 400)
	big := r.fastestCheck()
	t.Logf("%v, then %v", small, big)
	require.Less(t, big, 100*small)
}

// published adds n events and says that ten at a time were published.
func (r *rig) published(n int) {
	r.append(n)
	r.exec(`INSERT INTO outlog_publications
		SELECT min(position), max(position), min(position), max(position), 1 FROM outbox WHERE position > ?
		 GROUP BY (position - 1) / 10`, r.appended-n)
	r.exec(`UPDATE outlog_relay SET position = (SELECT max(position) FROM outbox)`)
}

func (r *rig) fastestCheck() (fastest time.Duration) {
	for range 5 {
		begin := time.Now()
		_, err := relay.Checks[0].Run(r.t.Context(), r.db.Reader())
		require.NoError(r.t, err)
		if d := time.Since(begin); fastest == 0 || d < fastest {
			fastest = d
		}
	}
	return fastest
}
