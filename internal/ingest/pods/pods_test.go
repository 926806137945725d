package pods

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/ingest/kube"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestRoleOfPod: the pod's label and annotation set the role and the bootstrap port, unless flags do.
func TestRoleOfPod(t *testing.T) {
	for _, c := range []struct {
		flags       api.WorkerSpec
		label, port string
		role        api.Role
		bootstrap   uint32
		wrong       string
	}{
		{label: "prefill", port: "8998", role: api.RolePrefill, bootstrap: 8998},
		{label: "encode-prefill", role: api.RolePrefill},
		{label: "decode", role: api.RoleDecode},
		{label: "encode-decode", role: api.RoleDecode},
		{label: "encode", role: api.RoleEncode},
		{label: "prefill-decode", role: api.RoleAggregated},
		{label: "both", role: api.RoleAggregated},
		{label: "encode-prefill-decode", role: api.RoleAggregated},
		{},
		{flags: api.WorkerSpec{Role: api.RoleDecode, BootstrapPort: 1}, label: "prefill", port: "2", role: api.RoleDecode,
			bootstrap: 1},
		{label: "Prefill", wrong: `llm-d.ai/role is "Prefill"; it may be both, decode,`},
		{label: "prefill", port: "0", wrong: `sglang.ai/bootstrap-port is "0"`},
		{label: "prefill", port: "65536", wrong: `sglang.ai/bootstrap-port is "65536"`},
		{label: "prefill", port: "8998\r\nx", wrong: `must be a port`},
	} {
		text, err := json.Marshal(map[string]any{"metadata": map[string]any{"name": "p",
			"labels":      map[string]string{"llm-d.ai/role": c.label, "app": "vllm"},
			"annotations": map[string]string{"sglang.ai/bootstrap-port": c.port}}})
		if err != nil {
			t.Fatal(err)
		}
		var pod kube.Pod
		if err := json.Unmarshal(text, &pod); err != nil || pod.Meta.Name != "p" {
			t.Fatal(err)
		}
		spec := c.flags
		err = setRole(&spec, &pod)
		if c.wrong != "" {
			if err == nil || !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("%+v: %v", c, err)
			}
		} else if err != nil || spec.Role != c.role || spec.BootstrapPort != c.bootstrap {
			t.Errorf("%+v: %s, %d, %v", c, spec.Role, spec.BootstrapPort, err)
		}
	}
}
