package cli

import (
	"io"
	"log/slog"
)

// logFlags are the flags of commands that log.
type logFlags struct {
	LogFormat string     `default:"text" enum:"text,json" placeholder:"FORMAT" help:"Log as text or json (${default})."`
	LogLevel  slog.Level `default:"info" placeholder:"LEVEL" help:"Least level logged: debug, info, warn or error (${default})."`
}

// logger writes to w as the flags say.
func (f logFlags) logger(w io.Writer) *slog.Logger {
	o := &slog.HandlerOptions{Level: f.LogLevel}
	if f.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
