package integration

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// unit returns the row of a package in ARCHITECTURE.md: a program, a package of pkg with its subpackages, or a group of
// internal.
func unit(pkg string) string {
	if parts := strings.Split(pkg, "/"); len(parts) > 2 {
		return parts[0] + "/" + parts[1]
	}
	return pkg
}

// testHelpers has helpers for tests. The product imports nothing of it.
const testHelpers = "internal/testkit"

// units returns the imports between the units of the product, as "from --> to".
func units(t *testing.T) (arrows []string) {
	product := regexp.MustCompile("^(cmd|internal|pkg)/")
	for _, a := range imports(t) {
		from, to, _ := strings.Cut(a, " --> ")
		if strings.HasPrefix(from, testHelpers) {
			continue
		}
		if from, to = unit(from), unit(to); from != to && product.MatchString(from) && product.MatchString(to) {
			arrows = append(arrows, from+" --> "+to)
		}
	}
	slices.Sort(arrows)
	return slices.Compact(arrows)
}

// packageImports has the imports of all packages of this module, without tests. Package paths lack [harness.Module].
var packageImports = sync.OnceValues(func() (map[string][]string, error) {
	cmd := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	list := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		words := strings.Fields(line)
		list[strings.TrimPrefix(words[0], harness.Module)] = words[1:]
	}
	return list, nil
})

// imports returns the arrows between our packages, as "from --> to", tests left out.
func imports(t *testing.T) (arrows []string) {
	t.Helper()
	list, err := packageImports()
	if err != nil {
		t.Fatal(err)
	}
	for from, imported := range list {
		for _, to := range imported {
			if to, ours := strings.CutPrefix(to, harness.Module); ours {
				arrows = append(arrows, from+" --> "+to)
			}
		}
	}
	slices.Sort(arrows)
	return arrows
}

var update = flag.Bool("update", false, "write the table of imports in ARCHITECTURE.md")

var (
	importRow = regexp.MustCompile("(?m)^\\| `([\\w/-]+)` \\| ((?:`[\\w/-]+` ?)+) \\|$")
	layerRow  = regexp.MustCompile("(?m)^\\| \\w+ \\| ((?:`[\\w/-]+` ?)+) \\|$")
)

// TestPictureShowsTheImports compares the tables in ARCHITECTURE.md with the code. The imports between units must be
// equal, and layers may import only their own packages and lower layers.
func TestPictureShowsTheImports(t *testing.T) {
	t.Parallel()
	text := readFile(t, "../ARCHITECTURE.md")
	real := units(t)
	if *update {
		text = importRow.ReplaceAllString(text, "")
		top, bottom, _ := strings.Cut(text, "| package | imports |\n|---|---|\n")
		table, last := "", ""
		for _, a := range real {
			from, to, _ := strings.Cut(a, " --> ")
			if from != last {
				table += "|\n| `" + from + "` | "
			}
			table, last = table+"`"+to+"` ", from
		}
		table = strings.TrimPrefix(table, "|\n") + "|\n\n"
		text = top + "| package | imports |\n|---|---|\n" + table + strings.TrimLeft(bottom, "\n")
		if err := os.WriteFile("../ARCHITECTURE.md", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	layers := map[string]int{}
	for i, m := range layerRow.FindAllStringSubmatch(text, -1) {
		for _, pkg := range strings.Fields(strings.ReplaceAll(m[1], "`", "")) {
			layers[pkg] = i + 1
		}
	}
	var drawn []string
	for _, m := range importRow.FindAllStringSubmatch(text, -1) {
		for _, to := range strings.Fields(strings.ReplaceAll(m[2], "`", "")) {
			drawn = append(drawn, m[1]+" --> "+to)
		}
	}
	for _, a := range real {
		if !slices.Contains(drawn, a) {
			t.Errorf("the code has an import that the page lacks: %s; -update writes it", a)
		}
		from, to, _ := strings.Cut(a, " --> ")
		if layers[from] == 0 || layers[to] == 0 {
			t.Errorf("%s: the page lacks the layer of one of them", a)
		} else if layers[from] > layers[to] {
			t.Errorf("%s points to a layer above", a)
		}
	}
	for _, a := range drawn {
		if !slices.Contains(real, a) {
			t.Errorf("the page has an import that the code lacks: %s; -update removes it", a)
		}
	}
}

// TestGroupsListTheirPackages: internal has at most ten groups beside testkit, each with a doc.go that lists exactly
// the packages of the group.
func TestGroupsListTheirPackages(t *testing.T) {
	t.Parallel()
	groups, err := os.ReadDir("../internal")
	if err != nil || len(groups) == 0 || len(groups) > 11 {
		t.Fatalf("internal has %d groups: %v", len(groups), err)
	}
	item := regexp.MustCompile(`(?m)^//   - (\w+) `)
	for _, group := range groups {
		folder := "../internal/" + group.Name()
		entries, err := os.ReadDir(folder)
		if err != nil {
			t.Fatal(err)
		}
		var there, listed []string
		for _, e := range entries {
			if e.IsDir() {
				there = append(there, e.Name())
			}
		}
		for _, m := range item.FindAllStringSubmatch(readFile(t, folder+"/doc.go"), -1) {
			listed = append(listed, m[1])
		}
		if !slices.Equal(there, listed) {
			t.Errorf("%s/doc.go lists %q, and the folder has %q", folder, listed, there)
		}
	}
}

// TestPictureNamesWhatIsThere checks that every file and package in ARCHITECTURE.md and CONTRIBUTING.md exists.
func TestPictureNamesWhatIsThere(t *testing.T) {
	t.Parallel()
	path := regexp.MustCompile(`\b(?:cmd|docs|integration|internal|pkg|tools)/[\w/.-]*\w`)
	for _, page := range []string{"ARCHITECTURE.md", "CONTRIBUTING.md"} {
		named := path.FindAllString(readFile(t, "../"+page), -1)
		for _, name := range named {
			if _, err := os.Stat("../" + name); err != nil {
				t.Errorf("%s names %s: %v", page, name, err)
			}
		}
		if len(named) < 10 {
			t.Errorf("%s names only %q: the pattern has become too narrow", page, named)
		}
	}
}

// TestArrowsPointDown checks the rules of the layering.
func TestArrowsPointDown(t *testing.T) {
	t.Parallel()
	core := map[string][]string{ // the only permitted imports from this module
		"internal/base/msgp":         {},
		"internal/base/loop":         {},
		"internal/base/littleendian": {},
		"internal/base/dial":         {},
		"internal/base/strictjson":   {},
		"internal/base/datafolder":   {},
		"internal/base/ops":          {},
		"internal/base/rpc":          {},
		"pkg/events":                 {"internal/base/msgp", "internal/base/littleendian", "internal/base/strictjson"},
		"pkg/radix":                  {"pkg/events"},
		"pkg/snapshot":               {"pkg/events", "internal/base/littleendian"},
		"pkg/hicache":                {"pkg/events", "internal/base/dial", "internal/base/strictjson"},
		"pkg/routing":                {"pkg/events"},
	}
	for _, a := range imports(t) {
		from, to, _ := strings.Cut(a, " --> ")
		if allowed, ok := core[from]; ok && !slices.Contains(allowed, to) {
			t.Errorf("%s: %s may import only %v of ours", a, from, allowed)
		}
		public := strings.HasPrefix(to, "pkg/") || strings.HasPrefix(to, "internal/base/")
		if strings.HasPrefix(from, "pkg/") && !public || strings.HasPrefix(to, "cmd/") {
			t.Errorf("%s points up", a)
		}
		if strings.HasPrefix(to, testHelpers) && regexp.MustCompile("^(cmd|internal|pkg)/").MatchString(from) &&
			!strings.HasPrefix(from, testHelpers) {
			t.Errorf("%s: the product imports helpers for tests", a)
		}
		// thin commands of the programs
		command := []string{"tools/demo", "tools/bench/command", "tools/routesim", "tools/simulate", "tools/whatif"}
		if strings.HasPrefix(from, "cmd/") && strings.HasPrefix(to, "tools/") && !slices.Contains(command, to) {
			t.Errorf("%s: of tools, a program imports only %v", a, command)
		}
		if product := strings.HasPrefix(from, "pkg/") || strings.HasPrefix(from, "internal/"); product &&
			strings.HasPrefix(to, "tools/") {
			t.Errorf("%s: the product imports nothing of tools", a)
		}
	}
	list, err := packageImports()
	if err != nil {
		t.Fatal(err)
	}
	may := []string{"pkg/jetstream", "pkg/client", "internal/base/rpc", "internal/edge/natsserver",
		"internal/edge/natsauth"}
	for pkg, imported := range list {
		nats := func(path string) bool { return strings.HasPrefix(path, "github.com/nats-io/") }
		if slices.ContainsFunc(imported, nats) && !slices.Contains(may, pkg) {
			t.Errorf("%s imports NATS; only %v may", pkg, may)
		}
	}
}

// TestShimIsSmall checks the dependencies of worker-shim, which runs beside every engine. A NATS server, gRPC or
// templates would double the program's size: a program with text/template keeps all methods of all types.
// The measured program has cgo, and is 0.3 % larger than that of a release.
func TestShimIsSmall(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", "../cmd/worker-shim").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.Lines(string(out)) {
		for _, large := range []string{"github.com/nats-io/nats-server", "google.golang.org/grpc", "k8s.io/", "html/template",
			"github.com/kvatlas/kvatlas/internal/edge/natsserver"} {
			if strings.HasPrefix(pkg, large) {
				t.Errorf("worker-shim imports %s", strings.TrimSpace(pkg))
			}
		}
	}
	info, err := os.Stat(harness.Program(t, "worker-shim"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > 18_000_000 {
		t.Errorf("worker-shim has %d bytes, more than 18 MB", info.Size())
	}
}
