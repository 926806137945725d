package integration

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// programLines has the most lines of Go of each program, tests left out. Programs contain flags and wiring only, and
// new logic belongs in an internal package. Lower a number after a reduction.
var programLines = map[string]int{"cmd/indexer": 2140, "cmd/worker-shim": 565}

// longestFunction is the most lines of a function, tests and generated files left out.
const longestFunction = 80

// longestFile is the most lines of a file, generated files left out.
const longestFile = 700

// eachProductFile calls visit with each Go file below a folder, tests left out.
func eachProductFile(t *testing.T, folder string, visit func(path string, set *token.FileSet, file *ast.File)) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join("..", folder), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != ".." {
			return filepath.SkipDir
		}
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.ParseComments)
		if err == nil {
			visit(path, set, file)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestProgramsAreSmall: programs have no more lines than programLines, and none much smaller than its number.
func TestProgramsAreSmall(t *testing.T) {
	t.Parallel()
	for folder, most := range programLines {
		lines := 0
		eachProductFile(t, folder, func(path string, set *token.FileSet, file *ast.File) {
			lines += set.File(file.FileStart).LineCount() - 1
		})
		if lines > most {
			t.Errorf("%s has %d lines, more than %d: move logic into an internal package", folder, lines, most)
		}
		if lines < most*9/10 {
			t.Errorf("%s has %d lines; lower its number in programLines, which is %d", folder, lines, most)
		}
	}
}

// TestFunctionsAreShort: no function of this repository is longer than longestFunction, and no file longer than
// longestFile.
func TestFunctionsAreShort(t *testing.T) {
	t.Parallel()
	files := 0
	eachProductFile(t, "", func(path string, set *token.FileSet, file *ast.File) {
		if ast.IsGenerated(file) {
			return
		}
		files++
		if n := set.File(file.FileStart).LineCount() - 1; n > longestFile {
			t.Errorf("%s has %d lines, more than %d: split it by duty", path, n, longestFile)
		}
		for _, d := range file.Decls {
			f, is := d.(*ast.FuncDecl)
			if !is {
				continue
			}
			if n := set.Position(f.End()).Line - set.Position(f.Pos()).Line + 1; n > longestFunction {
				t.Errorf("%s: %s has %d lines, more than %d: split it into named steps", path, f.Name.Name, n,
					longestFunction)
			}
		}
	})
	if files < 500 {
		t.Errorf("the test finds only %d files", files)
	}
}
