package pyenv

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A wheel is fetched once, is found again, and is refused if it is not pinned or not what was pinned.
func TestWheel(t *testing.T) {
	if testing.Short() {
		t.Skip("left out under -short: fetches a wheel")
	}
	pins := filepath.Join(t.TempDir(), "wheels.txt")
	const sound = "sglang==0.5.12 --hash=sha256:4ed786a38655851fd055ef57380c34d29b87753b53f63457309f51e5bf48c2e6\n"
	if err := os.WriteFile(pins, []byte(sound), 0o644); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	first, err := wheel(dir, pins, "sglang==0.5.12")
	if err != nil || !strings.HasPrefix(filepath.Base(first), "sglang-0.5.12-") {
		t.Fatalf("%s, %v", first, err)
	}
	t.Setenv("PATH", t.TempDir()) // there is nothing to fetch with any more
	if again, err := wheel(dir, pins, "sglang==0.5.12"); err != nil || again != first {
		t.Errorf("again: %s, %v", again, err)
	}
	if _, err := wheel(dir, pins, "sglang==0.5.1"); err == nil || !strings.Contains(err.Error(), `no line "sglang==0.5.1"`) {
		t.Errorf("not pinned: %v", err)
	}
}

func TestWheelOfAnotherHash(t *testing.T) {
	if testing.Short() {
		t.Skip("left out under -short: fetches a wheel")
	}
	pins := filepath.Join(t.TempDir(), "wheels.txt")
	if err := os.WriteFile(pins, []byte("sglang==0.5.12 --hash=sha256:"+strings.Repeat("0", 64)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := wheel(dir, pins, "sglang==0.5.12"); err == nil || !strings.Contains(err.Error(), "DO NOT MATCH THE HASHES") {
		t.Errorf("another hash: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 { // the lock
		t.Errorf("left behind: %v, %v", left, err)
	}
}
