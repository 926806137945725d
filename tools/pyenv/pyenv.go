package pyenv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// fetchCommand downloads all components of the tests.
const fetchCommand = "go run ./integration/judges/fetch"

// Python returns the path of an interpreter with the packages for most tests.
func Python(t testing.TB) string {
	t.Helper()
	return PythonWith(t, "requirements.txt")
}

// PythonWith returns the path of an interpreter with the packages of another requirements file in integration/python.
// If the environment is missing, the test fails and names the command for the download.
func PythonWith(t testing.TB, requirements string) string {
	t.Helper()
	python, err := find(requirements, fetchCommand)
	if err != nil {
		t.Fatalf("no Python with %s for the test: %v", requirements, err)
	}
	return python
}

// Script returns the path of a file in integration/python.
func Script(t testing.TB, name string) string {
	t.Helper()
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(root, "integration", "python", name)
}

// environments caches the interpreters of this process by requirements file.
var environments struct {
	sync.Mutex
	known map[string]string
}

// find returns the interpreter of an existing environment. command is for the error.
func find(name, command string) (string, error) {
	environments.Lock()
	defer environments.Unlock()
	if python, ok := environments.known[name]; ok {
		return python, nil
	}
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	requirements, err := requirementsFile(name)
	if err != nil {
		return "", err
	}
	e, err := locate(dir, requirements)
	if err != nil {
		return "", err
	}
	if !exists(e.python()) {
		return "", fmt.Errorf("%s is missing; run: %s", e.dir, command)
	}
	if environments.known == nil {
		environments.known = map[string]string{}
	}
	environments.known[name] = e.python()
	return e.python(), nil
}

// requirementsFile is the path of a file in integration/python.
func requirementsFile(name string) (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	return filepath.Join(root, "integration", "python", name), nil
}

// cacheDir returns the folder of all downloads.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache folder for downloads: %w", err)
	}
	return filepath.Join(cache, "kvatlas"), nil
}

// environment is where the packages of a requirements file are, or will be.
type environment struct {
	base         string // the interpreter that made the environment
	requirements string
	dir          string // the name contains a hash of the content
}

func (e *environment) python() string { return filepath.Join(e.dir, "bin", "python") }

// locate returns the place of the environment for a requirements file below dir.
func locate(dir, requirements string) (*environment, error) {
	base, err := exec.LookPath("python3")
	if err != nil {
		return nil, fmt.Errorf("python3 is not installed (on Debian: apt-get install python3 python3-venv): %w", err)
	}
	wanted, err := os.ReadFile(requirements)
	if err != nil {
		return nil, err
	}
	version, err := run(context.Background(), base, "-c", "import sys; print(sys.version, sys.prefix)")
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(append(version, wanted...))
	return &environment{base: base, requirements: requirements,
		dir: filepath.Join(dir, "pyenv-"+hex.EncodeToString(sum[:8]))}, nil
}

func run(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return nil, fmt.Errorf("%s: %w: %s%s", cmd, err, out, exit.Stderr)
		}
		return nil, fmt.Errorf("%s: %w", cmd, err)
	}
	return out, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// moduleRoot is the folder of go.mod above the test's working folder.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if exists(filepath.Join(dir, "go.mod")) {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", fmt.Errorf("go.mod: %w", fs.ErrNotExist)
		}
		dir = up
	}
}
