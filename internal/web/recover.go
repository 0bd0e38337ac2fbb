package web

import (
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
)

// Recover turns a panic of next into a log entry with the stack and a 500
// problem that does not repeat it. When the answer has begun already, it can
// only be cut off, so that the client does not take it for whole.
// http.ErrAbortHandler passes.
func Recover(log *slog.Logger, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := &begun{ResponseWriter: w}
		defer func() {
			v := recover()
			if v == nil {
				return
			}
			if v == http.ErrAbortHandler {
				panic(v)
			}
			log.Error("handler panicked", "method", r.Method, "path", r.URL.Path, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			if answer.begun {
				panic(http.ErrAbortHandler)
			}
			clear(w.Header())
			Problem(w, http.StatusInternalServerError, "", "the server's log says more", "")
		}()
		next.ServeHTTP(answer, r)
	})
}

// begun notes whether an answer has begun.
type begun struct {
	http.ResponseWriter
	begun bool
}

func (b *begun) WriteHeader(status int) {
	b.begun = b.begun || status >= 200 // 1xx are not the answer yet
	b.ResponseWriter.WriteHeader(status)
}

func (b *begun) Write(p []byte) (int, error) {
	b.begun = true
	return b.ResponseWriter.Write(p)
}

// Flush makes plain type assertions for http.Flusher succeed.
func (b *begun) Flush() {
	b.begun = true
	_ = http.NewResponseController(b.ResponseWriter).Flush()
}

// Unwrap is for http.ResponseController.
func (b *begun) Unwrap() http.ResponseWriter { return b.ResponseWriter }
