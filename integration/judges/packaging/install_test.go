//go:build judges

package packaging

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

const root = "../../.."

// run runs a command and returns the standard output.
func run(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s%s", name, args, err, out, said.String())
	}
	return string(out)
}

// file is a file of the repository for the zip of the module.
type file struct{ path string }

func (f file) Path() string                 { return f.path }
func (f file) Lstat() (os.FileInfo, error)  { return os.Lstat(filepath.Join(root, f.path)) }
func (f file) Open() (io.ReadCloser, error) { return os.Open(filepath.Join(root, f.path)) }

// TestInstallFromProxy checks that `go install ...@v0.987.0` builds both programs from the files of a module proxy: the
// module's zip and the required modules, without the repository. The programs report the version.
func TestInstallFromProxy(t *testing.T) {
	const version = "v0.987.0"
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := modfile.Parse("go.mod", mod, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(parsed.Replace) > 0 {
		t.Errorf("go.mod has replace directives, which go install refuses: %+v", parsed.Replace)
	}
	path := parsed.Module.Mod.Path
	proxy := t.TempDir()
	dir := filepath.Join(proxy, filepath.FromSlash(path), "@v")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("list", []byte(version+"\n"))
	write(version+".info", fmt.Appendf(nil, `{"Version":%q}`, version))
	write(version+".mod", mod)
	var files []zip.File
	for _, name := range strings.Split(run(t, root, nil, "git", "ls-files", "-z"), "\x00") {
		if name != "" {
			files = append(files, file{name})
		}
	}
	packed, err := os.Create(filepath.Join(dir, version+".zip"))
	if err != nil {
		t.Fatal(err)
	}
	if err := zip.Create(packed, module.Version{Path: path, Version: version}, files); err != nil {
		t.Fatalf("the toolchain would refuse the module: %v", err)
	}
	if err := packed.Close(); err != nil {
		t.Fatal(err)
	}

	others := filepath.Join(strings.TrimSpace(run(t, root, nil, "go", "env", "GOMODCACHE")), "cache", "download")
	bin, cache := t.TempDir(), t.TempDir()
	env := []string{"GOPROXY=file://" + proxy + ",file://" + others, "GOSUMDB=off", "GONOPROXY=none", "GOPRIVATE=",
		"GOMODCACHE=" + cache, "GOFLAGS=-trimpath -modcacherw", "GOWORK=off", "CGO_ENABLED=0", "GOBIN=" + bin}
	for _, name := range []string{"indexer", "worker-shim"} {
		run(t, bin, env, "go", "install", path+"/cmd/"+name+"@"+version)
		var said struct{ Version string }
		text := run(t, bin, nil, filepath.Join(bin, name), "version", "--json")
		if err := json.Unmarshal([]byte(text), &said); err != nil || said.Version != version {
			t.Errorf("output of %s version --json: %s, %v", name, text, err)
		}
	}
}
