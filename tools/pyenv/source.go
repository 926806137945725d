package pyenv

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Source returns the path of a file in integration/python/sources.txt, by its name. If the file is missing, the test
// fails and names the command for the download.
func Source(t testing.TB, name string) string {
	t.Helper()
	dir, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	list, err := readSources(Script(t, "sources.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		if filepath.Base(s.file) != name {
			continue
		}
		path := filepath.Join(s.folder(dir), name)
		if !exists(path) {
			t.Fatalf("%s is missing; run: %s", path, fetchCommand)
		}
		return path
	}
	t.Fatalf("integration/python/sources.txt has no %q", name)
	return ""
}

// source is a line of sources.txt.
type source struct{ archive, sum, file string }

func readSources(path string) (list []source, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		if len(words) != 3 || !strings.Contains(words[0], "==") || len(words[1]) != 2*sha256.Size ||
			!filepath.IsLocal(words[2]) {
			return nil, fmt.Errorf("%s: %q is not an archive as NAME==VERSION, a SHA-256 and a path", path, line)
		}
		list = append(list, source{words[0], words[1], words[2]})
	}
	return list, nil
}

// folder is where the file is below the cache folder.
func (s *source) folder(dir string) string {
	sum := sha256.Sum256([]byte(s.sum + s.file))
	return filepath.Join(dir, "sources", fmt.Sprintf("%x", sum[:8]))
}

// FetchSources downloads the archives of the missing files in integration/python/sources.txt, checks the hashes, and
// keeps only the files.
func FetchSources(progress io.Writer) error {
	dir, err := cacheDir()
	if err != nil {
		return err
	}
	path, err := requirementsFile("sources.txt")
	if err != nil {
		return err
	}
	list, err := readSources(path)
	if err != nil {
		return err
	}
	python, err := FetchEnvironment(progress, "requirements.txt") // for its pip
	if err != nil {
		return err
	}
	for _, s := range list {
		there := s.folder(dir)
		fill := func(ctx context.Context, tmp string) error { return s.fetch(ctx, progress, python, tmp) }
		if err := once(there, there, fill); err != nil {
			return fmt.Errorf("%s of %s: %w", s.file, s.archive, err)
		}
	}
	return nil
}

// fetch puts the file into a folder. pip checks the archive, unpacks it, and then looks for its dependencies, which
// fails for an engine without its build tools: the unpacked archive is enough. The option --no-clean keeps it.
func (s *source) fetch(ctx context.Context, progress io.Writer, python, tmp string) error {
	unpacked, err := os.MkdirTemp("", "kvatlas-source-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(unpacked)
	wanted := filepath.Join(unpacked, "wanted.txt")
	if err := os.WriteFile(wanted, []byte(s.archive+" --hash=sha256:"+s.sum+"\n"), 0o600); err != nil {
		return err
	}
	c := exec.CommandContext(ctx, python, "-m", "pip", "download", "--progress-bar", "off",
		"--disable-pip-version-check", "--no-deps", "--require-hashes", "--no-binary", ":all:", "--no-build-isolation",
		"--no-clean", "-d", unpacked, "-r", wanted)
	c.Env = append(os.Environ(), "TMPDIR="+unpacked)
	out, failed := c.CombinedOutput()
	found, err := filepath.Glob(filepath.Join(unpacked, "pip-*", "*", s.file))
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("%d such files in the archive; pip: %w: %s", len(found), failed, out)
	}
	if err != nil {
		return err
	}
	text, err := os.ReadFile(found[0])
	if err != nil {
		return err
	}
	fmt.Fprintln(progress, "kept", s.file)
	return os.WriteFile(filepath.Join(tmp, filepath.Base(s.file)), text, 0o644)
}
