package compat

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// recorder is an indexer that records queries.
type recorder struct {
	Server
	queries []*api.Query
}

func (a *recorder) Find(_ context.Context, q *api.Query) (*api.Answer, error) {
	a.queries = append(a.queries, q)
	answer := &api.Answer{Model: q.Model, BlockSize: 2, Complete: true}
	if q.Hashed != nil {
		answer.Lookaheads = []uint32{0, 1}
	}
	return answer, nil
}

// register is a registration with the use of a shared store.
func register(l3 string) string {
	return `{"instance_id":1,"endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":16,"l3":` + l3 + `}`
}

// TestReadAsDynamoDoes compares statuses with the replies of ai-dynamo-runtime 1.6.1 to the same requests.
func TestReadAsDynamoDoes(t *testing.T) {
	counts := map[string]int{}
	x := &recorder{}
	h := web.NewMux()
	Register(h, Config{Server: x, Shims: NewShims(nil, nil, "one", Engines{}, nil),
		Ended: func(op, outcome string) { counts[op+" "+outcome]++ }})
	total := 0
	for _, c := range []struct {
		method, path, contentType, body string
		status                          int
		want                            string
	}{
		// unknown fields are ignored
		{"POST", "/query", api.JSON, `{"token_ids":[1],"model_name":"m","foo":1}`, 200, `"scores":{}`},
		{"POST", "/query", api.JSON, `{"Token_ids":[1],"model_name":"m"}`, 422, "missing field `token_ids`"},
		{"POST", "/query", api.JSON, `{"token_ids":[1],"token_ids":[1],"model_name":"m"}`, 422,
			"duplicate field `token_ids`"},
		{"POST", "/query", api.JSON, `{"token_ids":["1"],"model_name":"m"}`, 422,
			`token_ids[0] is \"1\", not an unsigned 32-bit number`},
		{"POST", "/query", api.JSON, `{"token_ids":[1.0],"model_name":"m"}`, 422, "token_ids[0] is 1.0"},
		{"POST", "/query", api.JSON, `{"token_ids":null,"model_name":"m"}`, 422, "token_ids"},
		{"POST", "/query", api.JSON, `{"token_ids":[1],"model_name":7}`, 422, "model_name is 7, not text"},
		{"POST", "/query", api.JSON, `{"token_ids":[1],"model_name":"m","lora_name":null}`, 200, `"scores":{}`},
		{"POST", "/query", api.JSON, `{"token_ids":[1],"model_name":"m","lora_name":"\ud800"}`, 400, "not UTF-8"},
		{"POST", "/query", api.JSON, "{\"token_ids\":[1],\"model_name\":\"m\",\"cache_salt\":\"\xff\"}", 400,
			"not UTF-8"},
		{"POST", "/query", api.JSON, ``, 400, "empty"},
		{"POST", "/query", api.JSON, `{"token_ids":[1]`, 400, "too early"},
		{"POST", "/query", api.JSON, strings.Repeat(" ", 9<<20), 413, "8 MiB"},
		{"POST", "/query", "application/json; charset=utf-8", `{"token_ids":[1],"model_name":"m"}`, 200, `"scores":{}`},
		{"POST", "/query", "APPLICATION/JSON", `{"token_ids":[1],"model_name":"m"}`, 200, `"scores":{}`},
		{"POST", "/query", "application/vnd.x+json", `{"token_ids":[1],"model_name":"m"}`, 200, `"scores":{}`},
		{"POST", "/query", "", `{"token_ids":[1],"model_name":"m"}`, 415, "Content-Type: application/json"},
		{"POST", "/query", "text/plain", `{"token_ids":[1],"model_name":"m"}`, 415, "Content-Type: application/json"},
		{"POST", "/register", "application/x-www-form-urlencoded", `{}`, 415, "Content-Type: application/json"},
		{"GET", "/query", "", "", 405, "/query supports POST"},
		{"POST", "/workers", api.JSON, "{}", 405, "/workers supports GET"},
		{"HEAD", "/workers", "", "", 200, ""},
		{"POST", "/query_by_hash", api.JSON, `{"block_hashes":[1],"model_name":"m","cache_salt":"x"}`, 400,
			"cache_salt is not accepted"},
		{"POST", "/unregister", api.JSON, `{"instance_id":77,"model_name":"m"}`, 404, "instance 77 not found"},
		{"POST", "/register", api.JSON,
			`{"instance_id":1,"endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":-1}`, 422,
			"block_size is -1"},
		{"POST", "/register", api.JSON, register(`"sglang_hicache_mooncake"`), 422,
			`l3: it is text, not an object`},
		{"POST", "/register", api.JSON, register(`{"sglang_hicache_mooncake":[]}`), 422,
			`l3: sglang_hicache_mooncake is a list, not an object`},
		{"POST", "/register", api.JSON, register(`{"sglang_hicache_mooncake":{"page_size":"x"}}`), 422,
			`l3: sglang_hicache_mooncake.page_size is text, not a whole number`},
		// Intended differences: hashes as text and unsigned hashes.
		{"POST", "/query_by_hash", api.JSON, `{"block_hashes":["18446744073709551615",-1],"model_name":"m"}`, 200,
			`"scores":{}`},
	} {
		r, w := httptest.NewRequest(c.method, c.path, strings.NewReader(c.body)), httptest.NewRecorder()
		if c.contentType != "" {
			r.Header.Set("Content-Type", c.contentType)
		}
		h.ServeHTTP(w, r)
		total++
		text := w.Body.String()
		if w.Code != c.status || !strings.Contains(text, c.want) || strings.Contains(text, "Go ") {
			t.Errorf("%s %s %q %.60q: %d %s, want %d %s", c.method, c.path, c.contentType, c.body, w.Code, text,
				c.status, c.want)
		}
		var failed struct {
			Error string
			Code  api.Code
		}
		if c.status >= 400 && (json.Unmarshal(w.Body.Bytes(), &failed) != nil || failed.Error == "" ||
			failed.Code == "") {
			t.Errorf("%s %s %.60q: %s", c.method, c.path, c.body, text)
		}
		if c.status == 405 && w.Header().Get("Allow") == "" {
			t.Errorf("%s %s: no Allow", c.method, c.path)
		}
	}
	for _, n := range counts {
		total -= n
	}
	if total != 0 {
		t.Errorf("%d requests are not counted: %v", total, counts)
	}
}

// TestMultimodalItems checks that a query includes the multimodal items of the blocks, for every hash mode of the
// model's workers.
func TestMultimodalItems(t *testing.T) {
	x := &recorder{}
	h := web.NewMux()
	Register(h, Config{Server: x})
	post := func(body string) *httptest.ResponseRecorder {
		r, w := httptest.NewRequest("POST", "/query", strings.NewReader(body)), httptest.NewRecorder()
		r.Header.Set("Content-Type", api.JSON)
		x.queries = nil
		h.ServeHTTP(w, r)
		return w
	}
	w := post(
		`{"model_name":"m","token_ids":[0,1,2,3,4],"block_mm_infos":[{"mm_objects":[{"mm_hash":42,"offsets":[[0,2]]}]},null]}`)
	if w.Code != http.StatusOK || len(x.queries) != 2 {
		t.Fatalf("%d %s; queries %v", w.Code, w.Body, x.queries)
	}
	q := x.queries[1]
	if len(q.Hashed) != 2 || len(q.Hashed[0].Hashes) != 2 || len(q.Hashed[1].Hashes) != 2 || q.Tokens != nil ||
		q.Check() != nil {
		t.Fatalf("%+v", q)
	}
	// The first hash is NVIDIA Dynamo's vector for the tokens [0, 1] with an item 42. The second is a block without
	// items.
	if want := (api.Hashes{6100948656312251355, 10731123482949079648}); !reflect.DeepEqual(q.Hashed[0].Hashes, want) {
		t.Errorf("%v, want %v", q.Hashed[0].Hashes, want)
	}
	hashed := func(objects string) uint64 {
		w := post(fmt.Sprintf(`{"model_name":"m","token_ids":[0,1],"block_mm_infos":[{"mm_objects":[%s]}]}`, objects))
		if w.Code != http.StatusOK || len(x.queries) != 2 {
			t.Fatalf("%s: %d %s", objects, w.Code, w.Body)
		}
		return x.queries[1].Hashed[0].Hashes[0]
	}
	for objects, want := range map[string]uint64{ // values of TestMediaBlocks in pkg/events
		`{"mm_hash":42,"offsets":[[0,1],[1,2]]}`:                            6100948656312251355,
		`{"mm_hash":42}`:                                                    6100948656312251355,
		`{"mm_hash":42,"offsets":"no pairs"}`:                               6100948656312251355,
		`{"mm_hash":42,"offsets":[[0,1]]},{"mm_hash":43,"offsets":[[1,2]]}`: 1598710929150674555,
		`{"mm_hash":42,"offsets":[]},{"mm_hash":43}`:                        1598710929150674555,
	} {
		if got := hashed(objects); got != want {
			t.Errorf("%s: %d, want %d", objects, got, want)
		}
	}
	if a, b := hashed(`{"mm_hash":42},{"mm_hash":43}`), hashed(`{"mm_hash":43},{"mm_hash":42}`); a == b {
		t.Errorf("two items in any order: %d", a)
	}
	for _, infos := range []string{`null`, `[]`, `[null,null]`, `[{"mm_objects":[]}]`} { // a prompt without items
		if w := post(fmt.Sprintf(`{"model_name":"m","token_ids":[0,1],"block_mm_infos":%s}`, infos)); w.Code != 200 ||
			len(x.queries) != 1 || x.queries[0].Tokens == nil {
			t.Errorf("%s: %d %s; queries %v", infos, w.Code, w.Body, x.queries)
		}
	}
	for _, infos := range []string{`7`, `[{"mm_objects":[{"mm_hash":"x"}]}]`, `[{"mm_objects":[{"mm_hash":-1}]}]`} {
		if w := post(fmt.Sprintf(`{"model_name":"m","token_ids":[0,1],"block_mm_infos":%s}`, infos)); w.Code != 422 ||
			!strings.Contains(w.Body.String(), "block_mm_infos is") {
			t.Errorf("%s: %d %s", infos, w.Code, w.Body)
		}
	}
}

// TestUnknownStoreFields checks that unknown fields of a newer engine cause a single warning for every worker, and no
// refusal.
func TestUnknownStoreFields(t *testing.T) {
	t.Parallel()
	var warned []string
	shims := NewShims(nil, nil, "one", Engines{}, logtest.New(func(l logtest.Line) {
		warned = append(warned, fmt.Sprint(l.Attrs["worker"], " ", l.Attrs["fields"]))
	}))
	body := register(`{"sglang_hicache_mooncake":{"backend":"mooncake","page_size":16,"tp_size":1,"pp_size":1,
		"of_next_year":{"a":1},"key_prefix":"m","kv_events_endpoint":null,"tenant_id":"default","another":[]}}`)
	r, err := read([]byte(body), "instance_id", "endpoint", "model_name", "block_size")
	if err != nil || r.L3.Check() != nil || *r.L3.SGLang.KeyPrefix != "m" {
		t.Fatalf("%+v, %v", r, err)
	}
	for _, key := range []events.RankKey{{Instance: "1"}, {Instance: "1", Rank: 1}, {Instance: "2"}, {Instance: "1"}} {
		shims.notePassed(key, r.passed)
	}
	shims.notePassed(events.RankKey{Instance: "3"}, nil)
	if want := []string{"1/0 of_next_year, another", "2/0 of_next_year, another"}; !slices.Equal(warned, want) {
		t.Errorf("%q, want %q", warned, want)
	}
}
