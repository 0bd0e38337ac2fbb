package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"outlog/broker"
	"outlog/consumer"
	"outlog/internal/cli"
	"outlog/node"
	"outlog/outbox"
	"outlog/relay"
	"outlog/store"
)

// documents are the files whose claims are tested here.
func documents(t *testing.T) map[string]string {
	t.Helper()
	names, err := filepath.Glob("docs/*.md")
	require.NoError(t, err)
	texts := map[string]string{}
	for _, name := range append(names, "README.md") {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		texts[name] = string(b)
	}
	return texts
}

// goFiles are the module's Go files, from testdata aside.
func goFiles(t *testing.T) []string {
	t.Helper()
	var files []string
	require.NoError(t, filepath.WalkDir(".", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && path != "." && (d.Name()[0] == '.' || d.Name() == "testdata" || d.Name() == "tools") {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ".go") {
			files = append(files, path)
		}
		return err
	}))
	return files
}

// TestReadmeIsTheQuickstart: the program in README.md is the one that
// examples/quickstart compiles and tests.
func TestReadmeIsTheQuickstart(t *testing.T) {
	program, err := os.ReadFile("examples/quickstart/main.go")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(documents(t)["README.md"], -1)
	require.Len(t, blocks, 1)
	require.Equal(t, string(program), blocks[0][1], "copy examples/quickstart/main.go into README.md")
}

// TestReadmeInAnotherModule does what README.md tells users of the library to
// do, with the program it shows.
func TestReadmeInAnotherModule(t *testing.T) {
	edit := regexp.MustCompile(`(?m)^go mod edit .*$`).FindString(documents(t)["README.md"])
	require.Contains(t, edit, "/path/to/outlog")
	here, err := os.Getwd()
	require.NoError(t, err)
	dir := t.TempDir()
	for to, from := range map[string]string{"main.go": "examples/quickstart/main.go", "go.sum": "go.sum"} {
		b, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, to), b, 0o600))
	}
	for _, args := range [][]string{
		{"mod", "init", "example.com/shop"},
		strings.Fields(strings.ReplaceAll(edit, "/path/to/outlog", here))[1:],
		{"build", "-mod=mod", "-buildvcs=false", "-o", os.DevNull, "."},
	} {
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "go %v: %s", args, out)
	}
}

// TestNamedTestsExist: every test that a document or a comment names is there;
// one that is named with its package is in that package.
func TestNamedTestsExist(t *testing.T) {
	defined := map[string][]string{} // name → packages
	texts := documents(t)
	for _, file := range goFiles(t) {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		if strings.HasSuffix(file, "_test.go") {
			for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`).FindAllSubmatch(b, -1) {
				defined[string(m[1])] = append(defined[string(m[1])], filepath.Base(filepath.Dir(file)))
			}
		}
		for line := range strings.Lines(string(b)) {
			if _, comment, ok := strings.Cut(line, "//"); ok && !strings.HasSuffix(file, "_test.go") {
				texts[file] += comment
			}
		}
	}
	schema, err := os.ReadFile("schema.sql")
	require.NoError(t, err)
	texts["schema.sql"] = string(schema)
	for name, text := range texts {
		for _, m := range regexp.MustCompile(`(?:\b([a-z]+)\.)?\b((?:Test|Fuzz|Benchmark)[A-Z]\w+)`).FindAllStringSubmatch(text, -1) {
			pkg, test := m[1], m[2]
			require.Contains(t, defined, test, "%s names it", name)
			if pkg != "" {
				require.Contains(t, defined[test], pkg, "%s says that %s is in %s", name, test, pkg)
			}
		}
	}
	promises := 0
	for line := range strings.Lines(texts["README.md"]) {
		if regexp.MustCompile(`^\| \*\*G[1-5]\*\*`).MatchString(line) {
			promises++
			require.Regexp(t, `[a-z]+\.Test[A-Z]\w+`, line, "a promise without a test")
		}
	}
	require.Equal(t, 5, promises)
}

// TestLinksLeadSomewhere: every relative link of a document names a file, and
// every anchor a heading of it.
func TestLinksLeadSomewhere(t *testing.T) {
	texts := documents(t)
	anchors := func(text string) (out []string) {
		for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
			a := regexp.MustCompile(`[^a-z0-9 _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
			out = append(out, strings.ReplaceAll(a, " ", "-"))
		}
		return out
	}
	for name, text := range texts {
		for _, m := range regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]*))?\)`).FindAllStringSubmatch(text, -1) {
			target := name
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(name), m[1])
				_, err := os.Stat(target)
				require.NoError(t, err, "%s links to %s", name, m[1])
			}
			if m[2] != "" {
				require.Contains(t, anchors(texts[target]), m[2], "%s links to %s", name, target)
			}
		}
		for _, m := range regexp.MustCompile("`((?:[a-z]+/)+[a-z_]+\\.(?:go|sql|md))`").FindAllStringSubmatch(text, -1) {
			_, err := os.Stat(m[1])
			require.NoError(t, err, "%s names %s", name, m[1])
		}
	}
}

// TestLimitsInReadme compares its table with the constants.
func TestLimitsInReadme(t *testing.T) {
	for row, limit := range map[string]string{
		"payload and headers of an event": kib(outbox.MaxEventBytes),
		"headers, as JSON":                kib(outbox.MaxHeaderBytes),
		"aggregate id":                    fmt.Sprintf("%d bytes", outbox.MaxAggregateIDBytes),
		"aggregate type, event type, content type, header name": fmt.Sprintf("%d bytes", outbox.MaxNameBytes),
	} {
		require.Contains(t, documents(t)["README.md"], fmt.Sprintf("| %s | %s |", row, limit))
	}
}

func kib(n int) string { return fmt.Sprintf("%d KiB", n>>10) }

// TestLogLinesAreLogged: the messages that operations.md explains are those of
// the code, at their level, and it explains all that an operator can meet.
func TestLogLinesAreLogged(t *testing.T) {
	logged := map[string]bool{}
	for _, file := range goFiles(t) {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`\.(Info|Warn|Error)\("([^"]+)"`).FindAllSubmatch(b, -1) {
			logged[strings.ToUpper(string(m[1]))+" `"+string(m[2])+"`"] = true
		}
	}
	explained := regexp.MustCompile("(?m)^\\| ((?:INFO|WARN|ERROR) `[^`]+`) \\|").FindAllStringSubmatch(documents(t)["docs/operations.md"], -1)
	require.Greater(t, len(explained), 15)
	for _, m := range explained {
		require.Contains(t, logged, m[1], "operations.md explains a line that nobody writes")
	}
}

// TestStatesInDesign: the states of a parked event that design.md lists are
// those that the schema allows.
func TestStatesInDesign(t *testing.T) {
	schema, err := os.ReadFile("schema.sql")
	require.NoError(t, err)
	check := regexp.MustCompile(`outlog_parked_state CHECK \(state IN \(([^)]*)\)`).FindStringSubmatch(string(schema))
	require.NotNil(t, check)
	allowed := strings.Split(strings.ReplaceAll(check[1], "'", ""), ", ")
	_, table, ok := strings.Cut(documents(t)["docs/design.md"], "| state | meaning |\n|---|---|\n")
	require.True(t, ok)
	table, _, _ = strings.Cut(table, "\n\n")
	var listed []string
	for line := range strings.Lines(table) {
		listed = append(listed, strings.Trim(strings.Split(line, "|")[1], " `"))
	}
	require.ElementsMatch(t, allowed, listed)
}

// setting is a row of the table in configuration.md.
type setting struct{ option, flag, env, unit, def, rng string }

func settings(t *testing.T) (rows []setting) {
	t.Helper()
	for line := range strings.Lines(documents(t)["docs/configuration.md"]) {
		cells := strings.Split(line, "|")
		if len(cells) != 8 || strings.Contains(line, "---") || strings.Contains(line, "environment") {
			continue
		}
		for i, c := range cells {
			cells[i] = strings.Trim(c, " `\n")
		}
		rows = append(rows, setting{cells[1], cells[2], cells[3], cells[4], cells[5], cells[6]})
	}
	require.Greater(t, len(rows), 50)
	return rows
}

// TestFlagsInConfiguration compares the table with the help of serve, in both
// directions: flag, environment variable and default.
func TestFlagsInConfiguration(t *testing.T) {
	var out bytes.Buffer
	require.Zero(t, cli.Main([]string{"serve", "--help"}, &out, &out))
	help := strings.Join(strings.Fields(out.String()), " ")
	var offered, listed []string
	for _, m := range regexp.MustCompile(`--([a-z-]+)\S* (?:[^$]*?)\(\$(OUTLOG_[A-Z_]+)\)`).FindAllStringSubmatch(strings.SplitN(help, "--help", 2)[1], -1) {
		offered = append(offered, "--"+m[1]+" "+m[2])
	}
	require.Greater(t, len(offered), 5)
	for _, s := range settings(t) {
		if s.flag == "" {
			require.Empty(t, s.env, s.option)
			continue
		}
		listed = append(listed, s.flag+" "+s.env)
		if s.def != "off" && s.def != "none" {
			require.Contains(t, help, fmt.Sprintf("(%s) ($%s)", s.def, s.env))
		}
	}
	require.ElementsMatch(t, offered, listed)
}

// optionStructs are the option structs and how to find out what they accept,
// without doing anything when they accept it. nil: it would do something.
var optionStructs = map[string]struct {
	dir     string
	options any
	try     func(o any) error
}{
	"node":  {"node", node.Options{}, nil},
	"store": {"store", store.Options{}, nil},
	"relay": {"relay", relay.Options{}, func(o any) error {
		_, err := relay.New(nil, nil, nil, o.(relay.Options))
		return err
	}},
	"consumer": {"consumer", consumer.Options{Name: "c", Start: consumer.Beginning, BackoffMax: 24 * time.Hour,
		Routes: []consumer.Route{consumer.Apply[[]byte]("T", nil)}}, func(o any) error {
		_, err := consumer.New(nil, nil, nil, o.(consumer.Options))
		return err
	}},
	"broker": {"broker", broker.Options{Dir: "d", LogID: "l"}, func(o any) error {
		_, err := broker.New(o.(broker.Options))
		return err
	}},
}

// TestOptionsInConfiguration compares the table with the option structs, in
// both directions: each field is there, its comment says the default, and its
// constructor accepts the ends of its range and nothing beyond.
func TestOptionsInConfiguration(t *testing.T) {
	listed := map[string]setting{}
	for _, s := range settings(t) {
		if s.option != "" {
			listed[s.option] = s
		}
	}
	for pkg, x := range optionStructs {
		comments := fieldComments(t, x.dir)
		typ := reflect.TypeOf(x.options)
		for i := range typ.NumField() {
			name := typ.Field(i).Name
			option := pkg + ".Options." + name
			s, ok := listed[option]
			require.True(t, ok, "%s is not in docs/configuration.md", option)
			delete(listed, option)
			if comment := comments[name]; s.flag == "" && !slices.Contains([]string{"none", "required", "off", "the node's"}, s.def) {
				require.Contains(t, compact(comment), compact(s.def), "default of %s", option)
			}
			if x.try != nil {
				tryRange(t, option, s, x.options, i, x.try)
			}
		}
	}
	require.Empty(t, listed, "options that do not exist")
}

// tryRange sets a field to the ends of its range and just beyond.
func tryRange(t *testing.T, option string, s setting, options any, field int, try func(any) error) {
	t.Helper()
	m := regexp.MustCompile(`^(?:from )?(\d[^;]*?)(?: to (\d[^;]*?))?(?:;.*)?$`).FindStringSubmatch(s.rng)
	if m == nil {
		return
	}
	set := func(value int64) error {
		v := reflect.New(reflect.TypeOf(options)).Elem()
		v.Set(reflect.ValueOf(options))
		v.Field(field).SetInt(value)
		return try(v.Interface())
	}
	if !reflect.ValueOf(options).Field(field).CanInt() {
		return
	}
	low := quantity(t, m[1])
	require.NoError(t, set(low), "%s = %s", option, m[1])
	if low > 1 {
		require.Error(t, set(low-1), "%s below %s", option, m[1])
	} else {
		require.Error(t, set(-2), "%s below %s", option, m[1])
	}
	if m[2] != "" {
		top := quantity(t, m[2])
		require.NoError(t, set(top), "%s = %s", option, m[2])
		require.Error(t, set(top+1), "%s above %s", option, m[2])
	}
}

// quantity reads a number, a size or a duration.
func quantity(t *testing.T, text string) int64 {
	t.Helper()
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n
	}
	if d, err := time.ParseDuration(text); err == nil {
		return int64(d)
	}
	for unit, shift := range map[string]int{" KiB": 10, " MiB": 20, " GiB": 30} {
		if n, err := strconv.ParseInt(strings.TrimSuffix(text, unit), 10, 64); err == nil {
			return n << shift
		}
	}
	require.NoError(t, errors.New("neither number nor size nor duration"), text)
	return 0
}

// fieldComments are the comments of the fields of a package's Options. Fields
// declared together share one.
func fieldComments(t *testing.T, dir string) map[string]string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, "options.go"), nil, parser.ParseComments)
	require.NoError(t, err)
	comments := map[string]string{}
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != "Options" {
			return true
		}
		for _, field := range spec.Type.(*ast.StructType).Fields.List {
			for _, name := range field.Names {
				comments[name.Name] = field.Doc.Text()
			}
		}
		return false
	})
	return comments
}

// compact is a text without white space, with durations as Go writes them.
func compact(text string) string {
	text = strings.Join(strings.Fields(text), "")
	return strings.ReplaceAll(text, "min", "m")
}
