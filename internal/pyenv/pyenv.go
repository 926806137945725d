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
	"syscall"
	"testing"
	"time"
)

// buildTimeout bounds the making of an environment, downloads included.
const buildTimeout = 10 * time.Minute

// Python returns the path of an interpreter that has the packages our tests need.
func Python(t testing.TB) string {
	t.Helper()
	return PythonWith(t, "requirements.txt")
}

// PythonWith returns the path of an interpreter that has the packages of another requirements file in integration/python.
func PythonWith(t testing.TB, requirements string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("left out under -short: needs Python and packages from a registry")
	}
	python, err := Find(requirements)
	if err != nil {
		t.Fatalf("a Python with %s for this test: %v", requirements, err)
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

// environments are those that this process has looked for: by requirements file, what Find returned.
var environments struct {
	sync.Mutex
	known map[string]string
}

// Find returns the path of an interpreter that has the packages of a requirements file in integration/python. It makes the environment unless
// this process or another has made it. Tests have [PythonWith]; this is for benchmarks.
func Find(name string) (string, error) {
	environments.Lock()
	defer environments.Unlock()
	if python, ok := environments.known[name]; ok {
		return python, nil
	}
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	python, err := ensure(dir, filepath.Join(root, "integration", "python", name))
	if err != nil {
		return "", err
	}
	if environments.known == nil {
		environments.known = map[string]string{}
	}
	environments.known[name] = python
	return python, nil
}

// cacheDir is where everything that is fetched is kept.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no place for what is fetched: %w", err)
	}
	return filepath.Join(cache, "kvatlas"), nil
}

// ensure returns the interpreter of the environment for a requirements file below dir, and makes it if need be.
func ensure(dir, requirements string) (string, error) {
	base, err := exec.LookPath("python3")
	if err != nil {
		return "", fmt.Errorf("python3 is not installed (on Debian: apt-get install python3 python3-venv): %w", err)
	}
	wanted, err := os.ReadFile(requirements)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), buildTimeout)
	defer cancel()
	version, err := run(ctx, base, "-c", "import sys; print(sys.version, sys.prefix)")
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(append(version, wanted...))
	env := filepath.Join(dir, "pyenv-"+hex.EncodeToString(sum[:8]))
	python := filepath.Join(env, "bin", "python")
	if exists(python) {
		return python, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(env + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(python) { // another process was faster
		return python, nil
	}
	return python, build(ctx, base, requirements, env)
}

// build makes an environment under a temporary name and renames it. Only its interpreter is used, which finds its packages
// from where it lies.
func build(ctx context.Context, base, requirements, env string) error {
	tmp, err := os.MkdirTemp(filepath.Dir(env), filepath.Base(env)+".tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if _, err := run(ctx, base, "-m", "venv", tmp); err != nil {
		return fmt.Errorf("make a virtual environment (on Debian: apt-get install python3-venv): %w", err)
	}
	python := filepath.Join(tmp, "bin", "python")
	// The files name every package, those that others need too.
	if _, err := run(ctx, python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r", requirements); err != nil {
		return fmt.Errorf("install %s: %w", requirements, err)
	}
	if _, err := run(ctx, python, "-c", "import zmq"); err != nil { // all environments have it
		return fmt.Errorf("the new environment does not work: %w", err)
	}
	return os.Rename(tmp, env)
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

// lock waits for the only lock on path among all processes; the system gives it back should we die.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
	}
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
