package integration

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/pyenv"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// workerL3File writes a file for worker-shim's --l3-config.
func workerL3File(t testing.TB, c hicache.Config) string {
	t.Helper()
	data, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "l3.json")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// putPages puts pages [from, to) of a prompt into the folder of SGLang's file backend.
func putPages(t testing.TB, c *hicache.SGLang, prompt []uint32, from, to int) {
	t.Helper()
	keys := c.FileKeys(c.PageHashes(nil, prompt, hicache.Space{}))
	for _, key := range keys.Keys[from*keys.PerPage : to*keys.PerPage] {
		if err := os.WriteFile(filepath.Join(c.Directory, key+".bin"), []byte("page"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRegisteredStore: what workers register with their leases, through their shims and over HTTP, is how the store is asked, and each worker
// is credited by what it registered itself. Registrations that contradict each other, or the index, are named in the answer until they are gone, and
// an indexer's own file stands over them.
func TestRegisteredStore(t *testing.T) {
	folder := t.TempDir()
	of := func(change func(*hicache.SGLang)) hicache.Config {
		c := hicache.SGLang{Backend: "file", PageSize: blockSize, TPSize: 2, PPSize: 1, ModelName: "org/m", Directory: folder, PrefetchThreshold: 4 * blockSize}
		change(&c)
		return hicache.Config{SGLang: &c}
	}
	plain := of(func(*hicache.SGLang) {})
	x := startIndexer(t, t.TempDir(), "")
	engines := []string{"w1", "small", "none"}
	prompt := tokens(500, 20*blockSize)
	putPages(t, plain.SGLang, prompt, 0, 12)
	for _, name := range engines {
		e := simEngine(t)
		var args []string
		switch name {
		case "w1":
			args = append(args, "--l3-config", workerL3File(t, plain))
		case "small":
			args = append(args, "--l3-config", workerL3File(t, of(func(c *hicache.SGLang) { c.PrefetchCapacity = 5 * blockSize })))
		}
		shimOf(t, e, x.nats, name, args...)
		serve(t, e, prompt[:2*blockSize])
		x.waitDepth(t, "m", prompt, name, 2)
	}
	until := func(what string, good func(*api.Answer) bool) api.Answer {
		t.Helper()
		var a api.Answer
		var failure *api.Error
		for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
			if a, failure = x.query(t, "--model", "m", "--tokens", words(prompt)); failure == nil && good(&a) {
				return a
			}
		}
		t.Fatalf("%s; the last answer: %+v, %v", what, a, failure)
		return a
	}
	credit := func(a *api.Answer) string {
		var list []string
		for _, o := range a.Workers {
			list = append(list, fmt.Sprintf("%s %d+%d %s", o.Instance, o.Total(), o.L3, o.L3Stop))
		}
		return strings.Join(list, ", ")
	}
	const all = "w1 2+10 not_in_store, small 2+5 capacity, none 2+0 no_store"
	until("all three are credited with what they registered", func(a *api.Answer) bool { return a.L3.Status == api.L3OK && credit(a) == all })
	if l := leased(t, x, "w1", true).Lease; l.L3 != plain.String() {
		t.Errorf("the list of workers says %q of the store", l.L3)
	}

	// A fourth, registered over HTTP, contradicts the others.
	e := simEngine(t)
	body := func(c hicache.Config) string {
		text, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf(`{"instance_id":"web","endpoint":%q,"model_name":"m","block_size":%d,"l3":%s}`, e.Endpoint(), blockSize, text)
	}
	if status, text, err := call(x.http, "POST", "/register", body(of(func(c *hicache.SGLang) { c.TPSize = 0 }))); err != nil || status != 400 || !strings.Contains(text, "tp_size") {
		t.Errorf("a registration that makes no sense: %d %s %v", status, text, err)
	}
	if status, text, err := call(x.http, "POST", "/register", body(of(func(c *hicache.SGLang) { c.TPSize = 4 }))); err != nil || status != 201 {
		t.Fatalf("register: %d %s %v", status, text, err)
	}
	a := until("a contradiction is a mismatch", func(a *api.Answer) bool { return a.L3.Status == api.L3Mismatch })
	if !strings.Contains(a.L3.Reason, "tp_size is 2 for small/0 and 4 for web/0") || a.L3.Total != 0 || len(a.Workers) != 3 || a.Workers[0].L3 != 0 || a.Workers[0].Device != 2 {
		t.Errorf("the mismatch: %+v", a)
	}
	if status, text, err := call(x.http, "POST", "/unregister", `{"instance_id":"web","model_name":"m"}`); err != nil || status != 200 {
		t.Fatalf("unregister: %d %s %v", status, text, err)
	}
	until("it has gone", func(a *api.Answer) bool { return a.L3.Status == api.L3OK && credit(a) == all })

	// A worker whose pages are not the index's blocks, until its lease has expired.
	e = simEngine(t)
	shim := shimOf(t, e, x.nats, "wide", "--lease", "2s", "--l3-config", workerL3File(t, of(func(c *hicache.SGLang) { c.PageSize = 64 })))
	shim.waitFor("the store's pages have 64 tokens, the index's blocks 16")
	a = until("other pages are a mismatch", func(a *api.Answer) bool { return a.L3.Status == api.L3Mismatch })
	if !strings.Contains(a.L3.Reason, "page_size is") || !strings.Contains(a.L3.Reason, "64 for wide/0") {
		t.Errorf("the mismatch: %+v", a.L3)
	}
	shim.kill()
	until("its lease has expired", func(a *api.Answer) bool { return a.L3.Status == api.L3OK && credit(a) == all })

	// The indexer's own word stands over what is registered; without a store for the model nobody is credited.
	second := start(t, "indexer", "serve", "--nats", "nats://"+x.nats, "--http-listen", "127.0.0.1:0", "--node-id", "second",
		"--l3-config", l3File(t, map[string]hicache.Config{"m": of(func(c *hicache.SGLang) { c.PageSize = 2 * blockSize })}))
	web := second.waitFor(`HTTP is served" listen=(\S+)`)[1]
	second.waitFor("msg=ready")
	status, text, err := call(web, "POST", "/v1/find", `{"model":"m","tokens":`+tokenList(prompt)+`}`)
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		t.Fatal(err)
	}
	if err != nil || status != 200 || a.L3.Status != api.L3Mismatch || !strings.Contains(a.L3.Reason, "pages have 32 tokens, the index's blocks 16") {
		t.Errorf("an indexer's own file: %d %s %v", status, text, err)
	}

	for path, want := range map[string]string{"/nonexistent/file": "/nonexistent/file", workerL3File(t, of(func(c *hicache.SGLang) { c.Backend = "hf3fs" })): `backend "hf3fs"`} {
		r := run(t, "worker-shim", "run", "--engine", "tcp://127.0.0.1:1", "--instance", "w", "--model", "m", "--block-size", "16", "--l3-config", path)
		if r.code != 2 || !strings.Contains(r.stderr, want) {
			t.Errorf("%s: %+v", path, r)
		}
	}
}

// TestVLLMStoreInAnswers: blocks that vLLM's connector would have put into a real Mooncake master are found by their digests, which the node makes
// of a query's tokens as the workers registered; where they cannot be made the answer says why.
func TestVLLMStoreInAnswers(t *testing.T) {
	real := pyenv.StartMooncake(t)
	real.StartClient()
	host, port, err := net.SplitHostPort(real.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	of := func(change func(*hicache.VLLM)) hicache.Config {
		v := hicache.VLLM{ModelName: "org/m", TPSize: 2, PPSize: 1, NumKVHead: 2, Groups: []hicache.Group{{Kind: hicache.Full, BlockSize: blockSize}},
			HashBlockSize: blockSize, SchedulerBlockSize: blockSize, EngineVersion: "0.32.0", Master: hicache.Master{Address: host + ":1", MetricsPort: metrics}}
		change(&v)
		return hicache.Config{VLLM: &v}
	}
	plain := of(func(*hicache.VLLM) {})
	prompt := tokens(700, 12*blockSize+3)
	p, err := plain.Prompt(prompt, "", "", blockSize)
	if err != nil {
		t.Fatal(err)
	}
	names := p.Lanes[0].Names()
	real.Put(append(names(0, 8).Keys, names(9, 12).Keys...)...)

	x := startIndexer(t, t.TempDir(), "")
	e, ahead := simEngine(t), simEngine(t)
	shimOf(t, e, x.nats, "w1", "--l3-config", workerL3File(t, plain))
	shimOf(t, ahead, x.nats, "w2", "--l3-config", workerL3File(t, plain))
	serve(t, e, prompt[:2*blockSize])
	serve(t, ahead, prompt[:10*blockSize])
	x.waitDepth(t, "m", prompt, "w1", 2)
	a := x.waitDepth(t, "m", prompt, "w2", 10)
	if fmt.Sprint(a.L3.Ranges) != "[[0 8] [9 12]]" || a.L3.Status != api.L3OK || a.L3.FromStart != 8 || len(a.Workers) != 2 {
		t.Fatalf("the store: %+v", a)
	}
	for _, o := range a.Workers {
		if want := map[string]string{"w1": "6 not_in_store", "w2": "0 gap"}[string(o.Instance)]; fmt.Sprintf("%d %s", o.L3, o.L3Stop) != want {
			t.Errorf("%s would load %d, %s; want %s", o.Instance, o.L3, o.L3Stop, want)
		}
	}
	for _, c := range []struct {
		args, want string
	}{
		{"--hashes 5", "made from tokens"},
		{"--lora x --tokens " + words(prompt), "path of a LoRA adapter"},
	} {
		if a, failure := x.query(t, append([]string{"--model", "m"}, strings.Fields(c.args)...)...); failure != nil || a.L3.Status != api.L3Unavailable || !strings.Contains(a.L3.Reason, c.want) {
			t.Errorf("%.20s: %+v, %v", c.args, a.L3, failure)
		}
	}
	if a, failure := x.query(t, "--model", "m", "--cache-salt", "other", "--tokens", words(prompt)); failure != nil || a.L3.Status != api.L3OK || a.L3.Total != 0 {
		t.Errorf("another tenant's: %+v, %v", a.L3, failure)
	}
	second := start(t, "indexer", "serve", "--nats", "nats://"+x.nats, "--http-listen", "127.0.0.1:0", "--node-id", "second",
		"--l3-config", l3File(t, map[string]hicache.Config{"m": of(func(v *hicache.VLLM) { v.EngineVersion = "0.28.1" })}))
	web := second.waitFor(`HTTP is served" listen=(\S+)`)[1]
	second.waitFor("msg=ready")
	status, text, err := call(web, "POST", "/v1/find", `{"model":"m","tokens":`+tokenList(prompt)+`}`)
	if err != nil || status != 200 || !strings.Contains(text, `"status":"unavailable"`) || !strings.Contains(text, "random in each process") {
		t.Errorf("a seed that nobody knows: %d %s %v", status, text, err)
	}
}
