package integration

import (
	"fmt"
	"go/ast"
	"path/filepath"
	"strings"
	"testing"
)

// mostExports is the largest number of exported names at package level in pkg. Lower it after a removal. A name that
// only internal packages use belongs into one of them.
const mostExports = 798

// exportedNames returns the exported functions, types, variables and constants of a package. Methods and fields belong
// to their types.
func exportedNames(t *testing.T, dir string) (names []string) {
	t.Helper()
	add := func(id *ast.Ident) {
		if id.IsExported() {
			names = append(names, filepath.Base(dir)+"."+id.Name)
		}
	}
	for _, f := range parseDir(t, dir) {
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil {
					add(d.Name)
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.TypeSpec:
						add(s.Name)
					case *ast.ValueSpec:
						for _, id := range s.Names {
							add(id)
						}
					}
				}
			}
		}
	}
	return names
}

// TestExportedNamesAreBounded: the packages of pkg have at most mostExports exported names.
func TestExportedNamesAreBounded(t *testing.T) {
	t.Parallel()
	dirs, err := filepath.Glob("../pkg/*")
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	var counts []string
	for _, dir := range dirs {
		n := len(exportedNames(t, dir))
		counts, total = append(counts, fmt.Sprintf("%s %d", filepath.Base(dir), n)), total+n
	}
	if total > mostExports || total < 500 {
		t.Errorf("pkg exports %d names, and the limit is %d: %s", total, mostExports, strings.Join(counts, ", "))
	}
}
