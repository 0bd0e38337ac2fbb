package broker

import (
	"fmt"
	"log/slog"
	"sync"
)

// serverLogger writes the server's log to slog. It is also the only way to
// learn why a start failed, because Start returns no error: the reason goes to
// Fatalf alone.
type serverLogger struct {
	log *slog.Logger
	// onError is called after each error the server logs, as a hint that its
	// health is worth a look.
	onError func()

	mu    sync.Mutex
	fatal string // the first fatal message
}

func (l *serverLogger) Noticef(format string, v ...any) { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l *serverLogger) Warnf(format string, v ...any)   { l.log.Warn(fmt.Sprintf(format, v...)) }
func (l *serverLogger) Debugf(string, ...any)           {}
func (l *serverLogger) Tracef(string, ...any)           {}

func (l *serverLogger) Errorf(format string, v ...any) {
	l.log.Error(fmt.Sprintf(format, v...))
	l.onError()
}

func (l *serverLogger) Fatalf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	l.mu.Lock()
	if l.fatal == "" {
		l.fatal = text
	}
	l.mu.Unlock()
	l.log.Error(text)
	l.onError()
}

func (l *serverLogger) fatalText() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal
}
