package integration

import (
	"context"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestClientOutsideTheModule builds a program in a separate module with pkg/client and pkg/api. The program queries a
// running indexer over NATS and over HTTP.
func TestClientOutsideTheModule(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx := harness.Context(t)
	harness.PublishAs(t, ctx, harness.OpenNamespace(t, ctx, x.NATS), "w1", &events.Batch{
		Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 4, Events: []events.Event{{
			Kind: events.Stored, Tier: events.Device,
			Locals: []events.LocalHash{1000, 1001}, Blocks: []events.BlockHash{1, 2},
		}},
	})
	program, deps := buildOutside(t, ctx, "asker")
	if strings.Contains(deps, "nats-server") {
		t.Errorf("a client brings nats-server:\n%s", deps)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	one := "w1 holds 2 of 3 blocks; complete: true\n" +
		"1 workers; node " + host + " is ready: true\ntrue true unknown_model\n"
	harness.Eventually(t, "it is answered over NATS and HTTP", func() (bool, string) {
		said, err := exec.CommandContext(ctx, program, x.NATS, x.HTTP).CombinedOutput()
		return err == nil && string(said) == one+one, string(said)
	})
}

// buildOutside builds testdata/name/main.go as a separate module. It returns the program's path and the list of linked
// packages.
func buildOutside(t *testing.T, ctx context.Context, name string) (program, deps string) {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(file, text string) {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module example.org/"+name+"\n\ngo 1.26\n\nrequire github.com/kvatlas/kvatlas v0.0.0\n\n"+
		"replace github.com/kvatlas/kvatlas => "+root+"\n")
	write("go.sum", readFile(t, "../go.sum"))
	write("main.go", readFile(t, "testdata/"+name+"/main.go"))
	command := func(args ...string) string {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = dir
		// the build has downloaded the dependencies
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOSUMDB=off", "GOWORK=off")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	program = filepath.Join(dir, name)
	command("build", "-o", program, ".")
	return program, command("list", "-deps", ".")
}

// TestPolicyOutsideTheModule builds a program in a separate module that registers a routing policy and uses the policy
// for choices. The program links no NATS client.
func TestPolicyOutsideTheModule(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	program, deps := buildOutside(t, ctx, "policy")
	if strings.Contains(deps, "nats") {
		t.Errorf("a policy brings NATS:\n%s", deps)
	}
	said, err := exec.CommandContext(ctx, program).CombinedOutput()
	want := `a rank 0 costs 10; policies: ["dynamo" "kvatlas" "least_load" "mine" "prefix_only" "random" "round_robin"]
a/0: [{dynamo 10} {by_rank 0}]
a/1: [{dynamo 10} {by_rank 10}]
b/0: [{dynamo 10} {by_rank 0}]
b/1: [{dynamo 2} {by_rank 10}]
last/0: is the last
last/1: is the last
`
	if err != nil || string(said) != want {
		t.Errorf("output (%v)\n%s\nwant\n%s", err, said, want)
	}
}

// ofThisModule has the functions for callers in this module alone. Their comments say so.
var ofThisModule = map[string]bool{"client.OverPool": true, "client.Failure": true}

// TestClientShowsNothingInternal checks that a program can name every type reachable from the exports of pkg/client,
// pkg/api and pkg/routing.
func TestClientShowsNothingInternal(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}",
		"../pkg/client", "../pkg/api", "../pkg/routing").Output()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		files[path] = file
	}
	imports := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(files[path])
	})
	s := &surface{t: t, seen: map[types.Type]bool{}}
	for _, name := range []string{"pkg/client", "pkg/api", "pkg/routing"} {
		pkg, err := imports.Import(harness.Module + name)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range pkg.Scope().Names() {
			if o := pkg.Scope().Lookup(name); o.Exported() && !ofThisModule[pkg.Name()+"."+name] {
				s.walk(pkg.Name()+"."+name, o.Type())
			}
		}
	}
	if len(s.seen) < 100 {
		t.Errorf("only %d types were seen", len(s.seen))
	}
}

// surface walks the exported types.
type surface struct {
	t    *testing.T
	seen map[types.Type]bool
}

// walk checks a type that is reachable from an exported name.
func (s *surface) walk(by string, typ types.Type) {
	if s.seen[typ] {
		return
	}
	s.seen[typ] = true
	switch typ := typ.(type) {
	case *types.Alias:
		s.walk(by, types.Unalias(typ))
	case *types.Named:
		pkg := typ.Obj().Pkg()
		if pkg == nil || !strings.HasPrefix(pkg.Path(), harness.Module) {
			return
		}
		if strings.Contains(pkg.Path(), "/internal/") {
			s.t.Errorf("%s shows %s", by, typ)
		}
		for m := range typ.Methods() {
			if m.Exported() {
				s.walk(by+"."+m.Name(), m.Type())
			}
		}
		s.walk(by, typ.Underlying())
	case *types.Pointer:
		s.walk(by, typ.Elem())
	case *types.Slice:
		s.walk(by, typ.Elem())
	case *types.Array:
		s.walk(by, typ.Elem())
	case *types.Chan:
		s.walk(by, typ.Elem())
	case *types.Map:
		s.walk(by, typ.Key())
		s.walk(by, typ.Elem())
	case *types.Struct:
		for f := range typ.Fields() {
			if f.Exported() {
				s.walk(by+"."+f.Name(), f.Type())
			}
		}
	case *types.Interface:
		for m := range typ.Methods() {
			s.walk(by+"."+m.Name(), m.Type())
		}
	case *types.Signature:
		for v := range typ.Params().Variables() {
			s.walk(by, v.Type())
		}
		for v := range typ.Results().Variables() {
			s.walk(by, v.Type())
		}
	}
}
