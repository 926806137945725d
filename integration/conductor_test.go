package integration

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/vmihailenco/msgpack/v5"
)

// registration is a documented request to the conductor, for a publisher of events.
func registration(instance, endpoint, replay string, more string) string {
	return fmt.Sprintf(`{"endpoint":%q,"replay_endpoint":%q,"type":"vLLM","modelname":"m","lora_name":"",`+
		`"tenant_id":"default","instance_id":%q,"block_size":16,"dp_rank":0,"cache_group":0,"hash_profile":`+
		`{"strategy":"vllm_v1","algorithm":"sha256_cbor","python_hash_seed":"0","index_projection":"low64_be"}%s}`,
		endpoint, replay, instance, more)
}

// packed sends a request in MessagePack, and returns the reply, also in MessagePack, as JSON with sorted names.
func packed(t *testing.T, at, method, path string, body map[string]any) (status int, answer string) {
	t.Helper()
	data, err := msgpack.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequest(method, "http://"+at+path, bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if r.Header.Set("Accept", api.MsgPack); body == nil {
		r.Body, r.ContentLength = http.NoBody, 0
	} else {
		r.Header.Set("Content-Type", api.MsgPack)
	}
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	var v any
	if err := msgpack.NewDecoder(reply.Body).Decode(&v); err != nil || reply.Header.Get("Content-Type") != api.MsgPack {
		t.Errorf("%s %s is answered in %s: %v", method, path, reply.Header.Get("Content-Type"), err)
	}
	text, err := json.Marshal(v)
	if err != nil {
		t.Error(err)
	}
	return reply.StatusCode, string(text)
}

// sorted returns JSON with sorted names.
func sorted(t *testing.T, text string) string {
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestConductor sends requests of Mooncake's conductor to an indexer. The requests and replies come from the
// conductor's code and tests.
func TestConductor(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	x := harness.StartIndexer(t, data, "", "--conductor-listen", "127.0.0.1:0")
	at := x.WaitFor(`Mooncake's conductor is served" listen=(\S+)`)[1]
	do := func(method, path, body string, status int, want string) {
		t.Helper()
		got, text, err := harness.Request(at, method, path, body)
		if err != nil || got != status || text != want {
			t.Errorf("%s %s %.300s: %d %s %v; want %d %s", method, path, body, got, text, err, status, want)
		}
	}
	prompt := harness.Tokens(1, 3*harness.BlockSize)
	engine := harness.StartSimEngine(t)
	harness.ServePrompt(t, engine, prompt[:2*harness.BlockSize])

	do("GET", "/services", "", 200, `{"count":0,"services":[]}`)
	do("GET", "/global_view", "", 200, `{"context_count":0,"contexts":[]}`+"\n")
	query := func(more string) string {
		return fmt.Sprintf(`{"model":"m","block_size":16,"token_ids":%s%s}`, harness.JSONList(prompt), more)
	}
	do("POST", "/query", query(""), 200, `{"instances":{}}`+"\n")

	// A shim follows a registration. An equal registration changes nothing, and another registration with the same name is
	// refused.
	first := registration("vllm-prefill-node1", engine.Endpoint(), engine.Replay(), "")
	const good = `{"instance_id":"vllm-prefill-node1","status":"registered successfully"}` + "\n"
	harness.Eventually(t, "the indexer accepts registrations", func() (bool, string) {
		status, text, err := harness.Request(at, "POST", "/register", first)
		return err == nil && status == 200 && text == good, text
	})
	do("POST", "/register", first, 200, good)
	refused := func(body, reason, field string, words ...string) {
		t.Helper()
		status, text, err := harness.Request(at, "POST", "/register", body)
		var r struct{ Error, Reason, Field string }
		if err != nil || status != 400 || json.Unmarshal([]byte(text), &r) != nil || r.Reason != reason ||
			r.Field != field {
			t.Errorf("%.200s: %d %s %v; want %s of %q", body, status, text, err, reason, field)
		}
		for _, word := range words {
			if !strings.Contains(r.Error, word) {
				t.Errorf("%q lacks %s", r.Error, word)
			}
		}
	}
	refused(strings.Replace(first, `"m"`, `"other"`, 1), "invalid_registration", "",
		"conflicting registration for service key: vllm-prefill-node1|default|0")
	refused(strings.Replace(first, "node1", "node2", 1), "invalid_registration", "",
		"conflicting active registration for endpoint")
	second := registration("node2", "tcp://"+loopback.Reserve(t), "", "")
	refused(strings.Replace(second, `"0"`, `"1"`, 1), "invalid_registration", "", "hash profile")
	refused(strings.Replace(second, `"block_size":16`, `"block_size":32`, 1), "invalid_registration", "", "block_size")

	// A query returns the held tokens; an empty instance is listed too.
	do("POST", "/register", second, 200, `{"instance_id":"node2","status":"registered successfully"}`+"\n")
	const (
		none = `{"longest_matched":0,"dp":{"0":0},"rank_matches":{"0":{"gpu":0,"cpu":0,"disk":0}},"gpu":0,"cpu":0,"disk":0}`
		two  = `{"longest_matched":32,"dp":{"0":32},"rank_matches":{"0":{"gpu":32,"cpu":32,"disk":32}},` +
			`"gpu":32,"cpu":32,"disk":32}`
		both = `{"instances":{"node2":` + none + `,"vllm-prefill-node1":` + two + `}}` + "\n"
	)
	found := func() {
		t.Helper()
		harness.Eventually(t, "the conductor has the engine's blocks", func() (bool, string) {
			_, text, err := harness.Request(at, "POST", "/query", query(""))
			return err == nil && text == both, text
		})
	}
	found()
	// The newest version supports MessagePack, with tokens in memory layout or as a list.
	raw := make([]byte, 0, 4*len(prompt))
	for _, token := range prompt {
		raw = binary.LittleEndian.AppendUint32(raw, token)
	}
	for _, tokens := range []any{raw, prompt} {
		status, answer := packed(t, at, "POST", "/query", map[string]any{"model": "m", "block_size": 16, "token_ids": tokens,
			"cache_salt": nil, "lora_name": ""})
		if status != 200 || answer != strings.TrimSpace(sorted(t, both)) {
			t.Errorf("/query in MessagePack: %d %s", status, answer)
		}
	}
	var told map[string]any
	if err := json.Unmarshal([]byte(second), &told); err != nil {
		t.Fatal(err)
	}
	told["block_size"], told["dp_rank"], told["cache_group"] = 16, 0, 0
	for _, c := range []struct {
		method, path string
		body         map[string]any
		status       int
		want         string
	}{
		{"POST", "/register", told, 200, `{"instance_id":"node2","status":"registered successfully"}`},
		{"POST", "/unregister", map[string]any{"instance_id": "nobody", "dp_rank": 0}, 404,
			`{"error":"service not found: nobody|default|0"}`},
		{"POST", "/query", map[string]any{"model": "m", "block_size": 16, "token_ids": []byte{1, 0, 0}}, 400,
			`"reason":"invalid_msgpack"`},
		{"POST", "/query", map[string]any{"model": "m", "block_size": 16,
			"token_ids": []byte{0, 0, 0, 0, 0, 0, 0, 0x80}}, 400, `"field":"token_ids","index":1,"reason":"out_of_range"}`},
		{"GET", "/services", nil, 200, `{"count":2,"services":[{"BlockSize":16,`},
		{"GET", "/query", nil, 405, `{"error":"Method not allowed"}`},
	} {
		status, answer := packed(t, at, c.method, c.path, c.body)
		if status != c.status || !strings.Contains(answer, c.want) {
			t.Errorf("%s %s in MessagePack: %d %s; want %d %s", c.method, c.path, status, answer, c.status, c.want)
		}
	}
	do("POST", "/query", query(`,"tenant_id":"","lora_name":"","cache_salt":null,"instance_id":"node2"`), 200,
		`{"instances":{"node2":`+none+`}}`+"\n")
	do("POST", "/query", query(`,"instance_id":"nobody"`), 200, `{"instances":{}}`+"\n")
	do("POST", "/query", query(`,"tenant_id":"another"`), 200, `{"instances":{}}`+"\n")
	do("POST", "/query", query(`,"lora_name":"sql-adapter"`), 200, `{"instances":{}}`+"\n")
	do("POST", "/query", strings.Replace(query(""), `"block_size":16`, `"block_size":64`, 1), 200, `{"instances":{}}`+"\n")
	do("POST", "/query", query(`,"cache_salt":"w8a8"`), 200,
		`{"instances":{"node2":`+none+`,"vllm-prefill-node1":`+none+`}}`+"\n")

	const profile = `{"strategy":"vllm_v1","algorithm":"sha256_cbor","python_hash_seed":"0",` +
		`"root_digest":"4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e","index_projection":"low64_be"}`
	services := func(count int, of string) string {
		_, text, err := harness.Request(at, "GET", "/services", "")
		if err != nil || !strings.HasPrefix(text, fmt.Sprintf(`{"count":%d,"services":[`, count)) ||
			!strings.Contains(text, of) {
			t.Errorf("/services: %s %v; want %d with %s", text, err, count, of)
		}
		return text
	}
	listed := fmt.Sprintf(`{"Endpoint":%q,"ReplayEndpoint":%q,"Type":"vLLM","ModelName":"m","LoraName":"",`+
		`"TenantID":"default","InstanceID":"vllm-prefill-node1","BlockSize":16,"DPRank":0,"CacheGroup":0,"HashProfile":%s}`,
		engine.Endpoint(), engine.Replay(), profile)
	services(2, listed)
	do("GET", "/global_view", "", 200, `{"context_count":1,"contexts":[{"model_name":"m","lora_name":"","block_size":16,`+
		`"tenant_id":"default","prefix_count":2,"hash_profile":`+profile+
		`,"instances":{"node2":[0],"vllm-prefill-node1":[0]}}]}`+"\n")

	// Invalid requests are refused with the reason, the field, and the index in a list.
	bad := func(path, body, want string) {
		t.Helper()
		do("POST", path, body, 400, want+"\n")
	}
	bad("/query", query(`,"model_name":"m"`),
		`{"error":"unsupported request field: model_name","reason":"unknown_field","field":"model_name"}`)
	bad("/query", query(`,"lora_id":1,"additionalsalt":"w8a8"`),
		`{"error":"unsupported request field: additionalsalt","reason":"unknown_field","field":"additionalsalt"}`)
	bad("/query", `{"block_size":16,"token_ids":[]}`,
		`{"error":"model is required","reason":"missing","field":"model"}`)
	bad("/query", `{"model":"m","token_ids":[]}`,
		`{"error":"block_size is required","reason":"missing","field":"block_size"}`)
	bad("/query", `{"model":"m","block_size":0,"token_ids":[]}`,
		`{"error":"block_size must be greater than zero","reason":"out_of_range","field":"block_size"}`)
	bad("/query", `{"model":"m","block_size":16}`,
		`{"error":"token_ids is required","reason":"missing","field":"token_ids"}`)
	bad("/query", `{"model":"m","block_size":16,"token_ids":"1"}`,
		`{"error":"token_ids must be an array","reason":"not_array","field":"token_ids"}`)
	bad("/query", `{"model":"m","block_size":16,"token_ids":[1,2.5]}`,
		`{"error":"token_ids element must be a JSON integer","reason":"invalid_type","field":"token_ids","index":1}`)
	bad("/query", `{"model":"m","block_size":16,"token_ids":[1,2147483648]}`,
		`{"error":"token_ids element is outside the int32 range","reason":"out_of_range","field":"token_ids","index":1}`)
	bad("/query", query(`,"cache_salt":7`),
		`{"error":"cache_salt must be a string or null","reason":"invalid_type","field":"cache_salt"}`)
	bad("/query", query(`,"instance_id":null`),
		`{"error":"instance_id must be a string","reason":"invalid_type","field":"instance_id"}`)
	bad("/unregister", `{"instance_id":"node2"}`, `{"error":"dp_rank is required","reason":"missing","field":"dp_rank"}`)
	bad("/unregister", `{"instance_id":"node2","dp_rank":-1}`,
		`{"error":"dp_rank must be a non-negative int","reason":"invalid_value","field":"dp_rank"}`)
	bad("/unregister", `{"instance_id":"node2","dp_rank":0,"type":"vLLM"}`,
		`{"error":"unsupported request field: type","reason":"unknown_field","field":"type"}`)
	refused(strings.Replace(second, "node2", "", 1), "invalid_value", "instance_id")
	refused(strings.Replace(second, `"modelname"`, `"model_name"`, 1), "unknown_field", "model_name")
	refused(strings.Replace(second, `"cache_group":0`, `"cache_group":1`, 1), "unsupported", "cache_group")
	refused(strings.Replace(second, `"dp_rank":0`, `"dp_rank":"0"`, 1), "invalid_type", "dp_rank")
	refused(strings.Replace(second, `"algorithm":"sha256_cbor"`, `"algorithm":"xxhash"`, 1), "invalid_value", "algorithm")
	refused(strings.Replace(second, `"strategy":"vllm_v1",`, ``, 1), "missing", "strategy")
	refused(strings.Replace(second, `"strategy"`, `"root_digest":"00","strategy"`, 1), "unknown_field", "root_digest")
	refused(strings.Replace(second, "vLLM", "Mooncake", 1), "unsupported", "type", "docs/l3.md")
	refused(strings.Replace(second, "vLLM", "Other", 1), "invalid_value", "type")
	refused(registration("node4", "udp://127.0.0.1:1", "", ""), "invalid_registration", "", "udp://")
	status, text, err := harness.Request(at, "POST", "/query", `{"model":`)
	if err != nil || status != 400 || !strings.Contains(text, `"reason":"invalid_json"`) {
		t.Errorf("half a body: %d %s %v", status, text, err)
	}
	status, text, err = harness.Request(at, "POST", "/register", `[]`)
	if err != nil || status != 400 || !strings.HasPrefix(text, "Invalid JSON") {
		t.Errorf("no object: %d %s %v", status, text, err)
	}
	do("GET", "/query", "", 405, "Method not allowed\n")
	do("POST", "/services", `{}`, 405, "Method not allowed\n")
	do("GET", "/health", "", 404, "there is no /health\n")

	// Tenants are separate. Registrations survive a restart of the process.
	other := strings.Replace(registration("node3", "tcp://"+loopback.Reserve(t), "", ""), `"default"`, `"team"`, 1)
	do("POST", "/register", other, 200, `{"instance_id":"node3","status":"registered successfully"}`+"\n")
	do("POST", "/query", query(`,"tenant_id":"team"`), 200, `{"instances":{"node3":`+none+`}}`+"\n")
	before := services(3, listed)
	x.Stop()
	x = harness.StartIndexer(t, data, x.NATS, "--conductor-listen", "127.0.0.1:0")
	at = x.WaitFor(`Mooncake's conductor is served" listen=(\S+)`)[1]
	harness.Eventually(t, "the registrations are there again", func() (bool, string) {
		_, text, err := harness.Request(at, "GET", "/services", "")
		return err == nil && text == before, text
	})
	do("POST", "/register", first, 200, good)
	found()

	// An unregistered instance holds no block.
	do("POST", "/unregister", `{"instance_id":"node3","dp_rank":0}`, 404, "service not found: node3|default|0\n")
	do("POST", "/unregister", `{"instance_id":"node3","tenant_id":"team","dp_rank":0}`, 200,
		`{"removed_instances":["node3|team|0"],"status":"unregistered successfully"}`+"\n")
	do("POST", "/unregister", `{"instance_id":"vllm-prefill-node1","dp_rank":1}`, 404,
		"service not found: vllm-prefill-node1|default|1\n")
	do("POST", "/unregister", `{"instance_id":"vllm-prefill-node1","dp_rank":0}`, 200,
		`{"removed_instances":["vllm-prefill-node1|default|0"],"status":"unregistered successfully"}`+"\n")
	harness.Eventually(t, "the instance is gone", func() (bool, string) {
		_, text, err := harness.Request(at, "POST", "/query", query(""))
		return err == nil && text == `{"instances":{"node2":`+none+`}}`+"\n", text
	})
}
