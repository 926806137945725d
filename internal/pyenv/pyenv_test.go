package pyenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestPythonHasWhatIsRequired(t *testing.T) {
	python := Python(t)
	out, err := exec.Command(python, "-c", "import zmq, msgpack, msgspec; print(zmq.__version__, zmq.zmq_version())").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if want := "27.3.0 4.3."; !strings.HasPrefix(string(out), want) {
		t.Errorf("pyzmq and libzmq: %s, want %s…", out, want)
	}
}

// Callers that race for the same environment get one, whole, and nothing else stays behind.
func TestEnsureOnceAmongMany(t *testing.T) {
	if testing.Short() {
		t.Skip("left out under -short: makes a virtual environment")
	}
	dir := t.TempDir()
	requirements := filepath.Join(t.TempDir(), "requirements.txt")
	wanted, err := os.ReadFile(Script(t, "requirements.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(requirements, wanted, 0o644); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	got := make([]string, 3)
	for i := range got {
		wg.Go(func() {
			var err error
			if got[i], err = ensure(dir, requirements); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, python := range got {
		if python != got[0] {
			t.Errorf("two environments: %s and %s", python, got[0])
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.Contains(e.Name(), ".tmp-") {
			t.Errorf("left behind: %s", e.Name())
		}
	}
	if len(entries) != 2 { // the environment and its lock
		t.Errorf("%d entries in the cache, want 2: %v", len(entries), entries)
	}
}

func TestEnsureSaysWhatIsMissing(t *testing.T) {
	if testing.Short() {
		t.Skip("left out under -short: makes a virtual environment")
	}
	requirements := filepath.Join(t.TempDir(), "requirements.txt")
	if err := os.WriteFile(requirements, []byte("/there/is/no/such/package.whl\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := ensure(dir, requirements); err == nil || !strings.Contains(err.Error(), "no/such/package") {
		t.Errorf("a package that is not there: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.tmp-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := ensure(dir, requirements); err == nil || !strings.Contains(err.Error(), "apt-get install python3") {
		t.Errorf("no python3: %v", err)
	}
}
