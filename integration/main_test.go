package integration

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/testkit"
)

// TestMain runs all tests, or under the race detector those of [concurrentTests], unless the flag -run is given. The
// tests start programs, which are built without the detector. The packages of the programs have their own tests under
// the detector.
func TestMain(m *testing.M) {
	if testkit.Race {
		flag.Set("test.run", "^("+strings.Join(concurrentTests(), "|")+")$")
	}
	harness.MainOf(m, 12)
}

// concurrentTests returns the tests in files that start goroutines.
func concurrentTests() (names []string) {
	paths, err := filepath.Glob("*_test.go")
	if err != nil {
		panic(err)
	}
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			panic(err)
		}
		if !startsGoroutines(file) {
			continue
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				names = append(names, f.Name.Name)
			}
		}
	}
	return names
}

// startsGoroutines reports whether a file has a go statement or calls a method Go.
func startsGoroutines(file *ast.File) (found bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			found = true
		case *ast.CallExpr:
			method, ok := n.Fun.(*ast.SelectorExpr)
			found = found || ok && method.Sel.Name == "Go"
		}
		return !found
	})
	return found
}

// TestConcurrentTests: the race detector runs some tests of this package, and not all.
func TestConcurrentTests(t *testing.T) {
	names := strings.Join(concurrentTests(), " ")
	if !strings.Contains(names, "TestTenants ") || strings.Contains(names, "TestDocs") {
		t.Errorf("under the race detector: %s", names)
	}
}
