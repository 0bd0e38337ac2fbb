package web

import (
	"encoding/json"
	"net/http"
)

// problem is an RFC 9457 problem document. Field is an extension: the part of
// the request that was refused.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	Field  string `json:"field,omitempty"`
}

// Problem answers with an application/problem+json document (RFC 9457). title
// is the same for every occurrence of the problem; "" stands for the status
// text. detail is about this one and should say what to do. field names the
// part of the request that was refused, such as "lines[0].qty", and may be "".
func Problem(w http.ResponseWriter, status int, title, detail, field string) {
	if title == "" {
		title = http.StatusText(status)
	}
	writeJSON(w, status, "application/problem+json", problem{"about:blank", title, status, detail, field})
}

// JSON answers with v as an application/json document.
func JSON(w http.ResponseWriter, status int, v any) { writeJSON(w, status, "application/json", v) }

// writeJSON encodes before it writes, so that a value that cannot be encoded
// becomes a panic (and with it a 500) instead of half a document.
func writeJSON(w http.ResponseWriter, status int, contentType string, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client is gone: nobody to tell
}
