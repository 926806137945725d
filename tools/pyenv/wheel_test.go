package pyenv

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReadPins reads the real file, and refuses a wheel without a hash.
func TestReadPins(t *testing.T) {
	pins, err := readPins(Script(t, "wheels.txt"))
	if err != nil || len(pins) < 2 {
		t.Fatalf("%d pins, %v", len(pins), err)
	}
	seen := map[string]bool{}
	for _, p := range pins {
		if !strings.Contains(p.name, "==") || len(p.sum) != 64 || seen[p.folder("")] {
			t.Errorf("%+v", p)
		}
		seen[p.folder("")] = true
	}
	path := filepath.Join(t.TempDir(), "wheels.txt")
	if err := os.WriteFile(path, []byte("# a comment\nsglang==0.5.12\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readPins(path); err == nil ||
		!strings.Contains(err.Error(), `"sglang==0.5.12" is not a wheel with one sha256 hash`) {
		t.Errorf("without a hash: %v", err)
	}
}
