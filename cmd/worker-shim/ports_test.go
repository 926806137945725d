package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/tools/simulate"
)

// TestOneReplayPort reads every page, manifest and help text with an engine's replay endpoint: all have the default
// port of worker-shim simulate, so that copies from two places agree.
func TestOneReplayPort(t *testing.T) {
	replay := simulate.Command().Flags().Lookup("replay").DefValue
	want := replay[strings.LastIndex(replay, ":")+1:]
	named := regexp.MustCompile(`replay[a-z_]*"?[ :=,"]+tcp://[^:"\s]+:(\d+)`)
	found := 0
	look := func(path string) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			if found++; m[1] != want {
				t.Errorf("%s: %s; other places have %s", path, m[0], want)
			}
		}
	}
	root := filepath.Join("..", "..")
	for _, path := range []string{"README.md", "docker-compose.yml", "cmd/worker-shim/main.go",
		"tools/simulate/simulate.go"} {
		look(filepath.Join(root, path))
	}
	for _, folder := range []string{"docs", "deploy"} {
		err := filepath.WalkDir(filepath.Join(root, folder), func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				look(path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found < 15 {
		t.Errorf("only %d places name a replay port: the pattern has become too narrow", found)
	}
}
