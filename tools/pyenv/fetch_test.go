//go:build judges

package pyenv

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// makeWheel writes a small wheel into a folder and returns the hash. During the test, pip uses only this folder.
func makeWheel(t *testing.T) (sum string) {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range [][2]string{
		{"tiny.py", "answer = 42\n"},
		{"tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"},
		{"tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"tiny-1.0.dist-info/RECORD",
			"tiny.py,,\ntiny-1.0.dist-info/METADATA,,\ntiny-1.0.dist-info/WHEEL,,\ntiny-1.0.dist-info/RECORD,,\n"},
	} {
		w, err := z.Create(f[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f[1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tiny-1.0-py3-none-any.whl"), b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PIP_NO_INDEX", "1")
	t.Setenv("PIP_FIND_LINKS", dir)
	return fmt.Sprintf("%x", sha256.Sum256(b.Bytes()))
}

func writeRequirements(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "requirements.txt")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPythonHasWhatIsRequired checks that the packages of the environment work.
func TestPythonHasWhatIsRequired(t *testing.T) {
	out, err := exec.Command(Python(t), "-c",
		"import zmq, msgpack, msgspec; print(zmq.__version__, zmq.zmq_version())").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if want := "27.3.0 4.3."; !strings.HasPrefix(string(out), want) {
		t.Errorf("pyzmq and libzmq: %s, want %s…", out, want)
	}
}

// TestFetchOnceAmongMany checks that concurrent callers get the same complete environment, without temporary files.
func TestFetchOnceAmongMany(t *testing.T) {
	makeWheel(t)
	requirements := writeRequirements(t, "tiny==1.0\n")
	dir := t.TempDir()
	var wg sync.WaitGroup
	got, told := make([]string, 3), make([]bytes.Buffer, 3)
	for i := range got {
		wg.Go(func() {
			var err error
			if got[i], err = fetchEnvironment(&told[i], dir, requirements, installed); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	installed := 0
	for i, python := range got {
		if python != got[0] {
			t.Errorf("two environments: %s and %s", python, got[0])
		}
		if strings.Contains(told[i].String(), "Successfully installed tiny-1.0") {
			installed++
		}
	}
	if installed != 1 {
		t.Errorf("%d reports of the installation: %v", installed, told)
	}
	if out, err := exec.Command(got[0], "-c", "import tiny; print(tiny.answer)").CombinedOutput(); err != nil ||
		string(out) != "42\n" {
		t.Errorf("%s%v", out, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 { // the environment and the lock
		t.Errorf("%d entries in the cache, want 2: %v, %v", len(entries), entries, err)
	}
}

// TestFetchSaysWhatIsMissing checks that a failed environment leaves no files, and that the error has the reason.
func TestFetchSaysWhatIsMissing(t *testing.T) {
	requirements := writeRequirements(t, "/there/is/no/such/package.whl\n")
	dir := t.TempDir()
	if _, err := fetchEnvironment(io.Discard, dir, requirements, installed); err == nil ||
		!strings.Contains(err.Error(), "no/such/package") {
		t.Errorf("a missing package: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.tmp-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := fetchEnvironment(io.Discard, dir, requirements, installed); err == nil ||
		!strings.Contains(err.Error(), "apt-get install python3") {
		t.Errorf("no python3: %v", err)
	}
}

// TestFetchWheel checks that a wheel is downloaded once, is found again, and is refused with a wrong hash.
func TestFetchWheel(t *testing.T) {
	sum := makeWheel(t)
	python, dir := Python(t), t.TempDir()
	sound := pin{name: "tiny==1.0", sum: sum, line: "tiny==1.0 --hash=sha256:" + sum}
	for range 2 {
		if err := fetchWheel(io.Discard, python, dir, sound); err != nil {
			t.Fatal(err)
		}
		python = "/nonexistent" // there is nothing to fetch with any more
	}
	if path, err := only(sound.folder(dir)); err != nil || filepath.Base(path) != "tiny-1.0-py3-none-any.whl" {
		t.Errorf("%s, %v", path, err)
	}
	other := strings.Repeat("0", 64)
	if err := fetchWheel(io.Discard, Python(t), dir,
		pin{name: "tiny==1.0", sum: other, line: "tiny==1.0 --hash=sha256:" + other}); err == nil ||
		!strings.Contains(err.Error(), "DO NOT MATCH THE HASHES") {
		t.Errorf("another hash: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 3 { // a wheel and two locks
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestFetchProgram checks that a Rust program is built once from its folder, that a changed folder needs another build,
// and that errors name missing parts.
func TestFetchProgram(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	root := t.TempDir()
	t.Chdir(root)
	write := func(file, text string) {
		t.Helper()
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module m\n")
	write("tiny/Cargo.toml", "[package]\nname = \"tiny\"\nversion = \"0.0.0\"\nedition = \"2021\"\n")
	write("tiny/Cargo.lock", "version = 3\n\n[[package]]\nname = \"tiny\"\nversion = \"0.0.0\"\n")
	paths := map[string]bool{}
	for _, says := range []string{"one", "two"} {
		write("tiny/src/main.rs", `fn main() { println!("`+says+`"); }`)
		p, err := locateProgram("tiny")
		if err != nil {
			t.Fatal(err)
		}
		if exists(p.path()) {
			t.Errorf("%s exists before the build", p.path())
		}
		for range 2 {
			var progress strings.Builder
			if err := FetchProgram(&progress, "tiny"); err != nil {
				t.Fatal(err)
			}
			if paths[p.path()] == strings.Contains(progress.String(), "Compiling") {
				t.Errorf("cargo said %q", progress.String())
			}
			paths[p.path()] = true
		}
		if out, err := exec.Command(Program(t, "tiny")).Output(); err != nil || string(out) != says+"\n" {
			t.Errorf("output %q, %v", out, err)
		}
	}
	write("tiny/src/main.rs", "fn main() { nothing }")
	var progress strings.Builder
	if err := FetchProgram(&progress, "tiny"); err == nil || !strings.Contains(err.Error(), "nothing") {
		t.Errorf("a program with a failing build: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(os.Getenv("XDG_CACHE_HOME"), "kvatlas", "*")); err != nil ||
		len(left) != 2+3 {
		t.Errorf("there are %q, not two programs and three locks; %v", left, err)
	}
}
