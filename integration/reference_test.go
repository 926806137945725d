package integration

import (
	"cmp"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

//go:generate go test -run TestReferencePages -update .

// TestReferencePages compares docs/reference.md with the code: commands, settings, subjects, paths, error codes, exit
// statuses and findings. -update rewrites the page.
func TestReferencePages(t *testing.T) {
	t.Parallel()
	const page = "../docs/reference.md"
	want := reference(t)
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	is := strings.Split(readFile(t, page), "\n")
	for i, line := range strings.Split(want, "\n") {
		if i >= len(is) || is[i] != line {
			t.Fatalf("%s is not what the code has, from line %d on, which should be %q: go generate ./integration "+
				"writes it", page, i+1, line)
		}
	}
}

func reference(t *testing.T) string {
	var b strings.Builder
	b.WriteString(`# Reference

Made from the code by ` + "`go generate ./integration`" + `: do not edit it.

- [Settings](#settings)
- [indexer](#indexer-and-its-commands), [worker-shim](#worker-shim-and-its-commands)
- [Exit statuses](#exit-statuses)
- [Findings of indexer doctor](#findings-of-indexer-doctor)
- [NATS](#nats)
- [HTTP](#http)
- [Error codes](#error-codes)
- Metrics have [a page of their own](metrics.md).

## Settings

A setting is looked for as a flag, then in the environment, then in the YAML file that ` + "`--config`" + ` names; then its
default holds. The flag ` + "`--snapshot-interval`" + ` is ` + "`KVATLAS_SNAPSHOT_INTERVAL`" + ` in the environment and
` + "`snapshot-interval`" + ` in the file. These flags have the names that users of NATS and OpenTelemetry know, too:

| flag | environment |
|---|---|
`)
	for _, flag := range slices.Sorted(maps.Keys(cli.KnownNames)) {
		fmt.Fprintf(&b, "| `--%s` | `%s` |\n", flag, cli.KnownNames[flag])
	}
	b.WriteString("\nForms of JSON outputs: `{name: TYPE}` is an object, `name?` a field that may be absent, `[TYPE]` a " +
		"list, `{*: TYPE}` an\nobject with any names. Other names are schemas of `GET /v1/openapi.json`. After an error of an " +
		"indexer, the output is an\n`ErrorBody`. In JSON, `instance` or `worker` is the name of a worker.\n")
	for _, name := range []string{"indexer", "worker-shim"} {
		r := harness.Run(t, name, "man", "--markdown")
		if r.Code != 0 {
			t.Fatalf("%s man --markdown: %+v", name, r)
		}
		fmt.Fprintf(&b, "\n## %s and its commands\n\n%s\n", name, strings.TrimRight(r.Stdout, "\n"))
	}
	b.WriteString("\n## Exit statuses\n\n| status | meaning |\n|---|---|\n" + statuses())

	b.WriteString("\n## Findings of indexer doctor\n\n`id` in `indexer doctor --json`. [doctor.md](doctor.md) explains the " +
		"report, which has the remedy of each finding.\n\n| id | severity | meaning |\n|---|---|---|\n")
	for _, f := range doctor.Faults() {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.ID, cmp.Or(f.Severity, "either"), escape(f.Meaning))
	}

	b.WriteString("\n## NATS\n\n`<ns>` is a namespace, `<p>` a partition; the other names are tokens in which bytes other " +
		"than letters,\ndigits, `-` and `_` are `=` and two hex digits. [security.md](security.md) lists the\npermissions of each role.\n\n" +
		"| name | what it is |\n|---|---|\n")
	_, list, _ := strings.Cut(readFile(t, "../pkg/jetstream/subjects.go"), "made by [EscapeToken].\n//\n")
	list, _, _ = strings.Cut(list, "\nconst ")
	rows := 0
	for line := range strings.Lines(list) {
		name, meaning, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "//\t"), "  ")
		if !ok {
			t.Fatalf("pkg/jetstream/subjects.go has the line %q", line)
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", name, escape(strings.Join(strings.Fields(meaning), " ")))
		rows++
	}
	if rows < 15 {
		t.Fatalf("only %d subjects were found", rows)
	}

	b.WriteString("\n## HTTP\n\n`GET /v1/openapi.json` has their fields; [api.md](api.md) explains them. A browser shows [the " +
		"live page](page.md)\nat `/`.\n\n| path | what it is | errors |\n|---|---|---|\n")
	var document struct {
		Paths map[string]map[string]struct {
			Summary   string
			Responses map[string]json.RawMessage
		}
	}
	if err := json.Unmarshal([]byte(readFile(t, "../internal/serve/server/openapi.json")), &document); err != nil {
		t.Fatal(err)
	}
	for _, path := range slices.Sorted(maps.Keys(document.Paths)) {
		for _, method := range slices.Sorted(maps.Keys(document.Paths[path])) {
			op := document.Paths[path][method]
			var statuses []string
			for _, status := range slices.Sorted(maps.Keys(op.Responses)) {
				if !strings.HasPrefix(status, "2") {
					statuses = append(statuses, status)
				}
			}
			fmt.Fprintf(&b, "| `%s %s` | %s | %s |\n", strings.ToUpper(method), path, escape(op.Summary),
				strings.Join(statuses, ", "))
		}
	}

	b.WriteString("\n## Error codes\n\n[errors.md](errors.md) explains the codes, and the limits of requests.\n\n" +
		"| code | status | meaning or remedy |\n|---|---|---|\n")
	parsed, err := parser.ParseFile(token.NewFileSet(), "../pkg/api/errors.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	codes := 0
	ast.Inspect(parsed, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok && len(spec.Values) == 1 && strings.HasPrefix(spec.Names[0].Name, "Code") {
			literal, _ := spec.Values[0].(*ast.BasicLit)
			code, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "| `%s` | %d | %s |\n", code, api.Code(code).HTTPStatus(),
				escape(strings.TrimSpace(spec.Comment.Text())))
			codes++
		}
		return true
	})
	if codes < 20 {
		t.Fatalf("only %d error codes were found", codes)
	}
	b.WriteString("\nNext: [Glossary](glossary.md)\n")
	return b.String()
}

// statuses returns the rows of a table of exit statuses.
func statuses() string {
	var b strings.Builder
	for status, meaning := range cli.Statuses {
		fmt.Fprintf(&b, "| %d | %s |\n", status, meaning)
	}
	return b.String()
}

// TestExitStatusesAreListed: docs/commands.md and the help of both programs have all exit statuses.
func TestExitStatusesAreListed(t *testing.T) {
	t.Parallel()
	if table := "| exit status | meaning |\n|---|---|\n" + statuses(); !strings.Contains(readFile(t,
		"../docs/commands.md"), table) {
		t.Errorf("docs/commands.md has no table of exit statuses:\n%s", table)
	}
	for _, name := range []string{"indexer", "worker-shim"} {
		help := harness.Run(t, name, "--help").Stdout
		for status, meaning := range cli.Statuses {
			if row := fmt.Sprintf("\n  %d  %s", status, strings.ReplaceAll(meaning, "`", "")); !strings.Contains(help, row) {
				t.Errorf("%s --help has no line %q", name, row)
			}
		}
	}
}

// TestSchemasExist: the names in the forms of JSON outputs are schemas of openapi.json.
func TestSchemasExist(t *testing.T) {
	t.Parallel()
	var document struct {
		Components struct{ Schemas map[string]json.RawMessage }
	}
	if err := json.Unmarshal([]byte(readFile(t, "../internal/serve/server/openapi.json")), &document); err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, part := range strings.Split(readFile(t, "../docs/reference.md"), "Output with `--json`:\n\n")[1:] {
		form, _, _ := strings.Cut(part, "\n\n")
		for _, name := range regexp.MustCompile(`\b[A-Z][A-Za-z0-9]+\b[^:?]`).FindAllString(form+" ", -1) {
			name = name[:len(name)-1]
			if found++; document.Components.Schemas[name] == nil {
				t.Errorf("openapi.json has no schema %s, which is in the form %s", name, form)
			}
		}
	}
	if found < 20 {
		t.Errorf("only %d names were found", found)
	}
}

func escape(text string) string {
	return strings.NewReplacer("|", `\|`, "<", `\<`, "*", `\*`).Replace(text)
}

// TestManualPages checks that both programs write a page for every command, without text that man would interpret.
func TestManualPages(t *testing.T) {
	t.Parallel()
	for name, some := range map[string][]string{"indexer": {"indexer", "indexer-serve", "indexer-workers-drain"},
		"worker-shim": {"worker-shim", "worker-shim-run"}} {
		dir := filepath.Join(t.TempDir(), "man1")
		if r := harness.Run(t, name, "man", dir); r.Code != 0 || r.Stdout != "" || r.Stderr != "" {
			t.Fatalf("%s man: %+v", name, r)
		}
		for _, page := range some {
			text := readFile(t, filepath.Join(dir, page+".1"))
			for _, part := range []string{".TH ", "\n.SH NAME\n", "\n.SH SYNOPSIS\n", "\n.SH OPTIONS", "\n.SH EXIT STATUS\n"} {
				if !strings.Contains("\n"+text, part) {
					t.Errorf("%s.1 has no %q", page, part)
				}
			}
		}
		pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
		if err != nil {
			t.Fatal(err)
		}
		for _, page := range pages {
			for line := range strings.Lines(readFile(t, page)) {
				word, _, _ := strings.Cut(strings.TrimSpace(line), " ")
				if strings.HasPrefix(word, "'") || strings.HasPrefix(word, ".") && !slices.Contains(
					[]string{".TH", ".SH", ".PP", ".nf", ".fi", ".TP", ".br", ".BR"}, word) {
					t.Errorf("%s has the line %q", page, line)
				}
			}
		}
		for _, args := range [][]string{{"man"}, {"man", dir, "--markdown"}, {"man", dir, dir}} {
			if r := harness.Run(t, name, args...); r.Code != 2 {
				t.Errorf("%s %q: %+v", name, args, r)
			}
		}
	}
}
