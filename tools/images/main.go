// Command images builds the container images for linux/amd64 and linux/arm64 on any host, without a container runtime:
//
//	go run ./tools/images [--out bin/images] [--tag dev]
//
// Its output is NAME-ARCH.tar in the format of `docker save`. `docker load`, `podman load`, `ctr images
// import` and `kind load image-archive` read the files. The images contain only static programs. The user is 65532, a
// number that no host assigns (as in distroless images).
package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

const user = 65532

// image describes a container image.
type image struct {
	name     string   // without the tag
	programs []string // the first is the entry point
	folders  []string // with write access for the user
}

// images lists the images that docker-compose.yml, the chart and the manifests use. The NATS image contains the indexer
// for the health check (indexer probe).
var images = []image{
	{name: "kvatlas/kvatlas", programs: []string{"indexer", "worker-shim"}},
	{name: "kvatlas/nats", programs: []string{"nats-server", "indexer"}, folders: []string{"data"}},
}

// packages are the sources of the programs.
var packages = map[string]string{"indexer": "./cmd/indexer", "worker-shim": "./cmd/worker-shim",
	"nats-server": "github.com/nats-io/nats-server/v2"}

var architectures = []string{"amd64", "arm64"}

func main() {
	out := flag.String("out", "bin/images", "folder for the images")
	tag := flag.String("tag", "dev", "tag of the images")
	flag.Parse()
	if err := run(*out, *tag); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run(out, tag string) error {
	for _, arch := range architectures {
		dir := filepath.Join(out, arch)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		for name, source := range packages {
			if err := build(filepath.Join(dir, name), source, arch); err != nil {
				return err
			}
		}
		for _, i := range images {
			path := filepath.Join(out, i.file(arch))
			f, err := os.Create(path)
			if err != nil {
				return err
			}
			if err := i.write(f, dir, arch, tag); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if err := f.Close(); err != nil {
				return err
			}
			fmt.Println(path)
		}
	}
	return nil
}

// file returns the name of the image's archive.
func (i *image) file(arch string) string {
	return fmt.Sprintf("%s-%s.tar", filepath.Base(i.name), arch)
}

// build compiles a static, stripped program for Linux.
func build(file, source, arch string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", file, source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s for linux/%s: %w\n%s", source, arch, err, out)
	}
	return nil
}

// write writes the archive of an image: the layer, the configuration, and a manifest with the names of both.
func (i *image) write(to io.Writer, dir, arch, tag string) error {
	layer, err := i.layer(dir)
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": arch, "os": "linux", "created": time.Unix(0, 0).UTC(),
		"config": map[string]any{"Entrypoint": []string{"/" + i.programs[0]}, "User": fmt.Sprintf("%d:%d", user, user),
			"Env": []string{"PATH=/"}, "WorkingDir": "/"},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer)}},
	})
	if err != nil {
		return err
	}
	name := digest(config) + ".json"
	manifest, err := json.Marshal([]map[string]any{
		{"Config": name, "RepoTags": []string{i.name + ":" + tag}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	w := tar.NewWriter(to)
	for _, f := range []struct {
		name string
		data []byte
	}{{name, config}, {"layer.tar", layer}, {"manifest.json", manifest}} {
		if err := add(w, &tar.Header{Name: f.name, Mode: 0o644}, f.data); err != nil {
			return err
		}
	}
	return w.Close()
}

// layer returns the file system of an image.
func (i *image) layer(dir string) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, folder := range i.folders {
		h := &tar.Header{Typeflag: tar.TypeDir, Name: folder + "/", Mode: 0o755, Uid: user, Gid: user}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
	}
	for _, program := range i.programs {
		data, err := os.ReadFile(filepath.Join(dir, program))
		if err != nil {
			return nil, err
		}
		if err := add(w, &tar.Header{Name: program, Mode: 0o755}, data); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}

func add(w *tar.Writer, h *tar.Header, data []byte) error {
	h.Size = int64(len(data))
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}

func digest(data []byte) string { return fmt.Sprintf("%x", sha256.Sum256(data)) }
