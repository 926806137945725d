package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestWarningsHaveRemedies reads the log lines of both programs: every warning or error about a wait, a refusal or a
// failure has a remedy.
func TestWarningsHaveRemedies(t *testing.T) {
	trouble := regexp.MustCompile(
		`wait|permit|cannot|could not|lost|accepts nothing|accept events|not written|refus|is unhealthy|silent|not heard|no NATS|does not|^NATS$`)
	// nothing need be done, or nothing can be
	informs := regexp.MustCompile(
		`cannot be decoded|registration cannot be read|could not be replayed`)
	found := 0
	for _, folder := range []string{"cmd/indexer", "cmd/worker-shim", "internal/ingest/shim/host",
		"internal/ingest/source", "internal/ingest/pods", "internal/operate/upkeep", "internal/serve/launch",
		"internal/serve/server",
		"internal/serve/shimport"} {
		files, err := filepath.Glob(filepath.Join("..", "..", folder, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", folder, err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			parsed, err := parser.ParseFile(set, file, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(parsed, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || len(call.Args) == 0 {
					return true
				}
				method, ok := call.Fun.(*ast.SelectorExpr)
				if !ok || !slices.Contains([]string{"Warn", "Error", "WarnTo"}, method.Sel.Name) {
					return true
				}
				args := call.Args
				if method.Sel.Name == "WarnTo" { // of host.Limiter; the logger comes first
					args = args[1:]
				}
				message, advised := "", false
				ast.Inspect(args[0], func(n ast.Node) bool {
					if text, ok := n.(*ast.BasicLit); ok {
						message += strings.Trim(text.Value, "\"`")
					}
					return true
				})
				for _, arg := range args[1:] {
					text, ok := arg.(*ast.BasicLit)
					advised = advised || ok && text.Value == `"what_to_do"`
				}
				if trouble.MatchString(message) && !informs.MatchString(message) {
					if found++; !advised {
						t.Errorf("%s: %q has no what_to_do", set.Position(call.Pos()), message)
					}
				}
				return true
			})
		}
	}
	if found < 30 {
		t.Errorf("only %d lines of trouble were found", found)
	}
}
