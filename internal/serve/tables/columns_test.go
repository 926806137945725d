package tables

import (
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// TestTablesHaveExplainedColumns: functions of this package print tables with explained columns only.
func TestTablesHaveExplainedColumns(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	tables := 0
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			method, is := n.(*ast.SelectorExpr)
			if !is || method.Sel.Name != "Table" {
				return true
			}
			if on, is := method.X.(*ast.Ident); is && on.Name == "cli" {
				t.Errorf("%s: cli.Table prints columns without an explanation: use cli.Columns", file)
			}
			tables++
			return true
		})
	}
	if tables < 25 {
		t.Errorf("only %d tables were found", tables)
	}
}

// TestTermsHaveColumns: every term in the explanation of a policy is a column with an explanation.
func TestTermsHaveColumns(t *testing.T) {
	var b strings.Builder
	for _, name := range []string{"kvatlas", "dynamo"} {
		s, err := routing.New(name, routing.DefaultConfig())
		if err != nil {
			t.Fatal(err)
		}
		r := &routing.Request{ISL: 100, BlockSize: 16, Blocks: 6, Explain: true}
		chosen, err := s.Choose(r, []routing.Candidate{{Worker: &routing.Worker{ID: "w1"}, HasLoad: true}},
			rand.New(rand.NewPCG(1, 2)), new(routing.Scratch))
		if err != nil {
			t.Fatal(err)
		}
		b.Reset()
		choice(&b, chosen.Explanation)
		_, heading, _ := strings.Cut(b.String(), "WORKER")
		heading, _, _ = strings.Cut("WORKER"+heading, "\n")
		got := slices.DeleteFunc(strings.Split(heading, "  "), func(name string) bool { return name == "" })
		want := slices.Concat(candidatesBase.List[1:], map[string]cli.Columns{"kvatlas": KvatlasColumns,
			"dynamo": DynamoColumns}[name].List)
		for i, c := range want {
			if len(got) != len(want) || strings.TrimSpace(got[i]) != c.Name {
				t.Fatalf("%s has the columns %q, want %v", name, got, want)
			}
		}
	}
}
