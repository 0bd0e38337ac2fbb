package orders

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/outbox"
	"outlog/store"
)

const bookJSON = `{"customer_id":"ada","lines":[{"sku":"pen","qty":2,"unit_price_cents":150}]}`

func TestPlaceCancelShow(t *testing.T) {
	r := open(t)
	srv := r.server()

	a := send(t, "POST", srv.URL+"/orders", `{"lines": [{"qty":2, "sku":"pen","unit_price_cents":150}, {"sku":"ink \u00e9","qty":1,"unit_price_cents":0}], "customer_id":"ada"}`,
		"Content-Type", "application/json; charset=utf-8")
	require.Equal(t, 201, a.status, a.body)
	placed := decode[Receipt](t, a)
	require.Len(t, placed.OrderID, 26)

	a = send(t, "GET", srv.URL+"/orders/"+placed.OrderID, "")
	require.Equal(t, 200, a.status)
	v := decode[View](t, a)
	require.Equal(t, []Line{{"pen", 2, 150}, {"ink é", 1, 0}}, v.Lines)
	require.Equal(t, int64(300), v.TotalCents)
	require.Equal(t, "created", v.Status)
	require.Equal(t, "ada", v.CustomerID)
	require.Len(t, v.Events, 1)
	require.Equal(t, []any{placed.EventID, placed.Position, "OrderCreated", int64(1)},
		[]any{v.Events[0].ID, v.Events[0].Position, v.Events[0].Type, v.Events[0].Version})
	require.Equal(t, v.CreatedAt, v.Events[0].CreatedAt)
	require.Empty(t, v.Events[0].Consumers)

	e, err := r.Log.Get(t.Context(), placed.EventID)
	require.NoError(t, err)
	require.JSONEq(t, fmt.Sprintf(`{"order_id":%q,"customer_id":"ada","total_cents":300,"lines":[
		{"sku":"pen","qty":2,"unit_price_cents":150},{"sku":"ink é","qty":1,"unit_price_cents":0}]}`, placed.OrderID), string(e.Payload))

	for _, body := range []string{"{}", ""} { // the second time it is cancelled already
		a = send(t, "POST", srv.URL+"/orders/"+placed.OrderID+"/cancel", body)
		if body == "" {
			requireProblem(t, a, 409, "id")
			continue
		}
		require.Equal(t, 200, a.status, a.body)
		cancelled := decode[Receipt](t, a)
		e, err := r.Log.Get(t.Context(), cancelled.EventID)
		require.NoError(t, err)
		require.Equal(t, []any{cancelled.Position, TypeOrderCancelled, int64(2), placed.OrderID},
			[]any{e.Position, e.Type, e.AggregateVersion, e.AggregateID})
		require.JSONEq(t, fmt.Sprintf(`{"order_id":%q,"customer_id":"ada"}`, placed.OrderID), string(e.Payload))
	}
	require.Equal(t, "cancelled", decode[View](t, send(t, "GET", srv.URL+"/orders/"+placed.OrderID, "")).Status)

	for _, id := range []string{"nope", "01ARZ3NDEKTSV4RRFFQ69G5FAV", strings.Repeat("x", 3000), "%00%ff"} {
		requireProblem(t, send(t, "GET", srv.URL+"/orders/"+id, ""), 404, "id")
		requireProblem(t, send(t, "POST", srv.URL+"/orders/"+id+"/cancel", ""), 404, "id")
	}
	requireProblem(t, send(t, "GET", srv.URL+"/orders", ""), 405, "")
	requireProblem(t, send(t, "GET", srv.URL+"/order", ""), 404, "")
}

// TestShowConsumers has one event in each state a consumer can have it in.
func TestShowConsumers(t *testing.T) {
	r := open(t)
	placed := r.place(book)
	r.consume(Inventory, 1, placed.EventID)
	r.consume(Notifications, 1)
	r.cancel(placed.OrderID)
	r.consume(Inventory, 1, placed.EventID)
	r.exec(`INSERT INTO outlog_consumers (name, position, start_position, types, created_at, updated_at)
		VALUES ('early', 1, 0, '["OrderCreated"]', 1, 1), ('late', 1, 1, '["OrderCreated","OrderCancelled"]', 1, 1)`)

	v, err := r.Show(t.Context(), placed.OrderID)
	require.NoError(t, err)
	at := func(us int64) *ConsumerView { s := instant(us); return &ConsumerView{AppliedAt: &s} }
	next := instant(1000000)
	require.Equal(t, []ConsumerView{
		{Name: "early", State: "applied"}, // its inbox row is gone
		{Name: Inventory, State: "parked", Parked: &ParkedView{"retrying", 3, "shelf on fire", &next}},
		{Name: "late", State: "passed_over"},
		{Name: Notifications, State: "applied", AppliedAt: at(2000000).AppliedAt},
	}, v.Events[0].Consumers)
	require.Equal(t, []ConsumerView{
		{Name: "early", State: "passed_over"},
		{Name: Inventory, State: "parked", Parked: &ParkedView{"blocked", 3, "shelf on fire", &next}},
		{Name: "late", State: "pending"},
		{Name: Notifications, State: "pending"},
	}, v.Events[1].Consumers)
}

// TestRefused sends everything that is not an order: the answer names the
// field, and nothing is written.
func TestRefused(t *testing.T) {
	line := func(s string) string { return `{"customer_id":"ada","lines":[` + s + `]}` }
	const good = `{"sku":"pen","qty":1,"unit_price_cents":1}`
	long := strings.Repeat("x", MaxNameBytes+1)
	r := open(t)
	srv := r.server()
	for _, c := range []struct {
		name, body string
		status     int
		field      string
		header     []string
	}{
		{"empty", ``, 400, "body", []string{"Content-Type", "application/json"}},
		{"not JSON", `{"customer_id":`, 400, "body", nil},
		{"not an object", `[]`, 400, "body", nil},
		{"null", `null`, 400, "body", nil},
		{"trailing data", bookJSON + `{}`, 400, "body", nil},
		{"invalid UTF-8", strings.Replace(bookJSON, "ada", "a\xffa", 1), 400, "body", nil},
		{"lone surrogate", strings.Replace(bookJSON, "ada", `\ud800`, 1), 400, "customer_id", nil},
		{"unknown field", `{"customer_id":"ada","coupon":1,"lines":[]}`, 400, "coupon", nil},
		{"other case", strings.Replace(bookJSON, "customer_id", "Customer_ID", 1), 400, "Customer_ID", nil},
		{"twice", `{"customer_id":"ada","customer_id":"bob","lines":[` + good + `]}`, 400, "customer_id", nil},
		{"no customer", `{"lines":[` + good + `]}`, 400, "customer_id", nil},
		{"empty customer", `{"customer_id":"","lines":[` + good + `]}`, 400, "customer_id", nil},
		{"blank customer", `{"customer_id":" \t","lines":[` + good + `]}`, 400, "customer_id", nil},
		{"null customer", `{"customer_id":null,"lines":[` + good + `]}`, 400, "customer_id", nil},
		{"customer is a number", `{"customer_id":7,"lines":[` + good + `]}`, 400, "customer_id", nil},
		{"long customer", `{"customer_id":"` + long + `","lines":[` + good + `]}`, 400, "customer_id", nil},
		{"control character", `{"customer_id":"a\u0000b","lines":[` + good + `]}`, 400, "customer_id", nil},
		{"no lines", `{"customer_id":"ada"}`, 400, "lines", nil},
		{"empty lines", line(``), 400, "lines", nil},
		{"null lines", `{"customer_id":"ada","lines":null}`, 400, "lines", nil},
		{"lines is an object", `{"customer_id":"ada","lines":{}}`, 400, "lines", nil},
		{"line is a number", line(good + `,7`), 400, "lines[1]", nil},
		{"unknown field in a line", line(`{"sku":"pen","qty":1,"unit_price_cents":1,"colour":"red"}`), 400, "lines[0].colour", nil},
		{"field twice in a line", line(`{"sku":"pen","qty":1,"qty":1,"unit_price_cents":1}`), 400, "lines[0].qty", nil},
		{"no SKU", line(`{"qty":1,"unit_price_cents":1}`), 400, "lines[0].sku", nil},
		{"empty SKU", line(good + `,{"sku":"","qty":1,"unit_price_cents":1}`), 400, "lines[1].sku", nil},
		{"long SKU", line(`{"sku":"` + long + `","qty":1,"unit_price_cents":1}`), 400, "lines[0].sku", nil},
		{"no quantity", line(`{"sku":"pen","unit_price_cents":1}`), 400, "lines[0].qty", nil},
		{"quantity 0", line(`{"sku":"pen","qty":0,"unit_price_cents":1}`), 400, "lines[0].qty", nil},
		{"negative quantity", line(`{"sku":"pen","qty":-1,"unit_price_cents":1}`), 400, "lines[0].qty", nil},
		{"half a pen", line(`{"sku":"pen","qty":1.5,"unit_price_cents":1}`), 400, "lines[0].qty", nil},
		{"quantity in quotes", line(`{"sku":"pen","qty":"1","unit_price_cents":1}`), 400, "lines[0].qty", nil},
		{"quantity over 64 bits", line(`{"sku":"pen","qty":9223372036854775808,"unit_price_cents":1}`), 400, "lines[0].qty", nil},
		{"quantities whose sum would overflow", line(`{"sku":"pen","qty":9223372036854775807,"unit_price_cents":0},{"sku":"pen","qty":1,"unit_price_cents":0}`), 400, "lines[0].qty", nil},
		{"no price", line(`{"sku":"pen","qty":1}`), 400, "lines[0].unit_price_cents", nil},
		{"negative price", line(`{"sku":"pen","qty":1,"unit_price_cents":-1}`), 400, "lines[0].unit_price_cents", nil},
		{"line that overflows", line(`{"sku":"pen","qty":2,"unit_price_cents":4611686018427387904}`), 400, "lines[0].unit_price_cents", nil},
		{"total that overflows", line(`{"sku":"pen","qty":1,"unit_price_cents":9223372036854775807},` + good), 400, "lines[1].unit_price_cents", nil},
		{"event too large", line(strings.Repeat(`{"sku":"`+long[1:]+`","qty":1,"unit_price_cents":1},`, 5000) + good), 413, "lines", nil},
		{"body too large", bookJSON + strings.Repeat(" ", 1<<20), 413, "body", nil},
		{"form", bookJSON, 415, "Content-Type", []string{"Content-Type", "application/x-www-form-urlencoded"}},
		{"plain text", bookJSON, 415, "Content-Type", []string{"Content-Type", "text/plain"}},
		{"no content type", bookJSON, 415, "Content-Type", []string{"Content-Type", ""}},
		{"other charset", bookJSON, 415, "Content-Type", []string{"Content-Type", "application/json; charset=latin1"}},
		{"long key", bookJSON, 400, "Idempotency-Key", []string{"Idempotency-Key", strings.Repeat("k", MaxKeyBytes+1)}},
		{"key not ASCII", bookJSON, 400, "Idempotency-Key", []string{"Idempotency-Key", "clé"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			requireProblem(t, send(t, "POST", srv.URL+"/orders", c.body, c.header...), c.status, c.field)
		})
	}
	for _, table := range []string{"orders", "order_lines", "outbox", "idempotency_keys"} {
		require.Zero(t, r.ask(`SELECT count(*) FROM `+table), table)
	}

	placed := r.place(book)
	for _, c := range []struct {
		body   string
		status int
		field  string
		header []string
	}{
		{`{"why":"late"}`, 400, "why", nil},
		{`[]`, 400, "body", nil},
		{`{}{}`, 400, "body", nil},
		{strings.Repeat(" ", 1<<20+1), 413, "body", nil},
		{`{}`, 415, "Content-Type", []string{"Content-Type", "text/plain"}},
	} {
		requireProblem(t, send(t, "POST", srv.URL+"/orders/"+placed.OrderID+"/cancel", c.body, c.header...), c.status, c.field)
	}
	require.Equal(t, int64(1), r.ask(`SELECT version FROM orders`))
}

// TestLimits places what is just allowed.
func TestLimits(t *testing.T) {
	r := open(t)
	big := Order{CustomerID: strings.Repeat("x", MaxNameBytes), Lines: []Line{{"pen", MaxQty, math.MaxInt64 / MaxQty}}}
	for range 9000 {
		big.Lines = append(big.Lines, Line{"ink", MaxQty, 0})
	}
	r.place(big)
	require.Equal(t, int64(9001), r.ask(`SELECT count(*) FROM order_lines`))
	r.consume(Inventory, 1)
	require.Equal(t, int64(9000*MaxQty), r.ask(`SELECT reserved FROM inventory WHERE sku = 'ink'`))
}

func TestIdempotencyKey(t *testing.T) {
	r := open(t)
	srv := r.server()
	post := func(body, key string) answer { return send(t, "POST", srv.URL+"/orders", body, keyHeader, key) }

	answers := make([]answer, 16)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() { answers[i] = post(bookJSON, "k1") })
	}
	wg.Wait()
	require.Equal(t, 201, answers[0].status)
	for _, a := range answers {
		require.Equal(t, []any{answers[0].status, answers[0].body}, []any{a.status, a.body})
	}
	require.Equal(t, int64(1), r.ask(`SELECT count(*) FROM orders`))

	spaced := strings.ReplaceAll(bookJSON, ",", " ,\n")
	require.Equal(t, answers[0].body, post(spaced, "k1").body, "the same order, written differently")
	requireProblem(t, post(strings.Replace(bookJSON, "ada", "bob", 1), "k1"), 422, keyHeader)
	requireProblem(t, post(`{}`, "k1"), 400, "customer_id")
	require.NotEqual(t, answers[0].body, post(bookJSON, "k2").body)

	cancelURL := srv.URL + "/orders/" + decode[Receipt](t, answers[0]).OrderID + "/cancel"
	requireProblem(t, send(t, "POST", cancelURL, "", keyHeader, "k1"), 422, keyHeader)
	first := send(t, "POST", cancelURL, "", keyHeader, "k3")
	require.Equal(t, 200, first.status)
	require.Equal(t, first.body, send(t, "POST", cancelURL, "{}", keyHeader, "k3").body)
	requireProblem(t, send(t, "POST", cancelURL, "", keyHeader, "k4"), 409, "id")
	require.Equal(t, int64(3), r.ask(`SELECT count(*) FROM idempotency_keys`), "a refused request does not use its key up")
}

// failing is an Outlog whose transactions fail when their work is done.
type failing struct {
	direct
	err error
}

func (f failing) Update(ctx context.Context, fn func(*store.Tx) error) error {
	return f.direct.Update(ctx, func(tx *store.Tx) error { return cmp.Or(fn(tx), f.err) })
}

// TestUnavailable has the database fail: the answer says whether to come
// again, nothing is written, and the same request succeeds afterwards.
func TestUnavailable(t *testing.T) {
	r := open(t)
	placed := r.place(book)
	good := r.Service
	send := func(path, body string) answer {
		return send(t, "POST", r.server().URL+path, body, keyHeader, "k1"+body)
	}
	paths := map[string]string{"/orders": bookJSON, "/orders/" + placed.OrderID + "/cancel": "{}"}
	for _, c := range []struct {
		err    error
		status int
	}{
		{fmt.Errorf("commit: %w", store.ErrUnavailable), 503},
		{store.ErrClosed, 503},
		{context.DeadlineExceeded, 503},
		{outbox.ErrVersionConflict, 500},
	} {
		r.Service = New(failing{r.direct, c.err}, nil)
		for path, body := range paths {
			a := send(path, body)
			requireProblem(t, a, c.status, "")
			require.Equal(t, c.status == 503, a.header.Get("Retry-After") != "")
			require.NotContains(t, a.body, c.err.Error())
		}
	}
	require.Equal(t, int64(1), r.ask(`SELECT count(*) FROM outbox`))
	r.Service = good
	for path, body := range paths {
		require.Less(t, send(path, body).status, 300)
	}
}
