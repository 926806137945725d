package pyenv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// FetchProgram builds the Rust program of a folder in this module with cargo, unless present. Cargo.lock pins the
// crates. The output of cargo goes to progress.
func FetchProgram(progress io.Writer, folder string) error {
	p, err := locateProgram(folder)
	if err != nil {
		return err
	}
	return once(p.dir, p.path(), func(ctx context.Context, tmp string) error {
		if _, err := exec.LookPath("cargo"); err != nil {
			return fmt.Errorf("cargo is not installed (on Debian: apt-get install cargo): %w", err)
		}
		target := tmp + ".target" // hundreds of MB, for a single file
		defer os.RemoveAll(target)
		if err := show(ctx, progress, "cargo", "build", "--locked", "--target-dir", target, "--manifest-path",
			filepath.Join(p.source, "Cargo.toml")); err != nil {
			return err
		}
		built, err := os.ReadFile(filepath.Join(target, "debug", p.name))
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(tmp, p.name), built, 0o755)
	})
}

// Program returns the path of a program that [FetchProgram] has built from the current folder. If the program is
// missing, the test fails and names the command for the build.
func Program(t testing.TB, folder string) string {
	t.Helper()
	p, err := locateProgram(folder)
	if err != nil {
		t.Fatal(err)
	}
	if !exists(p.path()) {
		t.Fatalf("the program of %s is not built; build it with: %s", folder, fetchCommand)
	}
	return p.path()
}

// program is where a Rust program is, or will be.
type program struct {
	source string
	name   string
	dir    string // the name contains a hash of the sources
}

func (p *program) path() string { return filepath.Join(p.dir, p.name) }

func locateProgram(folder string) (*program, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	cache, err := cacheDir()
	if err != nil {
		return nil, err
	}
	p := &program{source: filepath.Join(root, folder)}
	sum := sha256.New()
	for _, file := range []string{"Cargo.toml", "Cargo.lock", "src/main.rs"} {
		text, err := os.ReadFile(filepath.Join(p.source, file))
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(sum, "%d\n%s", len(text), text)
		if p.name == "" {
			fmt.Sscanf(string(text), "[package]\nname = %q", &p.name)
		}
	}
	if p.name == "" {
		return nil, fmt.Errorf("%s: Cargo.toml does not begin with the name of the package", folder)
	}
	p.dir = filepath.Join(cache, "cargo-"+hex.EncodeToString(sum.Sum(nil)[:8]))
	return p, nil
}
