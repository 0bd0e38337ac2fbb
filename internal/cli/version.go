package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	sqlite3 "modernc.org/sqlite/lib"
)

type versionCmd struct {
	jsonFlag
}

// versions is what version prints.
type versions struct {
	Version    string `json:"version"` // "(devel)" when it was not built from a tagged version
	Revision   string `json:"revision,omitempty"`
	Go         string `json:"go"`
	SQLite     string `json:"sqlite"`
	NATSServer string `json:"nats_server,omitempty"`
}

// Run prints the versions.
func (c *versionCmd) Run(out output) error {
	v := readVersions()
	if c.JSON {
		return writeJSON(out.Out, v)
	}
	t := newTable(out.Out)
	fmt.Fprintf(t, "outlog\t%s\n", v.Version)
	if v.Revision != "" {
		fmt.Fprintf(t, "revision\t%s\n", v.Revision)
	}
	fmt.Fprintf(t, "go\t%s\n", v.Go)
	fmt.Fprintf(t, "sqlite\t%s\n", v.SQLite)
	if v.NATSServer != "" {
		fmt.Fprintf(t, "nats-server\t%s\n", v.NATSServer)
	}
	return t.Flush()
}

func readVersions() versions {
	v := versions{Version: "(devel)", Go: runtime.Version(), SQLite: sqlite3.SQLITE_VERSION}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if info.Main.Version != "" {
		v.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			v.Revision = s.Value
		}
	}
	for _, d := range info.Deps {
		if d.Path == "github.com/nats-io/nats-server/v2" {
			v.NATSServer = d.Version
		}
	}
	return v
}
