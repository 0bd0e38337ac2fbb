package orders

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// A request's body is read token by token, because encoding/json cannot name
// the line a wrong field is in, takes the last of two equal members, and takes
// names in any case.

// member is a member of a JSON object and what to do with its value. All
// members are required.
type member struct {
	name string
	read func(path string) error
}

// parseOrder reads {"customer_id": …, "lines": [{"sku": …, "qty": …,
// "unit_price_cents": …}, …]} and nothing else. What the values may be is
// Order.check's to say.
func parseOrder(body []byte) (o Order, err error) {
	r, err := newReader(body)
	if err != nil {
		return o, err
	}
	var l Line
	line := []member{{"sku", r.text(&l.SKU)}, {"qty", r.integer(&l.Qty)}, {"unit_price_cents", r.integer(&l.UnitPriceCents)}}
	err = r.object("", []member{
		{"customer_id", r.text(&o.CustomerID)},
		{"lines", func(path string) error {
			return r.array(path, func(path string) error {
				err := r.object(path, line)
				o.Lines = append(o.Lines, l)
				return err
			})
		}},
	})
	return o, err
}

// parseEmpty takes no body, or {}.
func parseEmpty(body []byte) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	r, err := newReader(body)
	if err != nil {
		return err
	}
	return r.object("", nil)
}

// reader reads one JSON document that is known to be valid.
type reader struct{ dec *json.Decoder }

func newReader(body []byte) (*reader, error) {
	if !utf8.Valid(body) {
		return nil, refuse("body", "is not valid UTF-8")
	}
	if err := json.Unmarshal(body, new(json.RawMessage)); err != nil {
		reason := "is not one JSON document: " + err.Error()
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			reason += fmt.Sprintf(" (byte %d)", syntax.Offset)
		}
		return nil, refuse("body", reason)
	}
	r := &reader{json.NewDecoder(bytes.NewReader(body))}
	r.dec.UseNumber()
	return r, nil
}

// object reads an object that has exactly the members.
func (r *reader) object(path string, members []member) error {
	if err := r.delim(path, '{', "an object"); err != nil {
		return err
	}
	seen := make([]bool, len(members))
	for r.dec.More() {
		t, err := r.dec.Token()
		if err != nil {
			return err
		}
		name := t.(string) // of a valid document
		i := indexOf(members, name)
		switch {
		case i < 0:
			return refuse(join(path, shorten(name)), "is not known here")
		case seen[i]:
			return refuse(join(path, name), "is there twice")
		}
		seen[i] = true
		if err := members[i].read(join(path, name)); err != nil {
			return err
		}
	}
	for i, m := range members {
		if !seen[i] {
			return refuse(join(path, m.name), "is required")
		}
	}
	_, err := r.dec.Token()
	return err
}

func (r *reader) array(path string, item func(path string) error) error {
	if err := r.delim(path, '[', "an array"); err != nil {
		return err
	}
	for i := 0; r.dec.More(); i++ {
		if err := item(path + "[" + strconv.Itoa(i) + "]"); err != nil {
			return err
		}
	}
	_, err := r.dec.Token()
	return err
}

func (r *reader) delim(path string, want json.Delim, what string) error {
	t, err := r.dec.Token()
	if err != nil {
		return err
	}
	if t != want {
		if path == "" {
			path = "body"
		}
		return refuse(path, "must be "+what)
	}
	return nil
}

func (r *reader) text(into *string) func(path string) error {
	return func(path string) error {
		t, err := r.dec.Token()
		if err != nil {
			return err
		}
		s, ok := t.(string)
		if !ok {
			return refuse(path, "must be a string")
		}
		*into = s
		return nil
	}
}

func (r *reader) integer(into *int64) func(path string) error {
	return func(path string) error {
		t, err := r.dec.Token()
		if err != nil {
			return err
		}
		n, _ := t.(json.Number)
		if *into, err = strconv.ParseInt(string(n), 10, 64); err != nil {
			return refuse(path, "must be an integer that fits into 64 bits")
		}
		return nil
	}
}

func indexOf(members []member, name string) int {
	for i, m := range members {
		if m.name == name {
			return i
		}
	}
	return -1
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// shorten keeps a name that a client made up out of our answers' way, and
// shows an empty one.
func shorten(name string) string {
	const limit = 64
	if name == "" {
		return `""`
	}
	if r := []rune(name); len(r) > limit {
		return string(r[:limit]) + "…"
	}
	return name
}
