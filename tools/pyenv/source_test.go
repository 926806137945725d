package pyenv

import (
	"os"
	"path/filepath"
	"testing"
)

// TestReadSources reads the real file, and refuses other lines.
func TestReadSources(t *testing.T) {
	list, err := readSources(Script(t, "sources.txt"))
	if err != nil || len(list) == 0 {
		t.Fatalf("%d files, %v", len(list), err)
	}
	sum := list[0].sum
	for _, line := range []string{"vllm==1 " + sum, "vllm " + sum + " a.py", "vllm==1 abc a.py",
		"vllm==1 " + sum + " ../a.py", "vllm==1 " + sum + " /a.py"} {
		path := filepath.Join(t.TempDir(), "sources.txt")
		if err := os.WriteFile(path, []byte(line+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if list, err := readSources(path); err == nil {
			t.Errorf("%s: %v", line, list)
		}
	}
}
