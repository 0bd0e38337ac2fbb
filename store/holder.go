package store

import (
	"reflect"
	"runtime"
	"strings"
	"time"
)

// hold is who has the baton since when, for the warning and for status.
type hold struct {
	fn    func(*Tx) error
	since time.Time
}

func (h *hold) name() string {
	n := runtime.FuncForPC(reflect.ValueOf(h.fn).Pointer()).Name()
	return n[strings.LastIndexByte(n, '/')+1:]
}

// Holder names the callback that holds the writer now and since when; ok is
// false when nobody does.
func (db *DB) Holder() (name string, since time.Time, ok bool) {
	h := db.writer.holder.Load()
	if h == nil {
		return "", time.Time{}, false
	}
	return h.name(), h.since, true
}

// insideUpdate reports whether this goroutine is inside an Update callback.
func insideUpdate() bool {
	pcs := make([]uintptr, 256)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		f, more := frames.Next()
		if f.Function == runCallbackName {
			return true
		}
		if !more {
			return false
		}
	}
}
