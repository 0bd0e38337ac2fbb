package orders

import (
	"context"
	"fmt"

	"outlog/store"
)

// notificationRules: the first two are exact for events that the log holds. Of
// a pruned event the id is no longer known: the third rule finds out from the
// order whether there was one; the fourth, and the total in checkNotifications,
// leave exactly one notification for each.
var notificationRules = []rule{
	{"event", `
` + unapplied(Notifications) + `
SELECT e.event_id, CASE WHEN n.event_id IS NULL THEN 'is applied but has no notification' ELSE 'has a notification of another kind or order' END
  FROM outlog_consumers c JOIN outbox e ON e.position > c.start_position LEFT JOIN notifications n ON n.event_id = e.event_id
 WHERE c.name = 'notifications' AND e.aggregate_type = 'order' AND e.type IN ('OrderCreated', 'OrderCancelled')
   AND e.event_id NOT IN (SELECT event_id FROM unapplied)
   AND (n.order_id, n.kind) IS NOT (e.aggregate_id, CASE e.type WHEN 'OrderCreated' THEN 'order_created' ELSE 'order_cancelled' END)`},
	{"event", `
` + unapplied(Notifications) + `
SELECT u.event_id, 'is not applied but has a notification' FROM unapplied u JOIN notifications n ON n.event_id = u.event_id`},
	{"notification", `
SELECT n.event_id, 'has no event' FROM outlog_meta m, notifications n
  LEFT JOIN outbox e ON e.event_id = n.event_id
  LEFT JOIN outlog_aggregates a ON a.aggregate_type = 'order' AND a.aggregate_id = n.order_id
 WHERE CASE
       WHEN e.event_id IS NOT NULL THEN e.aggregate_type <> 'order' OR e.type NOT IN ('OrderCreated', 'OrderCancelled')
       WHEN a.version IS NULL THEN 1
       WHEN n.kind = 'order_created' THEN ` + created + ` > m.pruned_through
       ELSE a.version < 2 OR a.last_position > m.pruned_through END`},
	{"order", `
SELECT n.order_id, 'has several notifications ' || n.kind FROM notifications n LEFT JOIN outbox e ON e.event_id = n.event_id
 WHERE e.event_id IS NULL GROUP BY n.order_id, n.kind HAVING count(*) > 1`},
}

func checkNotifications(ctx context.Context, q store.Querier) (string, error) {
	p, err := readProgress(ctx, q, Notifications)
	if err != nil {
		return "", err
	}
	if !p.ran {
		return "the consumer has not run here", nil
	}
	if err := broken(ctx, q, notificationRules); err != nil {
		return "", err
	}
	var notifications, events int64
	err = q.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM notifications), (SELECT coalesce(sum(version), 0) FROM orders)`).
		Scan(&notifications, &events)
	if err != nil {
		return "", err
	}
	if p.start == 0 && p.counts && notifications != events-p.waiting {
		return "", fmt.Errorf("%d notifications for %d events, of which %d are not applied", notifications, events, p.waiting)
	}
	return fmt.Sprintf("%d notifications, %d events not applied", notifications, p.waiting), nil
}
