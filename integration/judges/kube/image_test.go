//go:build kube

package kube

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// image describes a container image of static programs.
type image struct {
	names      []string
	entrypoint []string
	files      map[string]string // paths in the image to files of the machine
	dirs       []string          // folders of the image's user
	user       string
}

// write makes an archive as `docker save` does. containerd adds the default registry to names in the archive, and the
// kubelet requests the same names.
func (i *image) write(archive string) error {
	var layer bytes.Buffer
	t := tar.NewWriter(&layer)
	uid := 0
	fmt.Sscanf(i.user, "%d:", &uid)
	for _, dir := range i.dirs {
		if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(dir, "/") + "/", Mode: 0o755,
			Uid: uid, Gid: uid}); err != nil {
			return err
		}
	}
	for at, file := range i.files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := addFile(t, strings.TrimPrefix(at, "/"), text, 0o755); err != nil {
			return err
		}
	}
	if err := t.Close(); err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{"architecture": "amd64", "os": "linux", "created": "2026-01-01T00:00:00Z",
		"config": map[string]any{"Entrypoint": i.entrypoint, "User": i.user, "Env": []string{"PATH=/bin:/"},
			"WorkingDir": "/"},
		"rootfs": map[string]any{"type": "layers",
			"diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes()))}}})
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%x.json", sha256.Sum256(config))
	manifest, err := json.Marshal([]map[string]any{{"Config": name, "RepoTags": i.names, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	var all bytes.Buffer
	t = tar.NewWriter(&all)
	for _, f := range []struct {
		name string
		text []byte
	}{{name, config}, {"layer.tar", layer.Bytes()}, {"manifest.json", manifest}} {
		if err := addFile(t, f.name, f.text, 0o644); err != nil {
			return err
		}
	}
	if err := t.Close(); err != nil {
		return err
	}
	return os.WriteFile(archive, all.Bytes(), 0o644)
}

func addFile(t *tar.Writer, name string, text []byte, mode int64) error {
	if err := t.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(text))}); err != nil {
		return err
	}
	_, err := t.Write(text)
	return err
}

// images returns the images of the tests' pods. bin has the programs. The engines' images have the names in
// docs/kubernetes.md.
func images(bin string, engines map[string]string) map[string]*image {
	at := func(names ...string) map[string]string {
		files := map[string]string{}
		for _, name := range names {
			files["/"+name] = filepath.Join(bin, name)
		}
		return files
	}
	const user = "65532:65532"
	all := map[string]*image{
		"pause":   {names: []string{"localhost/pause:1"}, entrypoint: []string{"/pause"}, files: at("pause")},
		"coredns": {names: []string{"localhost/coredns:1"}, entrypoint: []string{"/coredns"}, files: at("coredns")},
		"kvatlas": {names: []string{"kvatlas/kvatlas:dev"}, entrypoint: []string{"/indexer"}, user: user,
			files: at("indexer", "worker-shim")},
		"nats": {names: []string{"kvatlas/nats:dev"}, entrypoint: []string{"/nats-server"}, user: user,
			dirs: []string{"/data"}, files: at("nats-server", "indexer")},
	}
	for name, program := range engines {
		all[path.Base(strings.ReplaceAll(name, ":", "-"))] = &image{names: []string{name}, entrypoint: []string{program},
			files: map[string]string{program: filepath.Join(bin, "engine")}}
	}
	return all
}
