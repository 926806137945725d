package pyenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// fetchTimeout is the time limit for making an environment or downloading a wheel.
const fetchTimeout = 30 * time.Minute

// FetchEnvironment makes the environment of a requirements file in integration/python, unless present, and returns the
// interpreter. The output of pip goes to progress.
func FetchEnvironment(progress io.Writer, name string) (python string, err error) {
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	requirements, err := requirementsFile(name)
	if err != nil {
		return "", err
	}
	return fetchEnvironment(progress, dir, requirements, installed)
}

// A finish completes a new environment. The interpreter already has all packages.
type finish func(ctx context.Context, python string) error

// installed is the finish of an environment with only packages.
func installed(context.Context, string) error { return nil }

func fetchEnvironment(progress io.Writer, dir, requirements string, finish finish) (python string, err error) {
	e, err := locate(dir, requirements)
	if err != nil {
		return "", err
	}
	err = once(e.dir, e.python(), func(ctx context.Context, tmp string) error {
		if _, err := run(ctx, e.base, "-m", "venv", tmp); err != nil {
			return fmt.Errorf("make a virtual environment (on Debian: apt-get install python3-venv): %w", err)
		}
		// The files pin every package, including dependencies. Only the interpreter is used, which finds the packages
		// relative to its own path.
		python := filepath.Join(tmp, "bin", "python")
		pip := []string{"-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check", "--no-deps",
			"-r", requirements}
		if err := show(ctx, progress, python, pip...); err != nil {
			return fmt.Errorf("install %s: %w", requirements, err)
		}
		return finish(ctx, python)
	})
	return e.python(), err
}

// wheelPlatforms are the platforms of the engines' wheels.
var wheelPlatforms = []string{"manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "any"}

// FetchWheels downloads the missing wheels of integration/python/wheels.txt without dependencies, and checks the
// hashes.
func FetchWheels(progress io.Writer) error {
	dir, err := cacheDir()
	if err != nil {
		return err
	}
	path, err := requirementsFile("wheels.txt")
	if err != nil {
		return err
	}
	pins, err := readPins(path)
	if err != nil {
		return err
	}
	python, err := FetchEnvironment(progress, "requirements.txt") // for its pip
	if err != nil {
		return err
	}
	for _, p := range pins {
		if err := fetchWheel(progress, python, filepath.Join(dir, "wheels"), p); err != nil {
			return err
		}
	}
	return nil
}

func fetchWheel(progress io.Writer, python, dir string, p pin) error {
	there := p.folder(dir)
	return once(there, there, func(ctx context.Context, tmp string) error {
		wanted := tmp + ".txt"
		defer os.Remove(wanted)
		if err := os.WriteFile(wanted, []byte(p.line+"\n"), 0o644); err != nil {
			return err
		}
		args := []string{"-m", "pip", "download", "--progress-bar", "off", "--disable-pip-version-check", "--no-deps",
			"--require-hashes", "--only-binary", ":all:",
			"--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none",
			"-d", tmp, "-r", wanted}
		for _, platform := range wheelPlatforms {
			args = append(args, "--platform", platform)
		}
		if err := show(ctx, progress, python, args...); err != nil {
			return fmt.Errorf("fetch %s: %w", p.line, err)
		}
		return nil
	})
}

// FetchLibraries unpacks the libraries of Mooncake's programs without an installation, unless present.
func FetchLibraries(progress io.Writer) error {
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	return unpack(progress, libraryFolder(cache), debs)
}

// unpack unpacks Debian packages into a folder, unless present.
func unpack(progress io.Writer, dir string, debs []string) error {
	return once(dir, dir, func(ctx context.Context, tmp string) error {
		packed := tmp + ".debs"
		defer os.RemoveAll(packed)
		if err := os.Mkdir(packed, 0o755); err != nil {
			return err
		}
		fetch := func() error {
			c := exec.CommandContext(ctx, "apt-get", append([]string{"download"}, debs...)...)
			c.Dir, c.Stdout, c.Stderr = packed, progress, progress
			return c.Run()
		}
		if err := fetch(); err != nil { // the lists of packages may be old, or not there
			updateErr := show(ctx, progress, "apt-get", "update")
			if err := fetch(); err != nil {
				return fmt.Errorf("apt-get download %v: %w; the apt-get update before: %v", debs, err, updateErr)
			}
		}
		files, err := filepath.Glob(filepath.Join(packed, "*.deb"))
		if err != nil {
			return err
		}
		for _, f := range files {
			if _, err := run(ctx, "dpkg", "-x", f, tmp); err != nil {
				return err
			}
		}
		return nil
	})
}

// once makes a folder unless the path there exists. The folder has a temporary name until complete. Concurrent
// processes with the same target wait for each other.
func once(dir, there string, fill func(ctx context.Context, tmp string) error) error {
	if exists(there) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	unlock, err := lock(dir + ".lock")
	if err != nil {
		return err
	}
	defer unlock()
	if exists(there) { // another process was faster
		return nil
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(dir)+".tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
	defer cancel()
	if err := fill(ctx, tmp); err != nil {
		return err
	}
	return os.Rename(tmp, dir)
}

// show runs a command with output to progress. The error contains the end of the output.
func show(ctx context.Context, progress io.Writer, name string, args ...string) error {
	var complaints tail
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout = io.MultiWriter(progress, &complaints)
	cmd.Stderr = cmd.Stdout
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, complaints)
	}
	return nil
}

// tail keeps the end of the written text.
type tail []byte

func (t *tail) Write(b []byte) (int, error) {
	*t = append(*t, b...)
	if over := len(*t) - 4096; over > 0 {
		*t = append((*t)[:0], (*t)[over:]...)
	}
	return len(b), nil
}

// lock waits for an exclusive lock on path among all processes. The system releases the lock at the end of the process.
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
