package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// commands returns the commands in a shell script, or in a part of a Markdown text.
func commands(text, before string) (list []string) {
	for line := range strings.Lines(text) {
		if command, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), before); ok && command != "" &&
			command[0] != '#' && command[0] != ' ' {
			list = append(list, command)
		}
	}
	return list
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestWhatUsersRunIsTested checks that CI runs the test commands of README before a change lands, the race detector,
// which compiles other code, and the linter.
func TestWhatUsersRunIsTested(t *testing.T) {
	_, part, found := strings.Cut(readFile(t, "../README.md"), "\n## Test it\n")
	part, _, _ = strings.Cut(part, "\n## ")
	wanted := commands(part, "    ")
	if !found || !slices.Contains(wanted, "go test ./...") || !slices.Contains(wanted, "make judges") {
		t.Fatalf("README's part on tests has the commands %q", wanted)
	}
	script := readFile(t, "../.ci/run")
	run := commands(script, "")
	for _, command := range append(wanted, "make lint") {
		if !slices.Contains(run, command) {
			t.Errorf(".ci/run has no line %q", command)
		}
	}
	if race := "nice -n 5 go test -race -vet=off -ldflags=-w -timeout 40m ./..."; !slices.Contains(run, race) {
		t.Errorf(".ci/run does not run %q", race)
	}
	// The build of Kubernetes ends before the tests. Kubernetes is a part of make judges, and runs before it.
	at := -1
	for _, command := range []string{"go run ./integration/judges/kube/fetch", "go test ./...",
		`make kube >"$log" 2>&1 &`, "wait $kube && status=0 || status=$?", "[ $status = 0 ]", "make judges"} {
		next := slices.Index(run, command)
		if next <= at {
			t.Errorf(".ci/run does not run %q, or not in this order", command)
		}
		at = next
	}
	if !slices.Contains(run, "set -euo pipefail") {
		t.Error(".ci/run continues after a failed command")
	}
}

// TestDailyChecks checks that .ci/daily begins with the search for known vulnerabilities and runs all tests wholly, and
// that a failed command ends the script. go.mod pins govulncheck, and releases use the checked version of Go.
func TestDailyChecks(t *testing.T) {
	run := commands(readFile(t, "../.ci/daily"), "")
	if len(run) < 3 || run[0] != "set -euo pipefail" || run[2] != "make vulncheck" {
		t.Errorf(".ci/daily runs %q", run)
	}
	if !slices.Contains(run, "KVATLAS_TEST_WHOLE=1 go test -count 1 -timeout 40m ./...") {
		t.Error(".ci/daily does not run all random rounds, which .ci/run shortens")
	}
	mod, makefile := readFile(t, "../go.mod"), readFile(t, "../Makefile")
	for text, words := range map[string][]string{
		mod: {"\tgolang.org/x/vuln/cmd/govulncheck\n", "\ntoolchain go1."},
		makefile: {"\nvulncheck: ## ", "\n\tgo run ./tools/vulncheck\n",
			"\n\tGOTOOLCHAIN=auto go run ./tools/release\n"},
	} {
		for _, word := range words {
			if !strings.Contains(text, word) {
				t.Errorf("%q is missing in go.mod or Makefile", word)
			}
		}
	}
}

// TestFleetOfGPUsIsLeftOut checks the rule for GPUs: CI has no GPU, and a comment there excludes make gpu-fleet. CI
// runs the same test on the CPU, as a part of make real-vllm.
func TestFleetOfGPUsIsLeftOut(t *testing.T) {
	for _, script := range []string{"../.ci/run", "../.ci/daily"} {
		for _, command := range commands(readFile(t, script), "") {
			if strings.Contains(command, "gpu-fleet") {
				t.Errorf("%s runs %s", script, command)
			}
		}
	}
	if !slices.Contains(commands(readFile(t, "../.ci/daily"), ""), "make real-vllm") {
		t.Error(".ci/daily does not run make real-vllm")
	}
	_, rule, _ := strings.Cut(readFile(t, "../Makefile"), "\nreal-vllm:")
	rule, _, _ = strings.Cut(rule, "\n\n")
	if !strings.Contains(rule, "-tags realvllm ") || strings.Contains(rule, " -run ") || strings.Contains(rule, "-skip") {
		t.Errorf("make real-vllm does not run all tests of the package: %s", rule)
	}
	for file, words := range map[string]string{
		"../.ci/daily": "# NOT RUN: make gpu-fleet", "../Makefile": "\ngpu-fleet: ## ",
		"../CONTRIBUTING.md": "| `make gpu-fleet` |",
	} {
		if !strings.Contains(readFile(t, file), words) {
			t.Errorf("%s does not have %q", file, words)
		}
	}
	if !strings.Contains(readFile(t, "../CONTRIBUTING.md"), "**CI never runs it**") ||
		!strings.Contains(readFile(t, "../Makefile"), "never run by CI") {
		t.Error("CONTRIBUTING.md or the Makefile lacks the statement that CI never runs make gpu-fleet")
	}
}

// TestJudgesRunAll checks the steps of make judges: the downloads, every package with tests under the build tag judges,
// every separate module, and make kube. KEDA's module takes too long to build, so .ci/daily runs it.
func TestJudgesRunAll(t *testing.T) {
	t.Parallel()
	_, rule, _ := strings.Cut(readFile(t, "../Makefile"), "\njudges:")
	rule, _, _ = strings.Cut(rule, "\n\n")
	run := commands(rule, "\t")
	if len(run) < 2 || run[0] != "go run ./integration/judges/fetch" ||
		!strings.HasPrefix(run[1], "go test -tags judges ") {
		t.Fatalf("make judges runs %q", run)
	}
	list := func(args ...string) (packages []string) {
		cmd := exec.Command("go", append([]string{"list"}, args...)...)
		cmd.Dir = ".."
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go list %q: %v", args, err)
		}
		return strings.Fields(string(out))
	}
	var patterns []string
	for _, word := range strings.Fields(run[1]) {
		if strings.HasPrefix(word, "./") {
			patterns = append(patterns, word)
		}
	}
	tested := list(patterns...)
	const files = `{{$p := .ImportPath}}{{range .TestGoFiles}}{{$p}}:{{.}} {{end}}{{range .XTestGoFiles}}{{$p}}:{{.}} {{end}}`
	plain, judges := list("-f", files, "./..."), 0
	for _, file := range list("-tags", "judges", "-f", files, "./...") {
		if pkg, _, _ := strings.Cut(file, ":"); !slices.Contains(plain, file) {
			if judges++; !slices.Contains(tested, pkg) {
				t.Errorf("make judges does not run %s", file)
			}
		}
	}
	if judges < 20 {
		t.Errorf("only %d files have the tag", judges)
	}
	modules, err := filepath.Glob("judges/*/go.mod")
	if err != nil || len(modules) == 0 {
		t.Fatal(modules, err)
	}
	// The judges with Dynamo also run with the next release of Dynamo.
	want := []string{"go test -tags judges -timeout 30m ./integration/judges/dynamo ./integration/judges/selection " +
		"-dynamo dynamo-next.txt"}
	modules = slices.DeleteFunc(modules, func(file string) bool { return file == "judges/keda/go.mod" })
	if !slices.Contains(commands(readFile(t, "../.ci/daily"), ""), "make keda") ||
		!strings.Contains(readFile(t, "../Makefile"), "\tcd integration/judges/keda && go test -count 1 ") {
		t.Error(".ci/daily does not run make keda, or make keda does not run the module")
	}
	for _, file := range modules {
		// without the test cache, which ignores files outside of the module
		want = append(want, "cd integration/"+filepath.Dir(file)+" && go test -count 1 ./...")
	}
	want = append(want, `@if [ "$(KUBE)" = skip ]; then echo "NOT RUN: make kube, because KUBE=skip"; else $(MAKE) kube; fi`)
	if !slices.Equal(run[2:], want) {
		t.Errorf("make judges runs %q in addition to the judges of this module, want %q", run[2:], want)
	}
}
