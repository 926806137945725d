package main

import (
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

const (
	chartFolder  = "deploy/helm/kvatlas"
	pythonFolder = "clients/python"
)

// images makes the container images for Linux, with the version as tag, in the format of `docker save`. The programs
// have the bytes of the archives' programs.
func (r *releaser) images() error {
	dir := filepath.Join(r.tmp, "images")
	cmd := exec.Command("go", "run", "./tools/images", "--tag", semantic(r.version), "--out", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		for name, inside := range map[string][]string{"kvatlas": {"indexer", "worker-shim"},
			"nats": {"indexer", "nats-server"}} {
			var infos []*debug.BuildInfo
			for _, program := range inside {
				info, err := buildinfo.ReadFile(filepath.Join(dir, arch, program))
				if err != nil {
					return err
				}
				infos = append(infos, info)
			}
			archive, err := os.ReadFile(filepath.Join(dir, name+"-"+arch+".tar"))
			if err != nil {
				return err
			}
			packed, err := zipped(archive)
			if err != nil {
				return err
			}
			file := fmt.Sprintf("image-%s_%s_linux_%s", name, semantic(r.version), arch)
			bill := billOfMaterials(r.version, "linux/"+arch, r.commit.time, infos)
			if err := errors.Join(r.write(file+".cdx.json", bill), r.write(file+".tar.gz", packed)); err != nil {
				return err
			}
		}
	}
	return nil
}

func zipped(data []byte) ([]byte, error) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(data); err != nil {
		return nil, err
	}
	err := z.Close()
	return b.Bytes(), err
}

// imageTag matches the tags of the chart's images, which `make images` builds.
var imageTag = regexp.MustCompile(`(?m)^( +tag: )dev\b`)

// chart packs the Helm chart. Its images have the tag of the release.
func (r *releaser) chart() error {
	files := contents{}
	if err := addFolder(files, "", chartFolder); err != nil {
		return err
	}
	for name, f := range files {
		text, err := stamped(path.Join(chartFolder, name), string(f.data), r.version)
		if err != nil {
			return err
		}
		if name == "values.yaml" {
			if n := len(imageTag.FindAllString(text, -1)); n != 2 {
				return fmt.Errorf("values.yaml has %d tags of images in place of 2", n)
			}
			text = imageTag.ReplaceAllString(text, "${1}"+semantic(r.version))
		}
		files[name] = entry{[]byte(text), f.mode}
	}
	packed, err := pack("kvatlas", files, r.commit.time)
	if err != nil {
		return err
	}
	return r.write("kvatlas-"+semantic(r.version)+".tgz", packed)
}

// python builds the source distribution and the wheel of the Python client, and checks them with twine.
func (r *releaser) python() error {
	dir, dist := filepath.Join(r.tmp, "python"), filepath.Join(r.tmp, "dist")
	if err := r.copyPython(dir); err != nil {
		return err
	}
	python, err := pyenv.FetchEnvironment(os.Stderr, "release.txt")
	if err != nil {
		return err
	}
	run := func(args ...string) error {
		cmd := exec.Command(python, append([]string{"-m"}, args...)...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), fmt.Sprint("SOURCE_DATE_EPOCH=", r.commit.time.Unix()), "PIP_NO_INDEX=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", cmd, err, out)
		}
		return nil
	}
	if err := run("build", "--no-isolation", "--outdir", dist); err != nil {
		return err
	}
	built, err := filepath.Glob(filepath.Join(dist, "*"))
	if err != nil || len(built) != 2 {
		return fmt.Errorf("the build made %q, %w", built, err)
	}
	if err := run(append([]string{"twine", "check", "--strict"}, built...)...); err != nil {
		return err
	}
	for _, file := range built {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := r.write(filepath.Base(file), data); err != nil {
			return err
		}
	}
	return nil
}

// copyPython copies the tracked files of the Python client, with the licence and the version of the build.
func (r *releaser) copyPython(dir string) error {
	out, err := exec.Command("git", "ls-files", "-z", pythonFolder).Output()
	if err != nil {
		return fmt.Errorf("list the files of %s with git: %w", pythonFolder, err)
	}
	names := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
	for _, name := range append(names, "LICENSE") {
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		text, err := stamped(name, string(data), r.version)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, strings.TrimPrefix(name, pythonFolder+"/"))
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(to, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}
