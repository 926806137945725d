package integration

import (
	"encoding/json"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/bench/cluster"
)

// TestBenchCluster runs the smallest benchmark of a cluster. The benchmark checks the answers, and the test checks for
// all figures.
func TestBenchCluster(t *testing.T) {
	t.Parallel()
	out := harness.Run(t, "indexer", "bench", "cluster", "--workers", "6", "--blocks", "1024", "--queries", "100",
		"--json")
	var r cluster.Report
	if out.Code != 0 || json.Unmarshal([]byte(out.Stdout), &r) != nil {
		t.Fatalf("the benchmark ended with %d, %q, %q", out.Code, out.Stdout, out.Stderr)
	}
	if r.Holdings != 6*1024 || r.One.Blocks != cluster.Rounds*r.Holdings || r.Three.Blocks != 2*r.One.Blocks ||
		r.Restore.Holdings != r.Holdings {
		t.Errorf("one replica has %d holdings; applied are %d on one node and %d on three, restored %d", r.Holdings,
			r.One.Blocks, r.Three.Blocks, r.Restore.Holdings)
	}
	if r.Query.N != 100 || r.Bare.N != 100 || r.Relay.N != 100 || r.FailQueries == 0 || r.Redundant <= 0 ||
		r.Rereplicated.Holdings == 0 || r.Rereplicated.Holdings >= r.Holdings {
		t.Errorf("something was not measured: %s", out.Stdout)
	}
	if len(r.Forms) != 3 {
		t.Errorf("%d forms", len(r.Forms))
	}
	for _, f := range r.Forms {
		if f.Ratio <= 0 || f.Query.N != 100 || f.Asked < 767*4 || f.Answered < 100 {
			t.Errorf("%s was not measured: %+v", f.Name, f)
		}
	}
	for name, ratio := range map[string]float64{"query p50": r.QueryP50, "query p99": r.QueryP99, "ingest": r.Ingest,
		"restore": r.Rereplication} {
		if ratio <= 0 {
			t.Errorf("%s: ratio %v", name, ratio)
		}
	}
}
