package web

import (
	"context"
	"net/http"
)

const livenessPath = "/healthz"

// Readiness is the answer of GET /readyz.
type Readiness struct {
	Ready   bool     `json:"ready"`
	Reasons []string `json:"reasons"` // why not; empty when ready
}

// Health adds to mux
//
//   - GET /healthz: 200 while the process serves, whatever state it is in;
//   - GET /readyz: 200 when reasons returns none, else 503 with them.
func Health(mux *http.ServeMux, reasons func(ctx context.Context) []string) {
	mux.HandleFunc("GET "+livenessPath, func(w http.ResponseWriter, _ *http.Request) {
		JSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		why := append([]string{}, reasons(r.Context())...)
		status := http.StatusOK
		if len(why) > 0 {
			status = http.StatusServiceUnavailable
		}
		JSON(w, status, Readiness{Ready: len(why) == 0, Reasons: why})
	})
}
