package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// TestVersionsOfFiles checks that the chart, the Python client and the pages have the last release.
func TestVersionsOfFiles(t *testing.T) {
	for _, p := range places {
		text, err := os.ReadFile(filepath.Join("..", "..", p.file))
		if err != nil {
			t.Fatal(err)
		}
		with, err := stamped(p.file, string(text), cli.Release)
		if err != nil {
			t.Error(err)
		} else if with != string(text) {
			t.Errorf("%s has another version than %s: go generate ./tools/release", p.file, cli.Release)
		}
		other, err := stamped(p.file, string(text), "v7.8.9")
		if err != nil || !strings.Contains(other, p.form("v7.8.9")) || strings.Contains(other, semantic(cli.Release)+"\n") {
			t.Errorf("%s with another version: %v\n%s", p.file, err, other)
		}
	}
}

// TestForms covers the forms of a version.
func TestForms(t *testing.T) {
	for version, want := range map[string]string{"v0.5.0": "0.5.0", "v0.5.0-rc.1": "0.5.0rc1", "v0.5.0-rc2": "0.5.0rc2",
		"v0.6.0-dev": "0.6.0.dev0", "v0.6.0-dev-0123456789ab": "0.6.0.dev0+0123456789ab",
		"v0.6.0-dev-0123456789ab-modified": "0.6.0.dev0+0123456789ab.modified"} {
		if got := asPython(version); got != want {
			t.Errorf("%s is %s in Python, want %s", version, got, want)
		}
	}
}
