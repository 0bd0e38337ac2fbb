package web

import (
	"net/http"
	"strings"
)

// Mux makes the answers that mux itself gives for an unknown path (404) or
// method (405, with Allow) problem documents like all others.
func Mux(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}
		answer := &verdict{header: http.Header{}}
		h.ServeHTTP(answer, r)
		switch answer.status {
		case http.StatusNotFound:
			Problem(w, http.StatusNotFound, "", "there is nothing at this path", "")
		case http.StatusMethodNotAllowed:
			allow := answer.header.Values("Allow")
			w.Header()["Allow"] = allow
			Problem(w, http.StatusMethodNotAllowed, "", "this path allows "+strings.Join(allow, ", "), "")
		default: // a redirect to the clean path
			mux.ServeHTTP(w, r)
		}
	})
}

// verdict keeps what a handler decides and drops what it writes.
type verdict struct {
	header http.Header
	status int
}

func (v *verdict) Header() http.Header         { return v.header }
func (v *verdict) WriteHeader(status int)      { v.status = status }
func (v *verdict) Write(p []byte) (int, error) { return len(p), nil }
