package integration

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// storeOf is a simulated master, with an indexer that has the address in its flags.
type storeOf struct {
	*harness.Indexer
	t      *testing.T
	master *mastersim.Master
	host   string
	port   string
}

func startStoreOf(t *testing.T) *storeOf {
	t.Helper()
	master, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(master.Stop)
	s := &storeOf{t: t, master: master}
	if s.host, s.port, err = net.SplitHostPort(master.Addr()); err != nil {
		t.Fatal(err)
	}
	s.Indexer = harness.StartIndexer(t, t.TempDir(), "", "--l3-master", s.host+":50051", "--l3-master-metrics-port",
		s.port)
	return s
}

// register registers a worker over HTTP.
func (s *storeOf) register(name, model, l3 string) (status int, text string) {
	s.t.Helper()
	engine := harness.StartSimEngine(s.t)
	status, text, err := harness.Request(s.HTTP, "POST", "/register", fmt.Sprintf(
		`{"instance_id":%q,"endpoint":%q,"model_name":%q,"block_size":%d,"l3":{"sglang_hicache_mooncake":%s}}`, name,
		engine.Endpoint(), model, harness.BlockSize, l3))
	if err != nil {
		s.t.Fatal(err)
	}
	return status, text
}

// until queries a prompt until the answer satisfies good.
func (s *storeOf) until(model string, prompt []uint32, what string, good func(*api.Answer) bool) *api.Answer {
	s.t.Helper()
	var a api.Answer
	var failure *api.Error
	harness.Eventually(s.t, what, func() (bool, string) {
		a, failure = s.Query(s.t, "--model", model, "--tokens", harness.CommaList(prompt))
		return failure == nil && good(&a), fmt.Sprintf("%+v, %v", a, failure)
	})
	return &a
}

const dynamoPublishes = `{"backend":"mooncake","page_size":16,"tp_size":2,"pp_size":1,"is_mla_model":true,"is_eagle":false,
	"tp_lcm_size":null,"should_split_heads":false,"extra_backend_tag":null,"key_prefix":"org-m","kv_events_endpoint":null,
	"tenant_id":"default"MORE}`

// TestStoreAsDynamoPublishes registers the records of Dynamo 1.6.1 and 1.7 workers unchanged. The index finds objects
// under the key_prefix, at the master of a flag. Unknown fields cause a single warning, and an unsupported tenant is
// named.
func TestStoreAsDynamoPublishes(t *testing.T) {
	t.Parallel()
	s := startStoreOf(t)
	prompt := harness.Tokens(900, 20*harness.BlockSize)
	pages := (&hicache.SGLang{PageSize: harness.BlockSize}).PageHashes(nil, prompt, hicache.Space{})
	for i, h := range pages {
		s.master.Put("org-m_" + h.String() + "__k")
		if i != 9 {
			s.master.Put("org-m_" + h.String() + "__indexer")
		}
	}
	config := func(more string) string { return strings.Replace(dynamoPublishes, "MORE", more, 1) }
	loads := func(n uint32, bound api.Bound) func(*api.Answer) bool {
		return func(a *api.Answer) bool {
			return a.L3.Status == api.L3OK && a.L3.FromStart == n && len(a.Workers) > 0 && a.Workers[0].L3 == n &&
				a.Workers[0].Bound == bound
		}
	}
	for _, rank := range []string{"plain", "plain-again"} {
		if status, text := s.register(rank, "mla", config(`,"of_next_year":{"a":1}`)); status != 201 {
			t.Fatalf("register: %d %s", status, text)
		}
	}
	s.until("mla", prompt, "an MLA model without a layout has an upper bound", loads(20, api.BoundStoreObjects))
	said := s.WaitFor(`unknown fields of a registration's l3 are ignored.*worker=plain/0 fields=(\S+)`)
	if said[1] != "of_next_year" {
		t.Errorf("the warning names %q", said[1])
	}

	// With the layout, a page without all objects ends the prefix.
	const layout = `,"hicache_object_layout":{"pools":[{"pool":"kv","suffixes":["__k"],"hit_policy":"all_pages"},
		{"pool":"indexer","suffixes":["__indexer"],"hit_policy":"all_pages"}],"key_prefix":"org-m","pp_size":1}`
	if status, text := s.register("hybrid", "dsa", config(layout)); status != 201 {
		t.Fatalf("register: %d %s", status, text)
	}
	s.until("dsa", prompt, "the layout's objects decide", func(a *api.Answer) bool {
		return a.L3.Status == api.L3OK && a.L3.FromStart == 0 // nine pages are less than 256 tokens
	})
	s.master.Put("org-m_" + pages[9].String() + "__indexer")
	s.until("dsa", prompt, "all objects of all pages are there", loads(20, ""))

	team := strings.Replace(config(""), `"default"`, `"team"`, 1)
	if status, text := s.register("tenant", "other", team); status != 201 {
		t.Fatalf("register: %d %s", status, text)
	}
	s.until("other", prompt, "another tenant", func(a *api.Answer) bool {
		return a.L3.Status == api.L3Unavailable && strings.Contains(a.L3.Reason, `tenant_id is "team"`)
	})
	for more, want := range map[string]string{
		`,"master_server_address":"k8s://ns/lease"`:    "not in k8s",
		`,"master_server_address":"redis://r:6379"`:    "not in redis",
		`,"page_sizes":1,"key_prefix":7`:               "given twice",
		`,"hicache_object_layout":{"pools":"kv"}`:      "pools is text, not a list",
		`,"hicache_object_layout":{"pools":[{"x":1}]}`: "has no suffixes",
	} {
		if status, text := s.register("wrong", "m", config(more)); status/100 != 4 || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s, want %s", more, status, text, want)
		}
	}
}

// TestStoreLearnedOfTheEngine: worker-shim --engine-http reads the objects of a page, and how much the engine loads
// ahead.
func TestStoreLearnedOfTheEngine(t *testing.T) {
	t.Parallel()
	s := startStoreOf(t)
	e := harness.StartSimEngine(t)
	layout := `{"enabled":true,"backend":"mooncake","page_size":16,"hicache_object_layout":{"pools":[{"pool":"kv",
		"suffixes":["__k"],"hit_policy":"all_pages"},{"pool":"swa","suffixes":["__swa"],"hit_policy":"trailing_pages",
		"trailing_pages":2}],"key_prefix":"org-m","is_mla_backend":true,"pp_rank":0,"pp_size":1}}`
	publisher, err := json.Marshal(fmt.Sprintf(`{"publisher":"zmq","endpoint":%q}`, e.Endpoint()))
	if err != nil {
		t.Fatal(err)
	}
	api0 := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/server_info":
			fmt.Fprintf(w, `{"version":"0.5.23","served_model_name":"org/m","page_size":16,"max_total_num_tokens":320,
				"kv_events_config":%s,"hicache_storage_backend":"mooncake","hicache_ratio":2.0,"hicache_size":0,
				"hicache_host_memory_mode":"cache"}`, publisher)
		case "/get_hicache_l3_cache_layout":
			fmt.Fprint(w, layout)
		default:
			http.NotFound(w, r)
		}
	}))
	defer api0.Close()
	file := harness.WriteWorkerStore(t, hicache.Config{SGLang: &hicache.SGLang{Backend: "mooncake",
		PageSize: harness.BlockSize, TPSize: 1, PPSize: 1, IsMLA: true}})
	shim := harness.Start(t, "worker-shim", "run", "--nats", "nats://"+s.NATS, "--engine-http", api0.URL, "--worker", "w1",
		"--engine", e.Endpoint(), "--l3-config", file, "--l3-master", s.host+":1", "--l3-master-metrics-port", s.port)
	shim.WaitFor(regexp.QuoteMeta("objects_listed=true") + `.*prefetch_capacity_limit=328`) // half of 41 pages
	prompt := harness.Tokens(950, 40*harness.BlockSize)
	for i, h := range (&hicache.SGLang{PageSize: harness.BlockSize}).PageHashes(nil, prompt, hicache.Space{}) {
		s.master.Put("org-m_" + h.String() + "__k")
		if i < 19 {
			s.master.Put("org-m_" + h.String() + "__swa")
		}
	}
	a := s.until("org/m", prompt, "the window and the limit decide", func(a *api.Answer) bool {
		return a.L3.Status == api.L3OK && len(a.Workers) == 1
	})
	if o := a.Workers[0]; o.L3 != 19 || o.L3Stop != string(hicache.BeyondGroups) || o.Bound != "" {
		t.Errorf("%+v", o)
	}
}

// TestStoreGroupsFromEvents checks that a configuration of vLLM's store without groups is registered with the groups in
// the engine's events.
func TestStoreGroupsFromEvents(t *testing.T) {
	t.Parallel()
	s := startStoreOf(t)
	e := harness.StartSimEngine(t)
	open := hicache.Config{VLLM: &hicache.VLLM{ModelName: "org/m", TPSize: 2, PPSize: 1, NumKVHead: 2,
		EngineVersion: "0.32.0"}}
	shim := harness.StartSimShim(t, e, s.NATS, "w1", "--l3-config", harness.WriteWorkerStore(t, open), "--l3-master",
		s.host+":50051", "--l3-master-metrics-port", s.port)
	prompt := harness.Tokens(970, 12*harness.BlockSize+1)
	whole := open.WithGroups([]hicache.Group{{Kind: hicache.Full}}, harness.BlockSize)
	named, err := whole.Prompt(prompt, "", "", harness.BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	s.master.Put(named.Lanes[0].Names(0, 9).Keys...)
	shim.WaitFor("the shared store is registered after the first event")
	harness.ServePrompt(t, e, prompt[:2*harness.BlockSize])
	shim.WaitFor(`registered with the groups of the engine's events.* groups=1`)
	s.until("m", prompt, "the store gets queries by the events", func(a *api.Answer) bool {
		return a.L3.Status == api.L3OK && len(a.Workers) == 1 && a.Workers[0].Total() == 2 && a.Workers[0].L3 == 7
	})
}
