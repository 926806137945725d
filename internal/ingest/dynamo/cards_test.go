package dynamo

import (
	"strings"
	"testing"
)

// modelText is a record of a prefill worker, as ai-dynamo-runtime 1.6.1 writes it, without the files of the model.
const modelText = `{"type":"Model","namespace":"ns","component":"backend","endpoint":"generate",` +
	`"instance_id":16906666470417415194,"card_json":{"display_name":"m","slug":"m","context_length":4096,` +
	`"kv_cache_block_size":16,"migration_limit":0,"model_type":"Prefill","model_input":"Tokens","worker_type":"prefill",` +
	`"needs":[["decode"]],"runtime_config":{"total_kv_blocks":123,"max_num_seqs":null,"max_num_batched_tokens":456,` +
	`"data_parallel_start_rank":0,"data_parallel_size":2,"enable_local_indexer":true,"runtime_data":{},` +
	`"disaggregated_endpoint":{"bootstrap_host":"192.0.2.4","bootstrap_port":5678},"enable_eagle":false}}}`

// TestCards reads the roles and capacities of new and old cards. An unreadable card is skipped.
func TestCards(t *testing.T) {
	const id = 16906666470417415194
	full := Card{Role: "prefill", BootstrapPort: 5678, TotalKVBlocks: 123, MaxBatchedTokens: 456}
	capacities := Card{TotalKVBlocks: 123, MaxBatchedTokens: 456}
	with := func(c Card, role string) Card {
		c.Role = role
		return c
	}
	for change, want := range map[string]Card{
		"":                                       full,
		`"worker_type":"prefill",|`:              full, // an old release
		`"prefill"|"decode"`:                     with(capacities, "decode"),
		`"prefill"|"aggregated"`:                 with(capacities, "aggregated"),
		`"prefill"|"encode"`:                     with(capacities, "encode"),
		`"prefill"|"another"`:                    full,
		`"prefill"|null`:                         full,
		`"Prefill"|"Chat | Completions"`:         full,
		`"worker_type":"prefill"|"model_type":1`: {}, // a wrong type
		`123|null`:                               {Role: "prefill", BootstrapPort: 5678, MaxBatchedTokens: 456},
		`{"bootstrap_host":"192.0.2.4","bootstrap_port":5678}|null`: with(capacities, "prefill"),
	} {
		from, to, _ := strings.Cut(change, "|")
		got, wrong := cards([]record{{"a", []byte(strings.Replace(modelText, from, to, 1))}, {"b", []byte("{")}})
		if bad := want == (Card{}); got[id] != want || len(wrong) != 1 && !bad || bad && len(wrong) != 2 {
			t.Errorf("%s: %+v, %v; want %+v", change, got[id], wrong, want)
		}
	}
	old := strings.Replace(strings.Replace(modelText, `"worker_type":"prefill",`, "", 1), "Prefill", "Chat", 1)
	if got, wrong := cards([]record{{"a", []byte(old)}}); got[id] != capacities || wrong != nil {
		t.Errorf("an old decode worker: %+v, %v", got, wrong)
	}
}
