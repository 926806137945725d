//go:build judges

package fields

import (
	"archive/zip"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestEnginesReportLoads: the newest wheels still have the metrics and fields that internal/ingest/enginehttp reads
// for an engine's load.
func TestEnginesReportLoads(t *testing.T) {
	text := func(engine, file string) string {
		t.Helper()
		r, err := zip.OpenReader(pyenv.Wheel(t, newest(t, engine)))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		f, err := r.Open(file)
		if err != nil {
			t.Fatalf("%s: %v; find the new place of the load, and read it there", newest(t, engine), err)
		}
		defer f.Close()
		body, err := io.ReadAll(f)
		if err != nil {
			t.Fatal(err)
		}
		return string(body)
	}
	metrics := text("vllm", "vllm/v1/metrics/loggers.py")
	for _, name := range []string{"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"} {
		// the gauge has the labels of each engine, and no further ones
		gauge := regexp.MustCompile(`name="vllm:` + name + `",[^)]*labelnames=labelnames,\s*\)`)
		if !gauge.MatchString(metrics) {
			t.Errorf("vLLM has no gauge vllm:%s with the labels of each engine", name)
		}
	}
	if !strings.Contains(metrics, `labelnames = ["model_name", "engine"]`) {
		t.Error("the labels of vLLM's gauges are no longer model_name and engine")
	}
	if !strings.Contains(metrics, "cache_config_info") {
		t.Error("vLLM has no cache_config_info, from which the number of blocks is read")
	}

	if !strings.Contains(text("sglang", "sglang/srt/entrypoints/v1_loads.py"), `@router.get("/v1/loads")`) {
		t.Error("SGLang does not serve /v1/loads")
	}
	snapshot := text("sglang", "sglang/srt/managers/load_snapshot.py")
	class := regexp.MustCompile(`(?s)class LoadSnapshot\(.*?\n    def `).FindString(snapshot)
	var fields []string
	for _, m := range regexp.MustCompile(`(?m)^    (\w+): int = 0$`).FindAllStringSubmatch(class, -1) {
		fields = append(fields, m[1])
	}
	for _, name := range []string{"dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens",
		"num_used_tokens", "max_total_num_tokens"} {
		if !slices.Contains(fields, name) {
			t.Errorf("SGLang's LoadSnapshot has no number %s; it has %v", name, fields)
		}
	}
	if !strings.Contains(snapshot, `if include == {"core"}:`) {
		t.Error("SGLang's /v1/loads has no section core")
	}
}
