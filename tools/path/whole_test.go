//go:build judges

package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
)

// TestTheWholePath runs a small benchmark and checks for the expected output of every contender. The benchmark itself
// checks that every block arrives.
func TestTheWholePath(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"--rounds", "1", "--workers", "2", "--blocks", "20000", "--cache", t.TempDir()},
		&out); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	if !strings.Contains(text, "2 engines, 19970 blocks") {
		t.Errorf("the first line lacks the parameters:\n%s", text)
	}
	for _, line := range []string{`kvatlas +\d+\.\d\d +\d+\.\d\d +\(`, `kvatlas-2m +\d+\.\d\d +\d+\.\d\d +\(`,
		`dynamo +– +\d+\.\d\d +\(`} {
		if !regexp.MustCompile(`(?m)^ *` + line).MatchString(text) {
			t.Errorf("no line like %s:\n%s", line, text)
		}
	}
}
