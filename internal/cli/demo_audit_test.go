package cli

import (
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/examples/orders"
)

// demoHistory is a kept promise: order a with two lines of one SKU, order b
// cancelled.
func demoHistory() (*demoFacts, []demoOrder) {
	list := []demoOrder{
		{id: "a", eventID: "a1", body: orders.Order{Lines: []orders.Line{{SKU: "x", Qty: 1}, {SKU: "x", Qty: 2}}}},
		{id: "b", eventID: "b1", cancel: true, body: orders.Order{Lines: []orders.Line{{SKU: "x", Qty: 5}}}},
	}
	f := &demoFacts{
		log:       map[string]demoEvent{},
		byVersion: map[string]map[int64]demoEvent{},
		orders:    map[string]bool{"a": true, "b": true},
		applied:   map[string]map[string]int64{},
		parked:    map[string]map[string]bool{},
		notices:   map[string]int{"a1": 1, "b1": 1, "b2": 1},
		reserved:  map[string]map[string]demoStock{"a": {"x": {3, "a1"}}},
	}
	for i, e := range []demoEvent{{"a1", 1, "a", 1}, {"b1", 2, "b", 1}, {"b2", 3, "b", 2}} {
		f.log[e.id] = e
		put(f.byVersion, e.order, e.version, e)
		for _, name := range demoConsumers {
			put(f.applied, name, e.id, int64(i))
		}
	}
	return f, list
}

// TestDemoJudge breaks one promise after the other.
func TestDemoJudge(t *testing.T) {
	type counts struct{ lost, duplicated, outOfOrder, ghosts int }
	for name, c := range map[string]struct {
		change func(f *demoFacts)
		want   counts
	}{
		"kept":                      {func(f *demoFacts) {}, counts{}},
		"applied at the same time":  {func(f *demoFacts) { f.applied["inventory"]["b2"] = 1 }, counts{}},
		"event not in the log":      {func(f *demoFacts) { delete(f.byVersion, "a"); delete(f.log, "a1") }, counts{lost: 1, ghosts: 4}},
		"not applied":               {func(f *demoFacts) { delete(f.applied["inventory"], "a1") }, counts{lost: 1}},
		"parked":                    {func(f *demoFacts) { put(f.parked, "notifications", "a1", true) }, counts{lost: 1}},
		"no notification":           {func(f *demoFacts) { delete(f.notices, "b2") }, counts{lost: 1}},
		"reservation missing":       {func(f *demoFacts) { delete(f.reserved, "a") }, counts{lost: 1}},
		"reservation too small":     {func(f *demoFacts) { f.reserved["a"]["x"] = demoStock{2, "a1"} }, counts{lost: 1}},
		"cancelled, still reserved": {func(f *demoFacts) { put(f.reserved, "b", "x", demoStock{5, "b1"}) }, counts{lost: 1}},
		"reservation doubled":       {func(f *demoFacts) { f.reserved["a"]["x"] = demoStock{6, "a1"} }, counts{duplicated: 1}},
		"two notifications":         {func(f *demoFacts) { f.notices["a1"] = 2 }, counts{duplicated: 1}},
		"order nobody was told of":  {func(f *demoFacts) { f.orders["c"] = true }, counts{duplicated: 1}},
		"version 2 first":           {func(f *demoFacts) { f.applied["inventory"]["b2"] = 0 }, counts{outOfOrder: 1}},
		"applied, not in the log":   {func(f *demoFacts) { f.applied["inventory"]["z"] = 9 }, counts{ghosts: 1}},
		"notified, not in the log":  {func(f *demoFacts) { f.notices["z"] = 1 }, counts{ghosts: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			f, list := demoHistory()
			c.change(f)
			var d demoDocument
			d.judge(f, list)
			require.Equal(t, c.want, counts{d.Lost, d.Duplicated, d.OutOfOrder, d.Ghosts})
		})
	}
}
