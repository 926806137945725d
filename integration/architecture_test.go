package integration

import (
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// imports returns the arrows between our packages, as "from --> to", tests left out.
func imports(t *testing.T) (arrows []string) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var pkg struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&pkg); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		for _, to := range pkg.Imports {
			if strings.HasPrefix(to, harness.Module) {
				arrows = append(arrows, strings.TrimPrefix(pkg.ImportPath, harness.Module)+" --> "+
					strings.TrimPrefix(to, harness.Module))
			}
		}
	}
	slices.Sort(arrows)
	return arrows
}

// TestPictureShowsTheImports holds the picture in ARCHITECTURE.md to the code: the same arrows, no more and no fewer.
func TestPictureShowsTheImports(t *testing.T) {
	text, err := os.ReadFile("../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	var drawn []string
	for _, m := range regexp.MustCompile(`(?m)^\s*([\w/-]+) --> ([\w/& -]+)$`).FindAllStringSubmatch(string(text), -1) {
		for _, to := range strings.Split(m[2], "&") {
			drawn = append(drawn, m[1]+" --> "+strings.TrimSpace(to))
		}
	}
	slices.Sort(drawn)
	real := imports(t)
	for _, a := range real {
		if !slices.Contains(drawn, a) {
			t.Errorf("the code has an arrow that the picture lacks: %s", a)
		}
	}
	for _, a := range drawn {
		if !slices.Contains(real, a) {
			t.Errorf("the picture has an arrow that the code lacks: %s", a)
		}
	}
}

// TestArrowsPointDown keeps the promises of the layering, whatever is drawn.
func TestArrowsPointDown(t *testing.T) {
	core := map[string][]string{ // all that these may import of ours
		"pkg/events":   {},
		"pkg/radix":    {"pkg/events"},
		"pkg/snapshot": {"pkg/events"},
		"pkg/hicache":  {"pkg/events"},
	}
	for _, a := range imports(t) {
		from, to, _ := strings.Cut(a, " --> ")
		if allowed, ok := core[from]; ok && !slices.Contains(allowed, to) {
			t.Errorf("%s: %s may import only %v of ours", a, from, allowed)
		}
		if strings.HasPrefix(from, "pkg/") && !strings.HasPrefix(to, "pkg/") || strings.HasPrefix(to, "cmd/") {
			t.Errorf("%s points up", a)
		}
		command := []string{"tools/demo", "tools/bench/command", "tools/simulate"} // thin commands of the programs
		if strings.HasPrefix(from, "cmd/") && strings.HasPrefix(to, "tools/") && !slices.Contains(command, to) {
			t.Errorf("%s: of tools, a program imports only %v", a, command)
		}
		if product := strings.HasPrefix(from, "pkg/") || strings.HasPrefix(from, "internal/"); product &&
			strings.HasPrefix(to, "tools/") {
			t.Errorf("%s: the product imports nothing of tools", a)
		}
	}
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}}: {{join .Imports " "}}`, "../...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(out), "\n") {
		pkg, list, _ := strings.Cut(line, ": ")
		if strings.Contains(list, "github.com/nats-io/") && pkg != harness.Module+"pkg/jetstream" {
			t.Errorf("%s imports NATS; only pkg/jetstream may", pkg)
		}
	}
}
