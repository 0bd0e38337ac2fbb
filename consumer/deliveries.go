package consumer

import (
	"cmp"
	"slices"

	"outlog/outbox"
)

// receive takes deliveries over. Those that are not of this log are strays.
func (c *Consumer) receive(ds []Delivery) {
	for _, d := range ds {
		if d.LogID == c.log.ID() {
			c.high = max(c.high, d.Record.Position)
		} else {
			c.stray.Add(1)
		}
		c.waiting = append(c.waiting, d)
	}
}

// settle compares the finished rows, all there are after position from, with
// what was delivered, and acks the deliveries up to the first that is not
// finished. exhausted: after they were delivered, the log held nothing between
// the cursor and the highest of them, so those above the cursor are ghosts.
func (c *Consumer) settle(from int64, rows []outbox.Record, exhausted bool) {
	n := 0
	for _, d := range c.waiting {
		if d.LogID == c.log.ID() {
			p := d.Record.Position
			if p > c.state.position && !exhausted {
				break
			}
			if p > from && !isRow(rows, d.Record) {
				c.stray.Add(1)
			}
		}
		n++
	}
	if n > 0 {
		_ = c.waiting[n-1].Ack() // a lost ack is redelivered, found finished, and acked again
		c.waiting = append(c.waiting[:0], c.waiting[n:]...)
	}
	if exhausted {
		c.high = min(c.high, c.state.position)
	}
}

// isRow reports whether a delivered event is one of the log's rows.
func isRow(rows []outbox.Record, d outbox.Record) bool {
	i, found := slices.BinarySearchFunc(rows, d.Position, func(r outbox.Record, p int64) int { return cmp.Compare(r.Position, p) })
	return found && rows[i].EventID == d.EventID
}
