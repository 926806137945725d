package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestImages reads every archive as a container runtime does. An image runs a static program without root, and the
// configuration names the layer by digest.
func TestImages(t *testing.T) {
	dir := t.TempDir()
	for name := range packages {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range images {
		for _, arch := range architectures {
			var b bytes.Buffer
			if err := i.write(&b, dir, arch, "dev"); err != nil {
				t.Fatal(err)
			}
			files := read(t, b.Bytes())
			var manifest []struct {
				Config           string
				RepoTags, Layers []string
			}
			var config struct {
				Architecture, OS string
				Config           struct {
					User       string
					Entrypoint []string
				}
				RootFS struct {
					DiffIDs []string `json:"diff_ids"`
				}
			}
			if err := json.Unmarshal(files["manifest.json"], &manifest); err != nil || len(manifest) != 1 {
				t.Fatalf("manifest %s: %v", files["manifest.json"], err)
			}
			m := manifest[0]
			if err := json.Unmarshal(files[m.Config], &config); err != nil {
				t.Fatal(err)
			}
			if m.Config != digest(files[m.Config])+".json" || m.RepoTags[0] != i.name+":dev" || len(m.Layers) != 1 ||
				config.RootFS.DiffIDs[0] != "sha256:"+digest(files[m.Layers[0]]) {
				t.Errorf("%s for %s: manifest %+v, configuration %+v", i.name, arch, m, config)
			}
			if config.Architecture != arch || config.OS != "linux" || config.Config.User != "65532:65532" ||
				config.Config.Entrypoint[0] != "/"+i.programs[0] {
				t.Errorf("%s for %s runs as %+v", i.name, arch, config)
			}
			layer := read(t, files[m.Layers[0]])
			for _, program := range i.programs {
				if string(layer[program]) != program {
					t.Errorf("%s for %s lacks %s", i.name, arch, program)
				}
			}
			if _, data := layer["data/"]; data != strings.HasPrefix(i.name, "kvatlas/nats") {
				t.Errorf("%s for %s has a data folder: %v", i.name, arch, data)
			}
		}
	}
}

// TestComposeImages checks that docker-compose.yml uses only the images of this program, apart from other projects'
// images.
func TestComposeImages(t *testing.T) {
	text, err := os.ReadFile("../../docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	var compose struct {
		Services map[string]struct{ Image string }
	}
	if err := yaml.Unmarshal(text, &compose); err != nil {
		t.Fatal(err)
	}
	built := map[string]bool{}
	for _, i := range images {
		built[i.name+":dev"] = false
	}
	for name, s := range compose.Services {
		if _, ours := built[s.Image]; !ours && strings.HasPrefix(s.Image, "kvatlas/") {
			t.Errorf("%s runs %s, an image without a build", name, s.Image)
		}
		built[s.Image] = true
	}
	for name, used := range built {
		if !used {
			t.Errorf("no service runs %s", name)
		}
	}
}

func read(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}
