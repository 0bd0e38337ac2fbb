package orders

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzOrder: any body is refused with the field and a 4xx status, or is what a
// strict decoder makes of it; and an accepted order keeps its limits.
//
//	go test ./examples/orders -run - -fuzz FuzzOrder -fuzztime 20s
func FuzzOrder(f *testing.F) {
	for _, body := range []string{
		`{"customer_id":"c","lines":[{"sku":"A","qty":1,"unit_price_cents":100}]}`,
		`{"customer_id":"c","lines":[{"sku":"A","qty":1e3,"unit_price_cents":1.0}]}`,
		`{"customer_id":"c","customer_id":"d","lines":[]}`, `{"CUSTOMER_ID":"c","lines":null}`, `[]`, `{}`, `{"lines":[[]]}`, "\xff", `{} {}`,
		`{"customer_id":"c","lines":[{"sku":"A","qty":9223372036854775807,"unit_price_cents":9223372036854775807}]}`,
		`{"customer_id":"\u0000","lines":[{"sku":"\ud800","qty":-0,"unit_price_cents":-1}]}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		o, err := parseOrder(body)
		if err == nil {
			_, err = o.check()
		}
		if err != nil {
			input, ok := errors.AsType[*InputError](err)
			require.True(t, ok, "untyped error: %v", err)
			require.NotEmpty(t, input.Field)
			require.True(t, input.Status >= http.StatusBadRequest && input.Status < http.StatusInternalServerError)
			return
		}
		var strict Order
		dec := json.NewDecoder(bytes.NewReader(body))
		dec.DisallowUnknownFields()
		require.NoError(t, dec.Decode(&strict))
		require.Equal(t, strict, o)
		_, err = dec.Token()
		require.ErrorIs(t, err, io.EOF)
		total := int64(0)
		for _, l := range o.Lines {
			require.True(t, l.Qty >= 1 && l.UnitPriceCents >= 0 && l.SKU != "")
			total += l.Qty * l.UnitPriceCents
			require.GreaterOrEqual(t, total, int64(0), "the total must not overflow")
		}
	})
}
