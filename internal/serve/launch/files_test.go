package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/routing"
)

// TestReadRouting reads constants from files, and names the faults of the files.
func TestReadRouting(t *testing.T) {
	file := filepath.Join(t.TempDir(), "routing.yaml")
	read := func(text string) (routing.Config, error) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return ReadRouting(file)
	}
	want := routing.DefaultConfig()
	want.RouterTemperature, want.OverlapScoreCredit, want.RouterAssumeKVReuse = 0.5, 2, false
	for _, text := range []string{
		"# ours\nrouter_temperature: 0.5\noverlap_score_credit: 2\nrouter_assume_kv_reuse: false\n",
		`{"router_temperature":0.5,"overlap_score_credit":2,"router_assume_kv_reuse":false}`,
	} {
		if c, err := read(text); err != nil || c != want {
			t.Errorf("%q: %+v, %v", text, c, err)
		}
	}
	bypass := "disaggregation:\n  bypass: isl_bounding\n  isl_tokens: 512\n  kv_transfer_domain: zone\n"
	if c, err := read(bypass); err != nil || c.Disaggregation == nil || *c.Disaggregation.ISLTokens != 512 {
		t.Errorf("%+v, %v", c.Disaggregation, err)
	}
	queue := "queue:\n  threshold_frac: 2\n  max_requests: 8\n  classes:\n  - {name: a, max_requests: 0}\n"
	if c, err := read(queue); err != nil || *c.Queue.MaxRequests != 8 || *c.Queue.Classes[0].MaxRequests != 0 {
		t.Errorf("%+v, %v", c.Queue, err)
	}
	if c, err := read(""); err != nil || c != routing.DefaultConfig() {
		t.Errorf("an empty file: %+v, %v", c, err)
	}
	for text, want := range map[string]string{
		"temperature: 1":                                    `there is no "temperature"; there are overlap_score_credit, `,
		"router_temperature: hot":                           "router_temperature is hot, an invalid value",
		"router_temperature: -1":                            "router_temperature is -1",
		"host_cache_hit_weight: 1.5":                        "host_cache_hit_weight is 1.5: it must be from 0 to 1",
		"disaggregation: {bypas: isl_bounding}":             `no field "bypas"`,
		"disaggregation: {bypass: maybe}":                   `disaggregation.bypass is "maybe": it must be "isl_bounding"`,
		"disaggregation: {bypass: isl_or_load}":             "it needs disaggregation.prefill_busy_threshold",
		"queue: {policy: fcfs}":                             "queue has neither threshold_tokens nor threshold_frac",
		"queue: {threshold_frac: -1}":                       "queue.threshold_frac is -1",
		"queue: {threshold_frac: 1, policy: sjf}":           `queue.policy is "sjf": it must be "fcfs", "lcfs"`,
		"queue: {threshold_frac: 1, max_waiting: 0}":        "queue.max_waiting is 0: it must be from 1",
		"queue: {classes: [{}]}":                            "queue.classes[0].name is missing",
		"queue: {classes: [{name: a, quantum: 9}]}":         "classes[0].quantum is 9",
		"queue: {classes: [{name: default}]}":               `queue.classes[0].name is "default", the name of another class`,
		"queue: {threshold_frac: 1, max_raw_tokens: -1}":    "max_raw_tokens is -1",
		"session_affinity: {ttl_secs: 0.5}":                 "session_affinity.ttl_secs is 0.5: it must be from 1 to",
		"session_affinity: {mode: soft}":                    "session_affinity.ttl_secs is 0",
		"session_affinity: {ttl_secs: 9, mode: firm}":       `session_affinity.mode is "firm"`,
		"disaggregation: {isl_ratio: -1}":                   "disaggregation.isl_ratio is -1",
		"disaggregation: {kv_transfer_enforcement: always}": "kv_transfer_domain is missing",
		"- 1":                         "is not YAML with a constant per line",
		"shared_cache_mode: sideways": `shared_cache_mode is "sideways"`,
	} {
		if _, err := read(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if _, err := ReadRouting(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a missing file is read")
	}
}
