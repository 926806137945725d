package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// add applies an operation of a JSON patch (RFC 6902), and returns the changed value.
func add(t *testing.T, in any, path []string, value any) any {
	t.Helper()
	switch of := in.(type) {
	case map[string]any:
		if len(path) == 1 {
			of[path[0]] = value
		} else {
			of[path[0]] = add(t, of[path[0]], path[1:], value)
		}
		return of
	case []any:
		if len(path) == 1 && path[0] == "-" {
			return append(of, value)
		}
		if i, err := strconv.Atoi(path[0]); err == nil && i < len(of) {
			of[i] = add(t, of[i], path[1:], value)
			return of
		}
	}
	t.Fatalf("there is no %v to add %v to", path, value)
	return nil
}

// TestGatewayPatches applies the patches of deploy/kubernetes/gateway to the indexers. indexer serve has every flag,
// and every file of a flag is in a mounted volume.
func TestGatewayPatches(t *testing.T) {
	t.Parallel()
	help := harness.Run(t, "indexer", "serve", "--help").Stdout
	for _, name := range []string{"insecure.json", "mutual-tls.json"} {
		var set any
		d := yaml.NewDecoder(strings.NewReader(readFile(t, "../deploy/kubernetes/indexer.yaml")))
		for set == nil {
			var o map[string]any
			if err := d.Decode(&o); err == io.EOF {
				t.Fatal("indexer.yaml has no StatefulSet")
			} else if err != nil {
				t.Fatal(err)
			}
			if o["kind"] == "StatefulSet" {
				set = o
			}
		}
		var operations []struct {
			Op, Path string
			Value    any
		}
		text := readFile(t, "../deploy/kubernetes/gateway/"+name)
		if err := json.Unmarshal([]byte(text), &operations); err != nil {
			t.Fatal(name, err)
		}
		for _, o := range operations {
			if o.Op != "add" {
				t.Fatalf("%s has the operation %s", name, o.Op)
			}
			set = add(t, set, strings.Split(o.Path, "/")[1:], o.Value)
		}
		spec := set.(map[string]any)["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
		container := spec["containers"].([]any)[0].(map[string]any)
		mounts, volumes := fmt.Sprint(container["volumeMounts"]), fmt.Sprint(spec["volumes"])
		for _, arg := range container["args"].([]any)[1:] {
			flag := regexp.MustCompile(`^--[a-z0-9-]+`).FindString(fmt.Sprint(arg))
			if flag == "" || !strings.Contains(help, " "+flag+" ") {
				t.Errorf("%s: indexer serve has no flag %v", name, arg)
			}
			if file := regexp.MustCompile(`=(/etc/kvatlas/[a-z-]+)/`).FindStringSubmatch(fmt.Sprint(arg)); file != nil &&
				!strings.Contains(mounts, "mountPath:"+file[1]+" ") {
				t.Errorf("%s: the file of %v is in no volume: %s", name, arg, mounts)
			}
		}
		for _, m := range container["volumeMounts"].([]any) {
			if volume := fmt.Sprint(m.(map[string]any)["name"]); !strings.Contains(volumes, "name:"+volume+" ") &&
				!strings.Contains(volumes, "name:"+volume+"]") {
				t.Errorf("%s: there is no volume %s: %s", name, volume, volumes)
			}
		}
		if !strings.Contains(fmt.Sprint(container["args"]), "--grpc-listen=0.0.0.0:9002") {
			t.Errorf("%s does not serve gRPC", name)
		}
		if tls := strings.Contains(text, "--http-cert"); tls != (strings.Count(fmt.Sprint(container), "scheme:HTTPS") == 3) {
			t.Errorf("%s: the probes do not fit --http-cert", name)
		}
	}
}
