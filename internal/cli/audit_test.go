package cli

import (
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/examples/orders"
)

// history is a kept promise: order a with two lines of one SKU, order b
// cancelled.
func history() (*facts, []order) {
	list := []order{
		{id: "a", eventID: "a1", body: orders.Order{Lines: []orders.Line{{SKU: "x", Qty: 1}, {SKU: "x", Qty: 2}}}},
		{id: "b", eventID: "b1", cancel: true, body: orders.Order{Lines: []orders.Line{{SKU: "x", Qty: 5}}}},
	}
	f := &facts{
		log:       map[string]loggedEvent{},
		byVersion: map[string]map[int64]loggedEvent{},
		orders:    map[string]bool{"a": true, "b": true},
		applied:   map[string]map[string]int64{},
		parked:    map[string]map[string]bool{},
		notices:   map[string]int{"a1": 1, "b1": 1, "b2": 1},
		reserved:  map[string]map[string]stock{"a": {"x": {3, "a1"}}},
	}
	for i, e := range []loggedEvent{{"a1", 1, "a", 1}, {"b1", 2, "b", 1}, {"b2", 3, "b", 2}} {
		f.log[e.id] = e
		put(f.byVersion, e.order, e.version, e)
		for _, name := range serviceConsumers {
			put(f.applied, name, e.id, int64(i))
		}
	}
	return f, list
}

// TestJudge breaks one promise after the other.
func TestJudge(t *testing.T) {
	type counts struct{ lost, duplicated, outOfOrder, ghosts int }
	for name, c := range map[string]struct {
		change func(f *facts)
		want   counts
	}{
		"kept":                      {func(f *facts) {}, counts{}},
		"applied at the same time":  {func(f *facts) { f.applied["inventory"]["b2"] = 1 }, counts{}},
		"event not in the log":      {func(f *facts) { delete(f.byVersion, "a"); delete(f.log, "a1") }, counts{lost: 1, ghosts: 4}},
		"not applied":               {func(f *facts) { delete(f.applied["inventory"], "a1") }, counts{lost: 1}},
		"parked":                    {func(f *facts) { put(f.parked, "notifications", "a1", true) }, counts{lost: 1}},
		"no notification":           {func(f *facts) { delete(f.notices, "b2") }, counts{lost: 1}},
		"reservation missing":       {func(f *facts) { delete(f.reserved, "a") }, counts{lost: 1}},
		"reservation too small":     {func(f *facts) { f.reserved["a"]["x"] = stock{2, "a1"} }, counts{lost: 1}},
		"cancelled, still reserved": {func(f *facts) { put(f.reserved, "b", "x", stock{5, "b1"}) }, counts{lost: 1}},
		"reservation doubled":       {func(f *facts) { f.reserved["a"]["x"] = stock{6, "a1"} }, counts{duplicated: 1}},
		"two notifications":         {func(f *facts) { f.notices["a1"] = 2 }, counts{duplicated: 1}},
		"order nobody was told of":  {func(f *facts) { f.orders["c"] = true }, counts{duplicated: 1}},
		"version 2 first":           {func(f *facts) { f.applied["inventory"]["b2"] = 0 }, counts{outOfOrder: 1}},
		"applied, not in the log":   {func(f *facts) { f.applied["inventory"]["z"] = 9 }, counts{ghosts: 1}},
		"notified, not in the log":  {func(f *facts) { f.notices["z"] = 1 }, counts{ghosts: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			f, list := history()
			c.change(f)
			var v verdict
			v.judge(f, list, []string{"gone"})
			require.Equal(t, c.want, counts{v.Lost, v.Duplicated, v.OutOfOrder, v.Ghosts})
		})
	}
}
