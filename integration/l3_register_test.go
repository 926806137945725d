package integration

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// TestRegisteredStore checks registrations of a store with leases, through shims and over HTTP. They determine the
// queries to the store, and every worker is credited by its own registration. Answers name registrations that
// contradict each other or the index, until the registrations are gone. An indexer's own file has priority.
func TestRegisteredStore(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	of := func(change func(*hicache.SGLang)) hicache.Config {
		c := hicache.SGLang{Backend: "file", PageSize: harness.BlockSize, TPSize: 2, PPSize: 1, ModelName: "org/m",
			Directory: folder, PrefetchThreshold: 4 * harness.BlockSize}
		change(&c)
		return hicache.Config{SGLang: &c}
	}
	plain := of(func(*hicache.SGLang) {})
	x := harness.StartIndexer(t, t.TempDir(), "", "--l3-folder", folder)
	engines := []string{"w1", "small", "none"}
	prompt := harness.Tokens(500, 20*harness.BlockSize)
	harness.PutPages(t, plain.SGLang, prompt, 0, 12)
	for _, name := range engines {
		e := harness.StartSimEngine(t)
		var args []string
		switch name {
		case "w1":
			args = append(args, "--l3-config", harness.WriteWorkerStore(t, plain))
		case "small":
			args = append(args, "--l3-config",
				harness.WriteWorkerStore(t, of(func(c *hicache.SGLang) { c.PrefetchCapacity = 5 * harness.BlockSize })))
		}
		harness.StartSimShim(t, e, x.NATS, name, args...)
		harness.ServePrompt(t, e, prompt[:2*harness.BlockSize])
		x.WaitDepth(t, "m", prompt, name, 2)
	}
	until := func(what string, good func(*api.Answer) bool) api.Answer {
		t.Helper()
		var a api.Answer
		var failure *api.Error
		harness.Eventually(t, what, func() (bool, string) {
			a, failure = x.Query(t, "--model", "m", "--tokens", harness.CommaList(prompt))
			return failure == nil && good(&a), fmt.Sprintf("%+v, %v", a, failure)
		})
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
	until("all three are credited by their registrations",
		func(a *api.Answer) bool { return a.L3.Status == api.L3OK && credit(a) == all })
	if l := harness.WaitLease(t, x, "w1", true).Lease; l.L3 != plain.String() {
		t.Errorf("the list of workers has the store state %q", l.L3)
	}

	// A fourth registration over HTTP contradicts the other registrations.
	e := harness.StartSimEngine(t)
	body := func(c hicache.Config) string {
		text, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf(`{"instance_id":"web","endpoint":%q,"model_name":"m","block_size":%d,"l3":%s}`, e.Endpoint(),
			harness.BlockSize, text)
	}
	if status, text, err := harness.Request(x.HTTP, "POST", "/register",
		body(of(func(c *hicache.SGLang) { c.TPSize = 0 }))); err != nil || status != 400 ||
		!strings.Contains(text, "tp_size") {
		t.Errorf("an invalid registration: %d %s %v", status, text, err)
	}
	groups := strings.Replace(body(plain), "{", `{"kv_groups":"full,swa",`, 1)
	if status, text, err := harness.Request(x.HTTP, "POST", "/register", groups); err != nil || status != 400 ||
		!strings.Contains(text, "swa:1024") {
		t.Errorf("invalid groups: %d %s %v", status, text, err)
	}
	if status, text, err := harness.Request(x.HTTP, "POST", "/register",
		body(of(func(c *hicache.SGLang) { c.TPSize = 4 }))); err != nil || status != 201 {
		t.Fatalf("register: %d %s %v", status, text, err)
	}
	a := until("a contradiction is a mismatch", func(a *api.Answer) bool { return a.L3.Status == api.L3Mismatch })
	if !strings.Contains(a.L3.Reason, "tp_size is 2 for small/0 and 4 for web/0") || a.L3.Total != 0 ||
		len(a.Workers) != 3 || a.Workers[0].L3 != 0 || a.Workers[0].Device != 2 {
		t.Errorf("the mismatch: %+v", a)
	}
	if status, text, err := harness.Request(x.HTTP, "POST", "/unregister",
		`{"instance_id":"web","model_name":"m"}`); err != nil || status != 200 {
		t.Fatalf("unregister: %d %s %v", status, text, err)
	}
	until("it has gone", func(a *api.Answer) bool { return a.L3.Status == api.L3OK && credit(a) == all })

	// A worker with other pages than the index's blocks, until the lease has expired.
	e = harness.StartSimEngine(t)
	shim := harness.StartSimShim(t, e, x.NATS, "wide", "--lease", "2s", "--l3-config",
		harness.WriteWorkerStore(t, of(func(c *hicache.SGLang) { c.PageSize = 64 })))
	shim.WaitFor("the store's pages have 64 tokens, the index's blocks 16")
	a = until("other pages are a mismatch", func(a *api.Answer) bool { return a.L3.Status == api.L3Mismatch })
	if !strings.Contains(a.L3.Reason, "page_size is") || !strings.Contains(a.L3.Reason, "64 for wide/0") {
		t.Errorf("the mismatch: %+v", a.L3)
	}
	shim.Kill()
	until("the lease has expired", func(a *api.Answer) bool { return a.L3.Status == api.L3OK && credit(a) == all })

	// The indexer's own file has priority over registrations; without a store for the model no worker is credited.
	second := harness.Start(t, "indexer", "serve", "--nats", "nats://"+x.NATS, "--http-listen", "127.0.0.1:0",
		"--node-id", "second",
		"--l3-config", harness.WriteStores(t,
			map[string]hicache.Config{"m": of(func(c *hicache.SGLang) { c.PageSize = 2 * harness.BlockSize })}))
	web := second.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	second.WaitFor("msg=ready")
	status, text, err := harness.Request(web, "POST", "/v1/find", `{"model":"m","tokens":`+harness.JSONList(prompt)+`}`)
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		t.Fatal(err)
	}
	if err != nil || status != 200 || a.L3.Status != api.L3Mismatch ||
		!strings.Contains(a.L3.Reason, "pages have 32 tokens, the index's blocks 16") {
		t.Errorf("an indexer's own file: %d %s %v", status, text, err)
	}

	for path, want := range map[string]string{"/nonexistent/file": "/nonexistent/file",
		harness.WriteWorkerStore(t, of(func(c *hicache.SGLang) { c.Backend = "hf3fs" })): `backend "hf3fs"`} {
		r := harness.Run(t, "worker-shim", "run", "--engine", "tcp://127.0.0.1:1", "--worker", "w", "--model", "m",
			"--block-size", "16", "--l3-config", path)
		if r.Code != 2 || !strings.Contains(r.Stderr, want) {
			t.Errorf("%s: %+v", path, r)
		}
	}
}
