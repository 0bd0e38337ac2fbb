package main

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// layers is the import rule: a package imports only packages of lines above
// its own. A new package of the core is given its place here.
var layers = [][]string{
	{"internal/histogram"},
	{"store", "internal/lock", "internal/failpoint", "internal/attempt", "internal/powercut", "internal/footprint"},
	{"outbox"},
	{"relay", "consumer", "internal/archive"},
	{"broker", "internal/admin", "internal/retention"},
	{"node", "internal/web"},
	{"outlogtest", "examples/orders"},
	{"internal/bench"},
	{"internal/cli"},
	{""}, // main
}

// natsImporters are the only packages that know the broker's libraries.
var natsImporters = []string{"broker", "internal/bench"}

// goPackage is a package of this module with what it imports, tests aside.
type goPackage struct {
	ImportPath string
	Imports    []string
	Deps       []string // Imports and everything they import
}

// name is the path inside the module; ok is false outside.
func name(importPath string) (string, bool) {
	if importPath == "outlog" {
		return "", true
	}
	return strings.CutPrefix(importPath, "outlog/")
}

func listPackages(t *testing.T) []goPackage {
	cmd := exec.Command("go", "list", "-deps", "-e", "-json=ImportPath,Imports,Deps", "./...")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var ours []goPackage
	for dec := json.NewDecoder(out); ; {
		var p goPackage
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if _, ok := name(p.ImportPath); ok {
			ours = append(ours, p)
		}
	}
	require.NoError(t, cmd.Wait())
	return ours
}

// layerOf returns the line of layers a package is in, -1 if in none.
func layerOf(name string) int {
	return slices.IndexFunc(layers, func(l []string) bool { return slices.Contains(l, name) })
}

func isExample(name string) bool { return strings.HasPrefix(name, "examples/") }

func isNATS(importPath string) bool { return strings.HasPrefix(importPath, "github.com/nats-io/") }

// TestImports keeps the packages in their layers.
func TestImports(t *testing.T) {
	for _, p := range listPackages(t) {
		from, _ := name(p.ImportPath)
		for _, imported := range p.Imports {
			if isNATS(imported) {
				require.Contains(t, natsImporters, from, "%q must not import %s", from, imported)
			}
			to, ours := name(imported)
			if !ours {
				continue
			}
			require.NotEmpty(t, to, "%q must not import main", from)
			if layer := layerOf(from); layer >= 0 {
				require.GreaterOrEqual(t, layerOf(to), 0, "%q imports %q, which has no place in layers", from, to)
				require.Less(t, layerOf(to), layer, "%q must not import %q", from, to)
			}
			if isExample(to) {
				require.True(t, from == "internal/cli" || isExample(from), "%q must not import %q: the core knows no example", from, to)
			}
			if from == "" {
				require.Equal(t, "internal/cli", to, "main calls internal/cli and nothing else")
			}
		}
		if from == "relay" || from == "consumer" {
			require.False(t, slices.ContainsFunc(p.Deps, isNATS), "%q must work without NATS, also indirectly", from)
		}
	}
}
