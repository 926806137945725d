package integration

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// sglangRegistration is a request to the conductor for SGLang's publisher of events.
func sglangRegistration(instance, model, strategy, endpoint, replay string) string {
	return fmt.Sprintf(`{"endpoint":%q,"replay_endpoint":%q,"type":"SGLang","modelname":%q,"instance_id":%q,`+
		`"block_size":4,"dp_rank":0,"hash_profile":{"strategy":%q,"algorithm":"sha256_raw",`+
		`"index_projection":"first64_be"}}`, endpoint, replay, model, instance, strategy)
}

// TestConductorSGLang registers SGLang's publishers as with Mooncake's conductor. The blocks have the names of SGLang's
// own functions: get_hash_str and hash_str_to_int64.
func TestConductorSGLang(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	x := harness.StartIndexer(t, data, "", "--conductor-listen", "127.0.0.1:0")
	at := x.WaitFor(`Mooncake's conductor is served" listen=(\S+)`)[1]
	post := func(path, body string) (status int, answer string) {
		t.Helper()
		status, answer, err := harness.Request(at, "POST", path, body)
		if err != nil {
			t.Fatal(err)
		}
		return status, answer
	}
	stored := func(names []int64, tokens any, more map[string]any) map[string]any {
		e := map[string]any{"type": "BlockStored", "block_hashes": names, "parent_block_hash": nil, "token_ids": tokens,
			"block_size": 4, "lora_id": nil, "medium": "GPU"}
		for key, value := range more {
			e[key] = value
		}
		return e
	}
	var pairs [][2]int
	for i := 1; i <= 8; i++ {
		pairs = append(pairs, [2]int{i, i + 1})
	}
	eight := harness.Tokens(1, 8)
	type publisher struct {
		strategy string
		events   []any
	}
	registrations := map[string]string{}
	for model, p := range map[string]publisher{
		"pages": {"sglang", []any{
			stored([]int64{-3488128144981237669, 5674439469042975057}, eight, nil),
			stored([]int64{3718046898735569995, 3308615664605479373}, eight, map[string]any{"cache_salt": "tenant-a"}),
		}},
		"pairs": {"sglang_bigram", []any{stored([]int64{-638950109823820341, -4369944537645631836}, pairs, nil)}},
	} {
		engine := startCaseEngine(t)
		body := sglangRegistration("node-"+model, model, p.strategy, engine.endpoint, engine.replay)
		registrations[model] = body
		harness.Eventually(t, "the indexer accepts registrations", func() (bool, string) {
			status, answer := post("/register", body)
			return status == 200, answer
		})
		if err := engine.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		engine.publish(t, p.events)
	}
	found := func(model string, tokens int, more string, want int) {
		t.Helper()
		query := fmt.Sprintf(`{"model":%q,"block_size":4,"token_ids":%s%s}`, model,
			harness.JSONList(harness.Tokens(1, tokens)), more)
		harness.Eventually(t, fmt.Sprintf("%d tokens of %s", want, query), func() (bool, string) {
			_, answer := post("/query", query)
			var a struct {
				Instances map[string]struct {
					GPU int            `json:"gpu"`
					DP  map[string]int `json:"dp"`
				}
			}
			err := json.Unmarshal([]byte(answer), &a)
			in, is := a.Instances["node-"+model]
			return err == nil && is && len(a.Instances) == 1 && in.GPU == want && in.DP["0"] == want, answer
		})
	}
	find := func() {
		t.Helper()
		found("pages", 10, "", 8)
		found("pages", 7, "", 4)
		found("pages", 8, `,"cache_salt":"tenant-a"`, 8)
		found("pages", 8, `,"cache_salt":"tenant-b"`, 0)
		found("pairs", 9, "", 8)
		found("pairs", 8, "", 4) // the second page's last pair has the ninth token
		found("pairs", 4, "", 0)
	}
	find()

	// A context has a single profile, whatever the seed, and a rank has a single type.
	for _, c := range []struct{ body, reason, word string }{
		{sglangRegistration("node-2", "pages", "sglang_bigram", "tcp://"+loopback.Reserve(t), ""),
			"invalid_registration", "hash profile"},
		{strings.Replace(registrations["pages"], `"SGLang"`, `"vLLM"`, 1), "invalid_registration", "node-pages|default|0"},
		{strings.Replace(registrations["pages"], "sha256_raw", "sha256", 1), "invalid_value", "algorithm"},
		{strings.Replace(registrations["pages"], "first64_be", "low64_be", 1), "invalid_value", "projection"},
		{strings.Replace(registrations["pages"], `"sglang"`, `"radix"`, 1), "missing", "python_hash_seed"},
	} {
		if status, answer := post("/register", c.body); status != 400 || !strings.Contains(answer, `"`+c.reason+`"`) ||
			!strings.Contains(answer, c.word) {
			t.Errorf("%s: %d %s; want %s", c.body, status, answer, c.reason)
		}
	}
	seeded := strings.Replace(registrations["pages"], `"algorithm"`, `"python_hash_seed":"7","algorithm"`, 1)
	if status, answer := post("/register", seeded); status != 200 {
		t.Errorf("the same with a seed: %d %s", status, answer)
	}
	services := func() string {
		t.Helper()
		_, text, err := harness.Request(at, "GET", "/services", "")
		if err != nil || strings.Count(text, `"Type":"SGLang"`) != 2 || !strings.Contains(text,
			`"HashProfile":{"strategy":"sglang_bigram","algorithm":"sha256_raw","python_hash_seed":"0","root_digest":"`+
				strings.Repeat("0", 64)+`","index_projection":"first64_be"}`) {
			t.Errorf("/services: %s %v", text, err)
		}
		return text
	}

	// Registrations outlive the process.
	before := services()
	x.Stop()
	x = harness.StartIndexer(t, data, x.NATS, "--conductor-listen", "127.0.0.1:0")
	at = x.WaitFor(`Mooncake's conductor is served" listen=(\S+)`)[1]
	harness.Eventually(t, "the registrations are there again", func() (bool, string) {
		_, text, err := harness.Request(at, "GET", "/services", "")
		return err == nil && text == before, text
	})
	find()
}
