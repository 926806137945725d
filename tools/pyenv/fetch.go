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

// fetchTimeout bounds the making of one environment, or the fetching of one wheel.
const fetchTimeout = 30 * time.Minute

// FetchEnvironment makes the environment of a requirements file in integration/python unless it is there, and returns
// its interpreter. What pip does is written to progress.
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

// A finish completes a new environment, whose interpreter has all packages.
type finish func(ctx context.Context, python string) error

// installed is the finish of an environment that needs nothing but its packages.
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
		// The files name every package, those that others need too. Only the interpreter is used, which finds its
		// packages from where it lies.
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

// wheelPlatforms are those for which the engines' wheels are made.
var wheelPlatforms = []string{"manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "any"}

// FetchWheels fetches the wheels of integration/python/wheels.txt that are not there, without what they depend on, and
// checks their hashes.
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

// FetchLibraries unpacks the libraries that Mooncake's programs load, without installing them, unless they are there.
func FetchLibraries(progress io.Writer) error {
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	return unpack(progress, libraryFolder(cache), debs)
}

// unpack puts what Debian's packages have into a folder, unless it is there.
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
				return fmt.Errorf("apt-get download %v: %w; apt-get update before it: %v", debs, err, updateErr)
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

// once makes a folder unless the path there exists: under a temporary name, so that it is complete when it appears.
// Processes that want the same one wait for each other.
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

// show runs a command whose words go to progress. Its error has the last of them too.
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

// tail keeps the last of what is written to it.
type tail []byte

func (t *tail) Write(b []byte) (int, error) {
	*t = append(*t, b...)
	if over := len(*t) - 4096; over > 0 {
		*t = append((*t)[:0], (*t)[over:]...)
	}
	return len(b), nil
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
