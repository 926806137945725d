//go:build judges

package kubernetes

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"go.yaml.in/yaml/v3"
)

// manifest has the used fields of a Kubernetes object.
type manifest struct {
	Kind     string
	Metadata struct{ Name string }
	Data     map[string]string
	Spec     struct {
		ServiceName string `yaml:"serviceName"`
		Template    struct {
			Spec struct {
				TerminationGracePeriodSeconds int         `yaml:"terminationGracePeriodSeconds"`
				InitContainers                []container `yaml:"initContainers"`
				Containers                    []container
			}
		}
	}
}

type container struct {
	Name string
	Args []string
}

const (
	kubernetesFolder = "../../../deploy/kubernetes"
	chartRenderings  = "../helm/testdata" // output of the chart for some values
)

// TestKubernetesManifests checks the manifests and renderings of the chart with the oldest and the newest schemas of
// Kubernetes. An unknown field is an error.
func TestKubernetesManifests(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(kubernetesFolder, "*.yaml"))
	if err != nil || len(files) < 4 {
		t.Fatal(files, err)
	}
	for _, name := range []string{"embedded.yaml", "everything.yaml"} {
		files = append(files, withoutMonitors(t, filepath.Join(chartRenderings, name)))
	}
	python := pyenv.PythonWith(t, "kubernetes.txt")
	validate := func(version string, files ...string) (string, error) {
		out, err := exec.Command(python, append([]string{"-m", "kubernetes_validate", "--strict", "-k", version},
			files...)...).CombinedOutput()
		return string(out), err
	}
	for _, version := range []string{"1.29", "1.37"} {
		out, err := validate(version, files...)
		if err != nil {
			t.Errorf("Kubernetes %s: %v\n%s", version, err, out)
		}
		for _, file := range files {
			if !strings.Contains(out, filepath.Base(file)+" passed") {
				t.Errorf("Kubernetes %s: no result for %s:\n%s", version, file, out)
			}
		}
	}
	// the validator must be able to fail
	text, err := os.ReadFile(filepath.Join(kubernetesFolder, "nats.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	broken := filepath.Join(t.TempDir(), "broken.yaml")
	if err := os.WriteFile(broken, bytes.ReplaceAll(text, []byte("readinessProbe"), []byte("readynessProbe")),
		0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := validate("1.37", broken); err == nil || !strings.Contains(out, "readynessProbe") {
		t.Errorf("an unknown field is accepted: %v\n%s", err, out)
	}
}

// withoutMonitors copies a file without the objects of the Prometheus operator, because Kubernetes has no schemas for
// them.
func withoutMonitors(t *testing.T, file string) (path string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var rest []string
	for _, document := range strings.Split(string(text), "\n---\n") {
		if !strings.Contains(document, "kind: ServiceMonitor\n") {
			rest = append(rest, document)
		}
	}
	path = filepath.Join(t.TempDir(), filepath.Base(file))
	if err := os.WriteFile(path, []byte(strings.Join(rest, "\n---\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestKubernetesRuns runs the programs with the arguments of the manifests, apart from addresses and paths. nats-server
// has the configuration of the manifests and the accounts of README.md. All programs become ready, and the index has
// the example's worker.
func TestKubernetesRuns(t *testing.T) {
	dir := t.TempDir()
	keys := filepath.Join(dir, "keys")
	accounts := harness.Run(t, "indexer", "auth", "create", "--keys", keys, "--model", "sim",
		"--shim", "engine-example-0", "--shim", "engine-example-1")
	if accounts.Code != 0 {
		t.Fatal(accounts.Stderr)
	}
	token := filepath.Join(dir, "token")
	client, engine, replay := loopback.Reserve(t), loopback.Reserve(t), loopback.Reserve(t)
	for file, text := range map[string]string{token: "a-token-of-some-length",
		filepath.Join(dir, "accounts", "accounts.conf"): accounts.Stdout} {
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	here := strings.NewReplacer(
		"nats://kvatlas-nats:4222", "nats://"+client, "/etc/kvatlas/keys/", keys+"/default-",
		"/etc/kvatlas/shim.nk", keys+"/default-shim-engine-example-0.nk", "/etc/kvatlas/http/token", token,
		"0.0.0.0:8090", "127.0.0.1:0", "127.0.0.1:5557", engine, "127.0.0.1:5657", replay, "$(POD_NAME)", "engine-example-0",
		"--nats-replicas=3", "--nats-replicas=1",
	)
	objects := map[string]manifest{}
	args := map[string][]string{} // by container
	for _, m := range manifests(t, filepath.Join(kubernetesFolder, "*.yaml")) {
		objects[m.Kind+" "+m.Metadata.Name] = m
		for _, c := range slices.Concat(m.Spec.Template.Spec.InitContainers, m.Spec.Template.Spec.Containers) {
			for _, a := range c.Args {
				args[c.Name] = append(args[c.Name], here.Replace(a))
			}
		}
	}
	indexers := objects["StatefulSet kvatlas-indexer"].Spec
	if objects["Service "+indexers.ServiceName].Kind == "" ||
		indexers.Template.Spec.TerminationGracePeriodSeconds <= 30 {
		t.Errorf("the indexers' service is %q, with %d s for the shutdown", indexers.ServiceName,
			indexers.Template.Spec.TerminationGracePeriodSeconds)
	}

	conf := objects["ConfigMap kvatlas-nats"].Data["nats.conf"]
	for i := range 3 {
		if route := fmt.Sprintf("nats://kvatlas-nats-%d.kvatlas-nats:6222", i); !strings.Contains(conf, route) {
			t.Errorf("no route to %s", route)
		}
	}
	before, rest, ok := strings.Cut(conf, "cluster {")
	_, after, closed := strings.Cut(rest, "\n}\n")
	if !ok || !closed {
		t.Fatal("no cluster in nats.conf:\n", conf)
	}
	alone := strings.NewReplacer("0.0.0.0:4222", client, "0.0.0.0:8222", "127.0.0.1:-1", "/data",
		filepath.Join(dir, "data"), "$NATS_NAME", "nats-0").Replace(before + after)
	config := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(config, []byte(alone), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Start(t, "nats-server", "--config", config).WaitFor(`Server is ready`)
	harness.Start(t, "indexer", args["indexer"]...).WaitFor(`"msg":"ready"`)
	harness.Start(t, "worker-shim", args["engine"]...).WaitFor(`endpoint=`)
	harness.Start(t, "worker-shim", args["shim"]...)
	harness.Eventually(t, "the example's worker holds something", func() (bool, string) {
		r := harness.Run(t, "indexer", "workers", "--json", "--nats", client, "--nats-nkey",
			filepath.Join(keys, "default-reader.nk"), "--nats-inbox-prefix", "_INBOX_reader")
		return r.Code == 0 && strings.Contains(r.Stdout, `"engine-example-0"`), r.Stdout + r.Stderr
	})
}

// TestChartEmbeddedRuns runs the indexer with the chart's arguments for an embedded NATS server, apart from addresses
// and paths, and the accounts of README.md. The indexer becomes ready, and requests with a key are accepted.
func TestChartEmbeddedRuns(t *testing.T) {
	dir := t.TempDir()
	keys, token := filepath.Join(dir, "keys"), filepath.Join(dir, "token")
	accounts := harness.Run(t, "indexer", "auth", "create", "--keys", keys)
	if accounts.Code != 0 {
		t.Fatal(accounts.Stderr)
	}
	conf := filepath.Join(dir, "accounts.conf")
	for file, text := range map[string]string{token: "a-token-of-some-length", conf: accounts.Stdout} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	here := strings.NewReplacer("=/data", "="+filepath.Join(dir, "data"), "/etc/kvatlas/accounts/accounts.conf", conf,
		"/etc/kvatlas/keys/", keys+"/default-", "/etc/kvatlas/http/token", token, "0.0.0.0:8090", "127.0.0.1:0",
		"0.0.0.0:4222", "127.0.0.1:0", "$(POD_NAME)", "pod-0")
	var args []string
	for _, m := range manifests(t, filepath.Join(chartRenderings, "embedded.yaml")) {
		for _, c := range m.Spec.Template.Spec.Containers {
			for _, a := range c.Args {
				args = append(args, here.Replace(a))
			}
		}
	}
	x := harness.Start(t, "indexer", args...)
	nats := x.WaitFor(`in this process","listen":"([^"]+)"`)[1]
	x.WaitFor(`"msg":"ready"`)
	if r := harness.Run(t, "indexer", "status", "--nats", nats, "--nats-nkey", filepath.Join(keys, "default-reader.nk"),
		"--nats-inbox-prefix", "_INBOX_reader"); r.Code != 0 {
		t.Errorf("the reader is not answered: %+v", r)
	}
	if r := harness.Run(t, "indexer", "status", "--nats", nats); r.Code == 0 {
		t.Error("the status is readable without a key")
	}
}

// manifests reads all objects of files.
func manifests(t *testing.T, pattern string) (all []manifest) {
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatal(pattern, err)
	}
	for _, file := range files {
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for d := yaml.NewDecoder(f); ; {
			var m manifest
			if err := d.Decode(&m); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(file, err)
			}
			all = append(all, m)
		}
	}
	return all
}
