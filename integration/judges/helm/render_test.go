package helm

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

// values are the values of a test, in the form of `--values`.
type values = map[string]any

func parseValues(t *testing.T, text string) values {
	t.Helper()
	v := values{}
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return v
}

func load(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// render returns the files that `helm install kvatlas --namespace inference --values VALUES` would apply.
func render(t *testing.T, text string) (map[string]string, error) {
	t.Helper()
	options := chartutil.ReleaseOptions{Name: "kvatlas", Namespace: "inference", Revision: 1, IsInstall: true}
	with, err := chartutil.ToRenderValues(load(t), parseValues(t, text), options, nil)
	if err != nil {
		return nil, err
	}
	return engine.Render(load(t), with)
}

// object is a Kubernetes object as decoded YAML.
type object = map[string]any

// objects reads YAML documents. The keys are kind and name.
func objects(t *testing.T, text string) map[string]object {
	t.Helper()
	all := map[string]object{}
	for d := yaml.NewDecoder(strings.NewReader(text)); ; {
		var o object
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if o == nil {
			continue
		}
		name := fmt.Sprint(o["kind"], " ", at(o, "metadata", "name"))
		if all[name] != nil {
			t.Errorf("%s is there twice", name)
		}
		all[name] = o
	}
}

// at returns the value at a path in an object, or nil.
func at(v any, path ...any) any {
	for _, step := range path {
		switch s := step.(type) {
		case string:
			m, _ := v.(object)
			v = m[s]
		case int:
			list, _ := v.([]any)
			if s >= len(list) {
				return nil
			}
			v = list[s]
		}
	}
	return v
}

// containersOf lists the containers of a pod, init containers first.
func containersOf(pod any) []any {
	first, _ := at(pod, "initContainers").([]any)
	rest, _ := at(pod, "containers").([]any)
	return slices.Concat(first, rest)
}

// rendered renders the chart successfully and returns the text and the objects.
func rendered(t *testing.T, text string) (string, map[string]object) {
	t.Helper()
	files, err := render(t, text)
	if err != nil {
		t.Fatalf("%v, with\n%s", err, text)
	}
	var all strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if out := strings.TrimSpace(files[name]); filepath.Ext(name) == ".yaml" && out != "" {
			all.WriteString("---\n" + out + "\n")
		}
	}
	return all.String(), objects(t, all.String())
}

// clusterValues returns the values of three indexers and three NATS servers.
func clusterValues(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(chartDir, "values-cluster.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// allRenderings returns renderings and the values of the cluster.
func allRenderings(t *testing.T) map[string]string {
	t.Helper()
	all := maps.Clone(renderings)
	all["cluster, with an engine"] = clusterValues(t) + "engineExample: {enabled: true}\n"
	return all
}

// differences lists the paths with different values.
func differences(path string, a, b any) (list []string) {
	x, ok := a.(object)
	y, ok2 := b.(object)
	if ok && ok2 {
		for key := range x {
			list = append(list, differences(path+"/"+key, x[key], y[key])...)
		}
		for key := range y {
			if _, ok := x[key]; !ok {
				list = append(list, path+"/"+key)
			}
		}
		return list
	}
	p, ok := a.([]any)
	q, ok2 := b.([]any)
	if ok && ok2 && len(p) == len(q) {
		for i := range p {
			list = append(list, differences(fmt.Sprintf("%s/%d", path, i), p[i], q[i])...)
		}
		return list
	}
	if !reflect.DeepEqual(a, b) {
		list = append(list, fmt.Sprintf("%s: %v, %v", path, a, b))
	}
	return list
}

func subset(of, keys object) object {
	out := object{}
	for key := range keys {
		if v, ok := of[key]; ok {
			out[key] = v
		}
	}
	return out
}
