package integration

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// TestPagesShowCommandsThatExist checks that every command of kvatlas on a page exists with the shown flags.
func TestPagesShowCommandsThatExist(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	engines, err := filepath.Glob("../docs/engines/*.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := regexp.MustCompile("(?m)(?:^    (?:[^\n]* \\| |\\$ )?|`)(indexer|worker-shim)((?: [a-z]+(?:-[a-z]+)*)*)([^`\n]*)")
	flag := regexp.MustCompile(`(?:^|\s)(--[a-z0-9-]+)`)
	help, checked := map[string]string{}, 0
	for _, page := range slices.Concat([]string{"../README.md"}, pages, engines) {
		text := strings.ReplaceAll(readFile(t, page), "\\\n", " ")
		for _, m := range shown.FindAllStringSubmatch(text, -1) {
			name, words, rest := m[1], strings.Fields(m[2]), m[3]
			if len(words) == 0 || words[0] == "completion" {
				continue
			}
			groups := []string{"auth", "bench", "models", "prefixes", "record", "simulate", "snapshot", "tokenizer", "workers"}
			if !slices.Contains(groups, words[0]) {
				words = words[:1] // the following words are arguments
			}
			command := name + " " + strings.Join(words, " ")
			if _, ok := help[command]; !ok {
				r := harness.Run(t, name, append(slices.Clone(words), "--help")...)
				if help[command] = r.Stdout; r.Code != 0 || !strings.Contains(r.Stdout, "\n  "+command) {
					t.Errorf("%s shows the unknown command %q: %s", page, command, r.Stderr)
				}
			}
			rest, _, _ = strings.Cut(rest, "#")
			for _, f := range flag.FindAllStringSubmatch(rest, -1) {
				if checked++; !strings.Contains(help[command], f[1]+" ") {
					t.Errorf("%s shows %q with the unknown flag %s", page, command, f[1])
				}
			}
		}
	}
	if checked < 40 {
		t.Errorf("only %d flags were found: the pattern has become too narrow", checked)
	}
}

// link is a link of a Markdown page to a file of the repository, with the heading.
type link struct{ title, file, heading string }

var (
	fence       = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	linkPattern = regexp.MustCompile(`\[([^\[\]]*)\]\(([^()\s#]*)(?:#([^()\s]+))?\)`)
	heading     = regexp.MustCompile(`(?m)^#+ (.*)$`)
	noAnchor    = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// links are a page's links to files, as paths from here.
func links(page, text string) (list []link) {
	for _, m := range linkPattern.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		if strings.Contains(m[2], ":") {
			continue // an address
		}
		file := page
		if m[2] != "" {
			file = filepath.Join(filepath.Dir(page), m[2])
		}
		list = append(list, link{m[1], file, m[3]})
	}
	return list
}

// anchors returns the names of a page's headings in GitHub's links.
func anchors(text string) (list []string) {
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		words := linkPattern.ReplaceAllString(m[1], "$1")
		list = append(list, strings.ReplaceAll(noAnchor.ReplaceAllString(strings.ToLower(words), ""), " ", "-"))
	}
	return list
}

// pagesBelow are the Markdown files of folders.
func pagesBelow(t *testing.T, folders ...string) (pages []string) {
	t.Helper()
	for _, folder := range folders {
		err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Name() == "testdata" {
				return filepath.SkipDir
			}
			if filepath.Ext(path) == ".md" {
				pages = append(pages, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return pages
}

// TestPagesLinkToWhatIsThere: the file and the heading of every link exist.
func TestPagesLinkToWhatIsThere(t *testing.T) {
	t.Parallel()
	pages, checked := pagesBelow(t, "../docs", "../deploy", "../clients"), 0
	for _, page := range append(pages, "../README.md", "../ARCHITECTURE.md", "../CONTRIBUTING.md", "../CHANGELOG.md") {
		for _, l := range links(page, readFile(t, page)) {
			if checked++; l.heading == "" {
				if _, err := os.Stat(l.file); err != nil {
					t.Errorf("%s: [%s]: %v", page, l.title, err)
				}
			} else if !slices.Contains(anchors(readFile(t, l.file)), l.heading) {
				t.Errorf("%s: [%s]: %s has no heading #%s", page, l.title, l.file, l.heading)
			}
		}
	}
	if checked < 200 {
		t.Errorf("only %d links were found: the pattern has become too narrow", checked)
	}
}

// TestPagesInOrder checks that docs/README.md lists the pages in reading order, that every page ends with a link to the
// next page, and that every page below docs is reachable from there.
func TestPagesInOrder(t *testing.T) {
	t.Parallel()
	const contents = "../docs/README.md"
	titles := map[string]string{}
	order := []string{}
	for _, l := range links(contents, readFile(t, contents)) {
		if strings.HasPrefix(l.file, "../docs/") && l.file != contents {
			order = append(order, l.file)
		}
	}
	reached := map[string]bool{contents: true}
	for todo := []string{contents}; len(todo) > 0; todo = todo[1:] {
		text := readFile(t, todo[0])
		if m := heading.FindStringSubmatch(text); m != nil {
			titles[todo[0]] = m[1]
		}
		for _, l := range links(todo[0], text) {
			if strings.HasPrefix(l.file, "../docs/") && filepath.Ext(l.file) == ".md" && !reached[l.file] {
				reached[l.file] = true
				todo = append(todo, l.file)
			}
		}
	}
	for _, page := range pagesBelow(t, "../docs") {
		if !reached[page] {
			t.Errorf("no way leads from docs/README.md to %s", page)
		}
		if !slices.Contains(order, page) && page != contents && !strings.HasPrefix(page, "../docs/measurements/") {
			t.Errorf("docs/README.md does not list %s", page)
		}
	}
	for i, page := range order {
		next, word := contents, "Contents"
		if i+1 < len(order) {
			next, word = order[i+1], "Next"
		}
		lines := strings.Split(strings.TrimSpace(readFile(t, page)), "\n")
		to, err := filepath.Rel(filepath.Dir(page), next)
		if err != nil {
			t.Fatal(err)
		}
		if want := word + ": [" + titles[next] + "](" + to + ")"; lines[len(lines)-1] != want {
			t.Errorf("%s must end with the line\n%s", page, want)
		}
	}
}

// TestPromisesHaveTests checks that every test of a security promise exists.
func TestPromisesHaveTests(t *testing.T) {
	t.Parallel()
	namedTestsExist(t, "internal/edge/DESIGN.md")
}

// TestStatesNameTests checks that every test in the table of states exists, and that every state has a test.
func TestStatesNameTests(t *testing.T) {
	t.Parallel()
	const page = "internal/fleet/registry/DESIGN.md"
	namedTestsExist(t, page)
	for _, line := range strings.Split(readFile(t, "../"+page), "\n") {
		cells := strings.Split(strings.Trim(line, "|"), "|")
		heading := strings.HasPrefix(line, "| state |") || strings.HasPrefix(line, "|---")
		if !strings.HasPrefix(line, "|") || heading {
			continue
		}
		if len(cells) != 4 || strings.TrimSpace(cells[2]) == "" || !strings.Contains(cells[3], "`Test") {
			t.Errorf("%s: a state without exit or test: %s", page, line)
		}
	}
}

// namedTestsExist fails if a page names an unknown test.
func namedTestsExist(t *testing.T, page string) {
	t.Helper()
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(readFile(t, "../"+page), -1) {
		named[m[1]] = false
	}
	if len(named) < 20 {
		t.Errorf("%s names only %v", page, named)
	}
	for _, root := range []string{"cmd", "integration", "internal", "pkg"} {
		err := filepath.WalkDir("../"+root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for name := range named {
				named[name] = named[name] || strings.Contains(string(text), "func "+name+"(")
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, there := range named {
		if !there {
			t.Errorf("%s names the unknown test %s", page, name)
		}
	}
}
