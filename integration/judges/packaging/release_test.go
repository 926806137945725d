//go:build judges

package packaging

import (
	"debug/buildinfo"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// repository makes a repository with a single commit at a fixed time from the current files.
func repository(t *testing.T, dir string) {
	t.Helper()
	for _, name := range strings.Split(run(t, root, nil, "git", "ls-files", "-z"), "\x00") {
		if strings.Contains(name, "testdata/") || name == "" { // test data is not built
			continue
		}
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	env := []string{"GIT_AUTHOR_DATE=2026-01-02T03:04:05Z", "GIT_COMMITTER_DATE=2026-01-02T03:04:05Z",
		"GIT_CONFIG_GLOBAL=" + os.DevNull, "GIT_CONFIG_SYSTEM=" + os.DevNull}
	run(t, dir, env, "git", "init", "-q")
	run(t, dir, env, "git", "add", "-A", "-f")
	run(t, dir, env, "git", "-c", "user.name=n", "-c", "user.email=n@example.org", "commit", "-q", "-m", "all files")
}

// TestRelease builds a release of this platform twice, in two folders, without the container images. The bytes must be
// equal, with the sums in SHA256SUMS. The archive has all files for users, the programs run, and the bill of materials
// is valid and lists every module of the programs. Chart and Python client have the programs' version.
func TestRelease(t *testing.T) {
	platform := runtime.GOOS + "/" + runtime.GOARCH
	outs, dirs := []string{t.TempDir(), t.TempDir()}, []string{t.TempDir(), filepath.Join(t.TempDir(), "elsewhere")}
	repository(t, dirs[0])
	run(t, dirs[0], nil, "git", "clone", "-q", dirs[0], dirs[1])
	for i, out := range outs {
		dir := dirs[i]
		run(t, dir, nil, "go", "run", "./tools/release", "--platforms", platform, "--parts", "archives,chart,python",
			"--out", filepath.Join(out, "r"))
	}
	files := func(out string) (names []string, texts map[string]string) {
		texts = map[string]string{}
		entries, err := os.ReadDir(filepath.Join(out, "r"))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			data, err := os.ReadFile(filepath.Join(out, "r", e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			names, texts[e.Name()] = append(names, e.Name()), string(data)
		}
		return names, texts
	}
	names, texts := files(outs[0])
	others, again := files(outs[1])
	if !slices.Equal(names, others) || len(names) != 6 {
		t.Fatalf("two releases of the same files are %q and %q", names, others)
	}
	for _, name := range names {
		if texts[name] != again[name] {
			t.Errorf("%s is not the same bytes twice", name)
		}
	}
	run(t, filepath.Join(outs[0], "r"), nil, "sha256sum", "--check", "--strict", "SHA256SUMS")

	i := slices.IndexFunc(names, func(name string) bool {
		return strings.HasPrefix(name, "kvatlas_") && strings.HasSuffix(name, ".tar.gz")
	})
	name := strings.TrimSuffix(names[i], ".tar.gz")
	if !strings.HasSuffix(name, "_"+strings.ReplaceAll(platform, "/", "_")) || strings.Contains(name, "modified") {
		t.Errorf("the archive is called %s", name)
	}
	dir := t.TempDir()
	run(t, dir, nil, "tar", "-xzf", filepath.Join(outs[0], "r", names[i]))
	dir = filepath.Join(dir, name)
	for _, file := range []string{"LICENSE", "README.md", "CHANGELOG.md", "sbom.cdx.json", "man/man1/indexer-serve.1",
		"man/man1/worker-shim-run.1", "completions/indexer.bash", "completions/_worker-shim", "completions/indexer.fish",
		"systemd/kvatlas-indexer.service", "systemd/kvatlas-worker-shim@.service", "systemd/README.md"} {
		if info, err := os.Stat(filepath.Join(dir, file)); err != nil || info.Size() < 100 {
			t.Errorf("the archive's %s: %v", file, err)
		}
	}
	var bill struct {
		Components []struct{ Name, Version string }
	}
	text, err := os.ReadFile(filepath.Join(dir, "sbom.cdx.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &bill); err != nil || string(text) != texts[name+".cdx.json"] {
		t.Errorf("the bills in and beside the archive differ, or are no JSON: %v", err)
	}
	listed := map[string]string{}
	for _, c := range bill.Components {
		listed[c.Name] = c.Version
	}
	version, commit, _ := strings.Cut(strings.Split(name, "_")[1], "-dev-")
	if version += "-dev"; len(commit) != 12 {
		t.Errorf("the archive is called %s", name)
	}
	checkPackages(t, filepath.Join(outs[0], "r"), strings.TrimSuffix(version, "-dev"), commit)
	for _, program := range []string{"indexer", "worker-shim"} {
		file := filepath.Join(dir, "bin", program)
		if said := run(t, dir, nil, file, "version"); !strings.HasPrefix(said, program+" v"+version+", commit ") {
			t.Errorf("output of %s version: %s, the release is %s", program, said, version)
		}
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range info.Deps {
			if listed[m.Path] != m.Version {
				t.Errorf("%s has %s %s, the bill has %q", program, m.Path, m.Version, listed[m.Path])
			}
		}
		if len(info.Deps) < 10 || listed["std"] == "" {
			t.Errorf("%s has %d modules, Go is %q", program, len(info.Deps), listed["std"])
		}
	}
	const validate = `import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
v = JsonStrictValidator(SchemaVersion.V1_6)
text = open(sys.argv[1]).read()
print(v.validate_str(text), v.validate_str(text.replace('"purl"', '"url"')) is not None)`
	python := pyenv.PythonWith(t, "sbom.txt")
	if said := run(t, dir, nil, python, "-c", validate, filepath.Join(dir, "sbom.cdx.json")); said != "None True\n" {
		t.Errorf("CycloneDX' schema, for the bill and for an invalid bill: %s", said)
	}
}

// checkPackages unpacks the chart and installs the wheel of a development build, and compares their versions.
func checkPackages(t *testing.T, out, version, commit string) {
	t.Helper()
	dir := t.TempDir()
	run(t, dir, nil, "tar", "-xzf", filepath.Join(out, "kvatlas-"+version+"-dev-"+commit+".tgz"))
	for name, line := range map[string]string{"Chart.yaml": "\nappVersion: v" + version + "-dev-" + commit + "\n",
		"values.yaml": "\n  tag: " + version + "-dev-" + commit + " "} {
		text, err := os.ReadFile(filepath.Join(dir, "kvatlas", name))
		if err != nil || !strings.Contains(string(text), line) {
			t.Errorf("the chart's %s has no line %q: %v", name, line, err)
		}
	}
	python := pyenv.PythonWith(t, "python-client.txt")
	wheel := filepath.Join(out, "kvatlas-"+version+".dev0+"+commit+"-py3-none-any.whl")
	run(t, dir, []string{"PIP_NO_INDEX=1"}, python, "-m", "pip", "install", "-q", "--no-deps", "--target", "installed",
		wheel)
	const show = "import importlib.metadata, kvatlas; print(importlib.metadata.version('kvatlas'), kvatlas.Client.__name__)"
	said := run(t, dir, []string{"PYTHONPATH=installed"}, python, "-c", show)
	if want := version + ".dev0+" + commit + " Client\n"; said != want {
		t.Errorf("the installed client is %q, want %q", said, want)
	}
}
