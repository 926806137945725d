package integration

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// TestPagesShowCommandsThatExist: every command of ours that a page shows is one, and has the flags that it is shown
// with.
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
	shown := regexp.MustCompile("(?m)(?:^    (?:[^\n]* \\| |\\$ )?|`)(indexer|worker-shim)((?: [a-z]+)*)([^`\n]*)")
	flag := regexp.MustCompile(`(?:^|\s)(--[a-z0-9-]+)`)
	help, checked := map[string]string{}, 0
	for _, page := range slices.Concat([]string{"../README.md"}, pages, engines) {
		text := strings.ReplaceAll(readFile(t, page), "\\\n", " ")
		for _, m := range shown.FindAllStringSubmatch(text, -1) {
			name, words, rest := m[1], strings.Fields(m[2]), m[3]
			if len(words) == 0 || words[0] == "completion" {
				continue
			}
			if !slices.Contains([]string{"auth", "bench", "snapshot", "tokenizer", "workers"}, words[0]) {
				words = words[:1] // what follows is an argument
			}
			command := name + " " + strings.Join(words, " ")
			if _, ok := help[command]; !ok {
				r := harness.Run(t, name, append(slices.Clone(words), "--help")...)
				if help[command] = r.Stdout; r.Code != 0 || !strings.Contains(r.Stdout, "\n  "+command) {
					t.Errorf("%s shows %q, which is no command: %s", page, command, r.Stderr)
				}
			}
			rest, _, _ = strings.Cut(rest, "#")
			for _, f := range flag.FindAllStringSubmatch(rest, -1) {
				if checked++; !strings.Contains(help[command], f[1]+" ") {
					t.Errorf("%s shows %q with %s, which it has not", page, command, f[1])
				}
			}
		}
	}
	if checked < 40 {
		t.Errorf("only %d flags were found: the pattern has become too narrow", checked)
	}
}
