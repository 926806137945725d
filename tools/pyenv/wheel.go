package pyenv

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Wheel returns the path of a pinned wheel, which is read and not installed. pinned is "name==version" in
// integration/python/wheels.txt. If the wheel is missing, the test fails and names the command for the download.
//
// All platforms use the same file, for CPython 3.11 on x86-64 Linux, because only Python code is read.
func Wheel(t testing.TB, pinned string) string {
	t.Helper()
	dir, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	pins, err := readPins(Script(t, "wheels.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pins {
		if p.name != pinned {
			continue
		}
		path, err := only(p.folder(filepath.Join(dir, "wheels")))
		if err != nil {
			t.Fatalf("%s is missing (%v); run: %s", pinned, err, fetchCommand)
		}
		return path
	}
	t.Fatalf("integration/python/wheels.txt has no line %q", pinned)
	return ""
}

// pin is a line of wheels.txt.
type pin struct {
	name string // as "name==version"
	sum  string // SHA-256, in hexadecimal
	line string
}

var pinLine = regexp.MustCompile(`^(\S+==\S+) --hash=sha256:([0-9a-f]{64})$`)

// readPins reads wheels.txt. A line is a comment, or a wheel with a single hash.
func readPins(path string) (pins []pin, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		m := pinLine.FindStringSubmatch(line)
		if m == nil {
			return nil, fmt.Errorf("%s: %q is not a wheel with one sha256 hash", path, line)
		}
		pins = append(pins, pin{name: m[1], sum: m[2], line: line})
	}
	return pins, nil
}

// folder is where below dir the wheel is.
func (p *pin) folder(dir string) string { return filepath.Join(dir, p.sum[:16]) }

// only returns the single wheel in a folder.
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
