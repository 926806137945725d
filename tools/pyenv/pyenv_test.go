package pyenv

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWhatIsMissingIsNamed looks for an environment in an empty cache. No file is made, and the error names the command
// for the download.
func TestWhatIsMissingIsNamed(t *testing.T) {
	cache, bin := t.TempDir(), t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	if err := os.WriteFile(filepath.Join(bin, "python3"), []byte("#!/bin/sh\necho 3.11\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	if _, err := find("dynamo.txt", fetchCommand); err == nil || !strings.Contains(err.Error(), fetchCommand) {
		t.Errorf("got %v, want the command %q", err, fetchCommand)
	}
	if left, err := os.ReadDir(cache); err != nil || len(left) > 0 {
		t.Errorf("made in the cache: %v, %v", left, err)
	}
}
