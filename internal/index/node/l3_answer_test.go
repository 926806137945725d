package node

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// TestAnswersHaveTheStoresBlocks checks the promised fields of the shared store: ranges, total, each rank's load,
// age, status and reason, for various states of the store. The rest of the answer equals the answer without the store,
// and arrives in time.
func TestAnswersHaveTheStoresBlocks(t *testing.T) {
	const blocks = 64
	x := newL3Node(t, 16*blocks, 2, func(w int) int { return 8 + 16*w }, nil)
	page := map[string]int{} // by object
	config := x.config
	config.Backend = "mooncake"
	keys := config.Keys(config.PageHashes(nil, x.prompt, hicache.Space{}))
	for i, key := range keys.Keys {
		page[key] = i / keys.PerPage
	}
	// The store has pages [0,40) and [50,60). Its responses depend on the case.
	there := func(p int) bool { return p < 40 || 50 <= p && p < 60 }
	var behave atomic.Value
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			fmt.Fprint(w,
				`{"status":"ok","role":"leader","ha_state":"serving","service_ready":true,"leader_address":null,"view_version":null}`)
			return
		}
		data := map[string]any{}
		for _, key := range strings.Split(r.URL.Query().Get("keys"), ",") {
			data[key] = map[string]bool{"ok": there(page[key])}
		}
		switch behave.Load() {
		case "slow":
			<-release
		case "half":
			for key := range data {
				if page[key] >= 30 {
					delete(data, key)
				}
			}
		case "lies":
			fmt.Fprint(w, `{"success":true,"data":[1,2,3]}`)
			return
		case "fails":
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		json.NewEncoder(w).Encode(map[string]any{"success": true, "data": data})
	}))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(release) })
	host, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	config.Master = hicache.Master{Address: host + ":1", MetricsPort: number}
	dead := config
	dead.MetricsPort = 1
	wide := config
	wide.PageSize = 32
	var now atomic.Int64 // in milliseconds
	fresh := func() {    // clears the cache
		x.Node.l3 = newL3(L3Config{
			Models: map[string]hicache.Config{"m": {SGLang: &config}}, Timeout: patience, Check: patience,
			Cache: hicache.CacheConfig{HitLife: time.Hour, MissLife: time.Hour, Patience: patience,
				Now: func() time.Time { return time.UnixMilli(1e12 + now.Load()) }},
		})
		x.l3.watch(x.ctx)
	}
	ask := func(q api.Query) (*api.Answer, time.Duration) {
		t.Helper()
		q.Model, q.Tokens = "m", x.prompt
		begun := time.Now()
		a, err := x.Find(x.ctx, &q)
		if err != nil {
			t.Fatal(err)
		}
		return a, time.Since(begun)
	}
	plain, _ := ask(api.Query{L3: api.L3Off})
	if plain.L3.Status != api.L3NotConfigured || plain.L3.Reason == "" || len(plain.Workers) != 2 {
		t.Fatalf("%+v", plain)
	}

	type want struct {
		behave  string
		models  hicache.SGLang
		timeout uint32
		status  api.L3Status
		reason  string
		ranges  string
		loads   string // of the worker with 24 blocks, then of the one with 8
	}
	for _, c := range []want{
		{"", config, 0, api.L3OK, "", "[[0 40] [50 60]]", "16 not_in_store, 32 not_in_store"},
		{"half", config, 0, api.L3Partial, "", "[[0 30]]", "0 below_threshold, 22 not_known"},
		{"slow", config, 30, api.L3Unavailable, "the store did not answer within 30ms", "[]",
			"0 not_known, 0 not_known"},
		{"lies", config, 0, api.L3Unavailable, "invalid reply", "[]", "0 not_known, 0 not_known"},
		{"fails", config, 0, api.L3Unavailable, "500", "[]", "0 not_known, 0 not_known"},
		{"", dead, 0, api.L3Unavailable, "refused", "[]", "0 not_known, 0 not_known"},
		{"", wide, 0, api.L3Mismatch, "the store's pages have 32 tokens, the index's blocks 16", "[]", "0 , 0 "},
	} {
		behave.Store(c.behave)
		fresh()
		x.l3.models["m"] = hicache.ForAll(hicache.Config{SGLang: &c.models})
		a, took := ask(api.Query{L3TimeoutMS: c.timeout, L3: api.L3All})
		var loads []string
		for _, o := range a.Workers {
			loads = append(loads, fmt.Sprint(o.L3, " ", o.L3Stop))
		}
		total := uint32(0)
		for _, r := range a.L3.Ranges {
			total += r[1] - r[0]
		}
		if a.L3.Status != c.status || !strings.Contains(a.L3.Reason, c.reason) ||
			(a.L3.Reason == "") != (c.status == api.L3OK) || fmt.Sprint(a.L3.Ranges) != c.ranges ||
			a.L3.Total != total || strings.Join(loads, ", ") != c.loads {
			t.Errorf("%+v:\n%+v, the workers load %q", c, a.L3, loads)
		}
		if c.timeout > 0 && took > patience/2 {
			t.Errorf("%+v: the answer took %v", c, took)
		}
		a.L3 = plain.L3
		for i := range a.Workers {
			a.Workers[i].L3, a.Workers[i].L3Stop = 0, ""
		}
		if !reflect.DeepEqual(a, plain) {
			t.Errorf("%+v: without the store's part the answer is\n%+v, want\n%+v", c, a, plain)
		}
	}
	if a, _ := func() (*api.Answer, time.Duration) {
		behave.Store("half")
		fresh()
		return ask(api.Query{L3: api.L3All})
	}(); fmt.Sprint(a.L3.Unknown) != "[[30 64]]" {
		t.Errorf("blocks %v are unknown", a.L3.Unknown)
	}

	// A cached response grows old, and the answer has its age.
	behave.Store("")
	fresh()
	ask(api.Query{})
	now.Add(1500)
	if a, _ := ask(api.Query{}); a.L3.AgeMS != 1500 || a.L3.Status != api.L3OK {
		t.Errorf("after 1.5 s: %+v", a.L3)
	}
	// With api.L3Beyond, only blocks that no worker holds.
	if a, _ := ask(api.Query{L3: api.L3Beyond}); a.L3.Ranges[0][0] != 24 || a.Workers[0].L3 != 16 ||
		a.L3.Status != api.L3OK {
		t.Errorf("beyond: %+v", a)
	}
	if l := newL3(L3Config{}); l.cfg.Timeout != 20*time.Millisecond {
		t.Errorf("without a timeout, an answer waits for %v", l.cfg.Timeout)
	}
	x.Node.l3 = newL3(L3Config{})
	if a, _ := ask(api.Query{}); a.L3.Status != api.L3NotConfigured || !strings.Contains(a.L3.Reason, "registered") {
		t.Errorf("without a registered store: %+v", a.L3)
	}
}
