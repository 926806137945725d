//go:build judges

package dynamo

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// TestDynamoReadsOurDump starts NVIDIA Dynamo's indexer with kvatlas's /dump of a hybrid model's worker. Dynamo's
// indexer ignores the groups and has the blocks of the main group. kvatlas's indexer uses the groups and has the
// reusable blocks.
func TestDynamoReadsOurDump(t *testing.T) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	lines := `{"worker_id":7,"event":{"event_id":1,"data":"cleared"},"kv_groups":[` +
		`{"group_idx":0,"kv_cache_spec_kind":"mamba","storage_tier":"device","block_hashes":[12]},` +
		`{"group_idx":1,"kv_cache_spec_kind":"full_attention"}]}
{"worker_id":7,"event":{"event_id":2,"data":{"stored":{"group_idx":1,"parent_hash":null,"blocks":[` +
		`{"block_hash":11,"tokens_hash":101},{"block_hash":12,"tokens_hash":102},{"block_hash":13,"tokens_hash":103},` +
		`{"block_hash":14,"tokens_hash":104}]}}}}
{"worker_id":7,"event":{"event_id":3,"data":{"removed":{"group_idx":1,"block_hashes":[14]}}}}
`
	file := filepath.Join(t.TempDir(), "lines")
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := harness.Run(t, "indexer", "import", "--model", "m", "--block-size", fmt.Sprint(harness.BlockSize), "--nats",
		x.NATS, file); r.Code != 0 {
		t.Fatalf("load: %+v", r)
	}
	depth := func(base string) string {
		_, text, err := harness.Request(base, "POST", "/query_by_hash", `{"model_name":"m","block_hashes":[101,102,103,104]}`)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	harness.Eventually(t, "ours can go on from the state at block 2", func() (bool, string) {
		text := depth(x.HTTP)
		return strings.Contains(text, `"7":{"0":32}`), text
	})
	if status, text, err := harness.Request(x.HTTP, "GET", "/dump", ""); err != nil || status != 200 ||
		!strings.Contains(text, `"kv_groups":[{`) || !strings.Contains(text, `"stored":{"group_idx":1,`) {
		t.Fatalf("dump: %d %s %v", status, text, err)
	}
	dynamo := startDynamo(t, "--peers", "http://"+x.HTTP)
	harness.Eventually(t, "Dynamo's holds three blocks", func() (bool, string) {
		text := depth(dynamo)
		return strings.Contains(text, `"7":{"0":48}`), text
	})
}
