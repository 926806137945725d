package cli

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// named is a foreign text behind a method.
type named string

func (n named) String() string { return string(n) }

const hostile = "w\x1b[2J\nready\t\u009b\u202e\u2028\xff"

const harmless = `w\x1b[2J\nready\t\u009b\u202e\u2028\xff`

func TestPrintEscapes(t *testing.T) {
	var out strings.Builder
	Fprintf(&out, "%s %v %-5d|%*d|%.1f %x\n", hostile, []any{named(hostile), errors.New(hostile)}, 7, 4, 8, 1.25, "\x1b")
	Fprintln(&out, hostile, uint8(3), &struct{ Name string }{hostile})
	Fprintln(&out)
	if err := Table(&out, []string{"NAME", "N"}, [][]any{{hostile, 1}, {named("b"), true}}); err != nil {
		t.Fatal(err)
	}
	want := harmless + " [" + harmless + " " + harmless + "] 7    |   8|1.2 1b\n" +
		harmless + " 3 &{" + harmless + "}\n\n" +
		"NAME" + strings.Repeat(" ", len(harmless)-2) + "N\n" + harmless + "  1\nb" + strings.Repeat(" ", len(harmless)+1) +
		"true\n"
	if out.String() != want {
		t.Errorf("printed\n%s\nwant\n%s", out.String(), want)
	}
}

// TestErrorsAreEscaped: an error with foreign text is one harmless line on standard error.
func TestErrorsAreEscaped(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	old := os.Stderr
	os.Stderr = write
	root := &cobra.Command{Use: "p", RunE: func(*cobra.Command, []string) error {
		return errors.New("worker " + hostile + " is odd")
	}}
	root.SetArgs(nil)
	status := Main(root)
	os.Stderr = old
	write.Close()
	text := make([]byte, 1000)
	n, _ := read.Read(text)
	want := `p: worker w\x1b[2J; ready\t\u009b\u202e\u2028\xff is odd` + "\n"
	if status != 1 || string(text[:n]) != want {
		t.Errorf("status %d, %q, want %q", status, text[:n], want)
	}
}

// TestLogsAreEscaped: log lines are harmless for all names and messages.
func TestLogsAreEscaped(t *testing.T) {
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	logger := LogFlags(flags)
	var out strings.Builder
	log, err := logger(&out)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{hostile, "a\x7f", "a\ufe0fb", "\u2800", "\x9b", "a\nb", "\u061c"} {
		out.Reset()
		log.Info(text, text, text, "error", errors.New(text), "list", []string{text}, slog.Group(text, "a", named(text)))
		line, ended := strings.CutSuffix(out.String(), "\n")
		if !ended || escape.Text(line) != line {
			t.Errorf("%q is logged as %q", text, out.String())
		}
	}
}

// TestCommandsPrintEscaped: commands print with Fprintf, Fprintln and Table of this package, never with package fmt.
func TestCommandsPrintEscaped(t *testing.T) {
	files, err := filepath.Glob("../../../cmd/*/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("%v: %v", files, err)
	}
	set := token.NewFileSet()
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(set, path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, is := n.(*ast.CallExpr)
			if !is {
				return true
			}
			f, is := call.Fun.(*ast.SelectorExpr)
			if !is {
				return true
			}
			name := f.Sel.Name
			if pkg, is := f.X.(*ast.Ident); is && pkg.Name == "fmt" && strings.Contains(name, "rint") &&
				!strings.HasPrefix(name, "S") && !literals(call.Args) {
				t.Errorf("%s: fmt.%s may print foreign text:  use cli.Fprintf or cli.Fprintln",
					set.Position(call.Pos()), name)
			}
			return true
		})
	}
}

// literals reports whether all arguments except a writer are literals.
func literals(args []ast.Expr) bool {
	for i, a := range args {
		_, writer := a.(*ast.Ident)
		if _, is := a.(*ast.BasicLit); !is && !(writer && i == 0) {
			return false
		}
	}
	return true
}
