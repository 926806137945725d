package pyenv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// kubernetesCommand is the command that builds the parts of a Kubernetes.
const kubernetesCommand = "go run ./integration/judges/kube/fetch"

// kubernetesParts is the folder with a Go module for every part. kvatlas requires none of the modules.
const kubernetesParts = "integration/judges/kube/parts"

// goPart describes the build of a Go module: the programs of a real component.
type goPart struct {
	folder   string   // below kubernetesParts
	programs []string // the packages to build
	ldflags  string
}

const (
	kubernetesVersion = "v1.37.2" // as in parts/kube/go.mod
	componentVersion  = "k8s.io/component-base/version"
)

var kubernetes = []goPart{
	{
		folder:   "kube",
		programs: []string{"."},
		// The API server reports the version v0.0.0-master without these values.
		ldflags: strings.Join([]string{
			"-X " + componentVersion + ".gitVersion=" + kubernetesVersion,
			"-X " + componentVersion + ".gitMajor=1",
			"-X " + componentVersion + ".gitMinor=37",
			"-X " + componentVersion + ".gitTreeState=clean",
			"-X " + componentVersion + ".gitCommit=0000000000000000000000000000000000000000",
			"-X " + componentVersion + ".buildDate=2026-01-01T00:00:00Z",
		}, " "),
	},
	{folder: "coredns", programs: []string{"."}},
	{folder: "kube-router", programs: []string{"github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"}},
	{folder: "helm", programs: []string{"helm.sh/helm/v3/cmd/helm"}},
}

// FetchKubernetes builds Kubernetes, CoreDNS, kube-router and Helm from the versions in their go.mod files. A built
// part is kept. The parts share a build cache with the sources and intermediate files (6 GB), which is removed at the
// end.
func FetchKubernetes(progress io.Writer) error {
	if _, err := KubernetesFolders(); err != nil {
		if err := buildKubernetes(progress); err != nil {
			return err
		}
	}
	return fetchInferencePool(progress)
}

func buildKubernetes(progress io.Writer) error {
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	build := filepath.Join(cache, "kubernetes-build")
	unlock, err := lock(build + ".lock")
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.RemoveAll(build); err != nil { // of a killed build
		return err
	}
	defer os.RemoveAll(build)
	for _, p := range kubernetes {
		begun := time.Now()
		if err := p.fetch(progress, build); err != nil {
			return err
		}
		fmt.Fprintf(progress, "%s: ready after %v\n", p.folder, time.Since(begun).Round(100*time.Millisecond))
	}
	return nil
}

// The module with the definition of InferencePool, and the hash.
const (
	inferencePoolModule = "sigs.k8s.io/gateway-api-inference-extension@v1.0.0"
	inferencePoolSum    = "h1:GsHvlu1Cn1t6+vrHoPdNNlpwKxf/y1HuQSlUjd58Ds8="
	inferencePoolFile   = "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"
)

func inferencePoolFolder(cache string) string { return filepath.Join(cache, "inferencepool-v1.0.0") }

// InferencePool returns the file with the CustomResourceDefinition of InferencePool from [FetchKubernetes].
func InferencePool(t testing.TB) string {
	t.Helper()
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(inferencePoolFolder(cache), "inferencepools.yaml")
	if !exists(file) {
		t.Fatalf("%s does not exist; run: %s", file, kubernetesCommand)
	}
	return file
}

func fetchInferencePool(progress io.Writer) error {
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	dir := inferencePoolFolder(cache)
	return once(dir, dir, func(ctx context.Context, tmp string) error {
		modules := tmp + ".modules"
		defer os.RemoveAll(modules)
		cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", "-modcacherw", inferencePoolModule)
		cmd.Dir, cmd.Stderr = tmp, progress
		cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "GOMODCACHE="+modules)
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("%s: %w\n%s", cmd, err, out)
		}
		var module struct{ Dir, Sum string }
		if err := json.Unmarshal(out, &module); err != nil {
			return err
		}
		if module.Sum != inferencePoolSum {
			return fmt.Errorf("%s has the hash %s, not %s", inferencePoolModule, module.Sum, inferencePoolSum)
		}
		text, err := os.ReadFile(filepath.Join(module.Dir, inferencePoolFile))
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(tmp, "inferencepools.yaml"), text, 0o644)
	})
}

// KubernetesFolders returns the folders with the programs from [FetchKubernetes].
func KubernetesFolders() (folders []string, err error) {
	for _, p := range kubernetes {
		dir, err := p.dir()
		if err != nil {
			return nil, err
		}
		if !exists(dir) {
			return nil, fmt.Errorf("%s of Kubernetes is not built; run: %s", p.folder, kubernetesCommand)
		}
		folders = append(folders, dir)
	}
	return folders, nil
}

// dir returns the part's folder in the cache. The name contains a hash of the sources and of the build flags.
func (p *goPart) dir() (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	files, err := filepath.Glob(filepath.Join(root, kubernetesParts, p.folder, "*"))
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "%q %q\n", p.programs, p.ldflags)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(sum, "%s %d\n%s", filepath.Base(file), len(text), text)
	}
	return filepath.Join(cache, "kubernetes-"+p.folder+"-"+hex.EncodeToString(sum.Sum(nil)[:8])), nil
}

// fetch builds the part. build is a folder for Go's caches.
func (p *goPart) fetch(progress io.Writer, build string) error {
	dir, err := p.dir()
	if err != nil {
		return err
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	return once(dir, dir, func(ctx context.Context, tmp string) error {
		fmt.Fprintf(progress, "%s: building\n", p.folder)
		// The debug information is unused. Without debug information the compiler needs 12 % less time.
		args := []string{"build", "-trimpath", "-modcacherw", "-buildvcs=false", "-gcflags=all=-dwarf=false",
			"-ldflags", strings.TrimSpace("-s -w " + p.ldflags), "-o", tmp + string(filepath.Separator)}
		cmd := exec.CommandContext(ctx, "go", append(args, p.programs...)...)
		cmd.Dir = filepath.Join(root, kubernetesParts, p.folder)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off",
			"GOCACHE="+filepath.Join(build, "cache"), "GOMODCACHE="+filepath.Join(build, "modules"))
		cmd.Stdout, cmd.Stderr = progress, progress
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("build %s: %w", p.folder, err)
		}
		return nil
	})
}
