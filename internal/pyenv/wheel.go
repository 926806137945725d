package pyenv

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Wheel returns the path of a wheel that is read and not installed, as "name==version" in integration/python/wheels.txt.
// The first call on a machine fetches it, without what it depends on, and checks its hash.
//
// It is the same file everywhere, the one for CPython 3.11 on x86-64 Linux: nothing but Python is read out of it.
func Wheel(t testing.TB, pinned string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("left out under -short: needs Python and packages from a registry")
	}
	dir, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	path, err := wheel(filepath.Join(dir, "wheels"), Script(t, "wheels.txt"), pinned)
	if err != nil {
		t.Fatalf("a wheel for this test: %v", err)
	}
	return path
}

// wheelPlatforms are those for which the engines' wheels are made.
var wheelPlatforms = []string{"manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "any"}

var pin = regexp.MustCompile(`^\S+==\S+ --hash=sha256:([0-9a-f]{64})$`)

// wheel returns the pinned wheel below dir and fetches it if need be.
func wheel(dir, pins, pinned string) (string, error) {
	text, err := os.ReadFile(pins)
	if err != nil {
		return "", err
	}
	var line, sum string
	for l := range strings.SplitSeq(string(text), "\n") {
		if strings.HasPrefix(l, pinned+" ") {
			line = l
		}
	}
	if m := pin.FindStringSubmatch(line); m != nil {
		sum = m[1]
	} else {
		return "", fmt.Errorf("%s: no line %q with one sha256 hash", pins, pinned)
	}
	there := filepath.Join(dir, sum[:16])
	if path, err := only(there); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(there + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if path, err := only(there); err == nil { // another process was faster
		return path, nil
	}
	if err := fetch(line, there); err != nil {
		return "", err
	}
	return only(there)
}

// fetch downloads what a line of requirements says into a new folder, which appears only when it is complete.
func fetch(line, there string) error {
	python, err := Find("requirements.txt")
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(there), filepath.Base(there)+".tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	wanted := filepath.Join(tmp, "wanted.txt")
	if err := os.WriteFile(wanted, []byte(line+"\n"), 0o644); err != nil {
		return err
	}
	files := filepath.Join(tmp, "files")
	args := []string{"-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--only-binary", ":all:",
		"--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none", "-d", files, "-r", wanted}
	for _, p := range wheelPlatforms {
		args = append(args, "--platform", p)
	}
	ctx, cancel := context.WithTimeout(context.Background(), buildTimeout)
	defer cancel()
	if _, err := run(ctx, python, args...); err != nil {
		return fmt.Errorf("fetch %s: %w", line, err)
	}
	return os.Rename(files, there)
}

// only is the one wheel in a folder.
func only(dir string) (string, error) {
	found, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("%s: %d wheels, want one", dir, len(found))
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}
