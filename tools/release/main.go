// Command release builds the release files. Every platform has an archive with both programs, manual pages, completions
// and the licence, and on Linux systemd's units. The other files are container images for Linux, the Helm chart and the
// Python client (wheel and source distribution). Every archive and image has a bill of materials (CycloneDX).
// SHA256SUMS has the hashes of all files. Equal commits and Go versions give equal bytes on every machine. The command
// uploads nothing.
//
//	go run ./tools/release [--out bin/release] [--parts archives,images,chart,python]
//		[--platforms linux/amd64,linux/arm64,darwin/amd64,darwin/arm64]
//
// The version is the tag of an unmodified commit. Other commits give development versions (cli.Version) with the
// commit. With --versions, the command writes cli.Release into the chart, the Python client and the pages.
//
// goreleaser would be an alternative, but go.mod cannot pin goreleaser at low cost. In November 2026, goreleaser 2.18.2
// required Go 1.27.1. The build of 2.17.0 failed, because the Go proxy refused the module go.digitalxero.dev/go-msix.
// The build of 2.15.1 worked with Go 1.26.8, with 121 MB of 325 modules. Its snapshot mode made the archive and then
// failed without syft, another program, for the bill of materials. Manual pages and completions would still need hooks.
// This program reads the bill from the toolchain's data in the programs, and needs only the standard library.
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

var programs = []string{"indexer", "worker-shim"}

//go:generate go run . --versions --root ../..

func main() {
	out := flag.String("out", "bin/release", "folder for the files; earlier content is removed")
	platforms := flag.String("platforms", "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64",
		"GOOS/GOARCH of the archives, with commas between")
	parts := flag.String("parts", "archives,images,chart,python", "parts of the release, with commas between")
	versions := flag.Bool("versions", false, "write the last release into the files of the repository, and build nothing")
	root := flag.String("root", ".", "folder of the repository")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "release: what is", flag.Arg(0), "for?")
		os.Exit(2)
	}
	err := os.Chdir(*root)
	switch {
	case err != nil:
	case *versions:
		err = writeVersions(".", cli.Release)
	default:
		err = release(*out, strings.Split(*parts, ","), strings.Split(*platforms, ","))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// releaser makes the files of a release. The current folder is the repository's root.
type releaser struct {
	out, tmp  string
	platforms []string
	commit    commit
	version   string            // v0.5.0
	sums      map[string]string // by file
}

// release makes the parts of a release in the folder out.
func release(out string, parts, platforms []string) error {
	tmp, err := os.MkdirTemp("", "kvatlas-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	r := &releaser{out: out, tmp: tmp, platforms: platforms, sums: map[string]string{}}
	if r.commit, err = headCommit(); err != nil {
		return err
	}
	host, err := build(tmp, programs[0], runtime.GOOS, runtime.GOARCH)
	if err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(host)
	if err != nil {
		return err
	}
	r.version = r.commit.version(info.Main.Version)
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	makers := map[string]func() error{"archives": r.archives, "images": r.images, "chart": r.chart, "python": r.python}
	for _, part := range parts {
		do := makers[part]
		if do == nil {
			return fmt.Errorf("a release has no part %q, but archives, images, chart and python", part)
		}
		if err := do(); err != nil {
			return fmt.Errorf("%s: %w", part, err)
		}
	}
	var sums strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r.sums)) {
		fmt.Fprintf(&sums, "%s  %s\n", r.sums[name], name)
	}
	return os.WriteFile(filepath.Join(out, "SHA256SUMS"), []byte(sums.String()), 0o644)
}

// write writes a file of the release.
func (r *releaser) write(name string, data []byte) error {
	path := filepath.Join(r.out, name)
	r.sums[name] = fmt.Sprintf("%x", sha256.Sum256(data))
	fmt.Printf("%s  %s\n", path, cli.Bytes(int64(len(data))))
	return os.WriteFile(path, data, 0o644)
}

// archives makes the archive of every platform.
func (r *releaser) archives() error {
	common, err := commonFiles(r.tmp)
	if err != nil {
		return err
	}
	for _, platform := range r.platforms {
		goos, goarch, ok := strings.Cut(platform, "/")
		if !ok {
			return fmt.Errorf("platform %q is not GOOS/GOARCH", platform)
		}
		files := maps.Clone(common)
		if goos == "linux" {
			if err := addFolder(files, "systemd", "deploy/systemd"); err != nil {
				return err
			}
		}
		var infos []*debug.BuildInfo
		for _, name := range programs {
			program, err := build(r.tmp, name, goos, goarch)
			if err != nil {
				return err
			}
			info, err := buildinfo.ReadFile(program)
			if err != nil {
				return err
			}
			infos = append(infos, info)
			if err := files.add("bin/"+name, program, 0o755); err != nil {
				return err
			}
		}
		name := fmt.Sprintf("kvatlas_%s_%s_%s", semantic(r.version), goos, goarch)
		bill := billOfMaterials(r.version, platform, r.commit.time, infos)
		files["sbom.cdx.json"] = entry{bill, 0o644}
		packed, err := pack(name, files, r.commit.time)
		if err != nil {
			return err
		}
		if err := errors.Join(r.write(name+".cdx.json", bill), r.write(name+".tar.gz", packed)); err != nil {
			return err
		}
	}
	return nil
}

// build compiles a program into a folder, unless present, and returns the path.
func build(dir, name, goos, goarch string) (file string, err error) {
	file = filepath.Join(dir, fmt.Sprintf("%s-%s-%s", name, goos, goarch))
	if _, err := os.Stat(file); err == nil {
		return file, nil
	}
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", file, "./cmd/"+name)
	// variables of the machine that would change the bytes
	cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0", "GOFLAGS=-mod=readonly", "GOWORK=off",
		"GOAMD64=v1", "GOARM64=v8.0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s for %s/%s: %w\n%s", cmd, goos, goarch, err, out)
	}
	return file, nil
}

// commit is the commit of a release.
type commit struct {
	revision string
	time     time.Time
	modified bool // with uncommitted changes
}

// headCommit returns the checked-out commit.
func headCommit() (c commit, err error) {
	git := func(args ...string) string {
		out, failed := exec.Command("git", args...).Output()
		if failed != nil && err == nil {
			err = fmt.Errorf("read the commit with git %s: %w", strings.Join(args, " "), failed)
		}
		return strings.TrimSpace(string(out))
	}
	revision, seconds, _ := strings.Cut(git("log", "-1", "--format=%H %ct"), " ")
	c.revision, c.modified = revision, git("status", "--porcelain") != ""
	if err != nil {
		return c, err
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return c, fmt.Errorf("the commit time from git is %q: %w", seconds, err)
	}
	c.time = time.Unix(unix, 0).UTC()
	return c, nil
}

var released = regexp.MustCompile(`^v\d+\.\d+\.\d+(-[a-z]+\.?\d*)?$`)

// version returns the version of a build. module is the toolchain's version of the module: v0.5.0 at that tag. Without
// a tag, the version is that of a development build with the commit.
func (c commit) version(module string) string {
	if released.MatchString(module) {
		return module
	}
	version := cli.Version() + "-" + c.revision[:min(12, len(c.revision))]
	if c.modified {
		version += "-modified"
	}
	return version
}

// entry is a file of an archive.
type entry struct {
	data []byte
	mode int64
}

// contents are the files of an archive, by path.
type contents map[string]entry

func (c contents) add(name, file string, mode int64) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	c[name] = entry{data, mode}
	return nil
}

// addFolder adds all files below a folder.
func addFolder(c contents, name, dir string) error {
	return filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		below, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		return c.add(path.Join(name, filepath.ToSlash(below)), file, 0o644)
	})
}

// commonFiles returns the files of all platforms. The programs for this platform write the manual pages and
// completions.
func commonFiles(tmp string) (contents, error) {
	files := contents{}
	for _, name := range []string{"LICENSE", "README.md", "CHANGELOG.md"} {
		if err := files.add(name, name, 0o644); err != nil {
			return nil, err
		}
	}
	man := filepath.Join(tmp, "man")
	for _, name := range programs {
		program, err := build(tmp, name, runtime.GOOS, runtime.GOARCH)
		if err != nil {
			return nil, err
		}
		if out, err := exec.Command(program, "man", man).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s man: %w\n%s", name, err, out)
		}
		for shell, file := range map[string]string{"bash": name + ".bash", "zsh": "_" + name, "fish": name + ".fish"} {
			cmd := exec.Command(program, "completion", shell)
			cmd.Args[0] = name // the name in the script
			out, err := cmd.Output()
			if err != nil {
				return nil, fmt.Errorf("%s completion %s: %w", name, shell, err)
			}
			files["completions/"+file] = entry{out, 0o644}
		}
	}
	return files, addFolder(files, "man/man1", man)
}

// sorted returns the paths in the order of the archive.
func (c contents) sorted() []string { return slices.Sorted(maps.Keys(c)) }
