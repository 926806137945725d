package integration

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// TestStoreEvents tests the whole path of a store's event stream. A master publishes, worker-shim forwards the events,
// and the indexer answers from the set without queries to the master. After a gap, a restart or the end of the stream,
// the indexer queries the master again.
func TestStoreEvents(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	master, err := mastersim.Start(loopback.Reserve(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { master.Stop() }()
	address := master.Addr()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	config := hicache.SGLang{Backend: "mooncake", PageSize: harness.BlockSize, TPSize: 2, PPSize: 1,
		Master: hicache.Master{Address: host}}
	if config.MetricsPort, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	x := harness.StartIndexer(t, t.TempDir(), "", "--l3-hit-life", "1ns", "--l3-miss-life", "1ns",
		"--l3-config", harness.WriteStores(t, map[string]hicache.Config{"m": {SGLang: &config}}))
	e := harness.StartSimEngine(t)
	harness.StartSimShim(t, e, x.NATS, "w1")
	harness.ServePrompt(t, e, harness.Tokens(90000, harness.BlockSize))
	x.WaitDepth(t, "m", harness.Tokens(90000, harness.BlockSize), "w1", 1)

	const pages = 8
	old, prompt := harness.Tokens(500, pages*harness.BlockSize), harness.Tokens(7000, pages*harness.BlockSize)
	keys := func(prompt []uint32) hicache.PageKeys {
		return config.Keys(config.PageHashes(nil, prompt, hicache.Space{}))
	}
	until := func(what string, prompt []uint32, good func(api.L3) bool) {
		t.Helper()
		harness.Eventually(t, what, func() (bool, string) {
			a, failure := x.Query(t, "--model", "m", "--tokens", harness.CommaList(prompt))
			return failure == nil && good(a.L3), fmt.Sprintf("%+v, %v", a.L3, failure)
		})
	}
	holds := func(n uint32) func(api.L3) bool {
		return func(l api.L3) bool { return l.Status == api.L3OK && l.Total == n }
	}
	unanswered := func(l api.L3) bool { return l.Status != api.L3OK }
	silent := func(w http.ResponseWriter, _ []string) bool {
		http.Error(w, "not now", http.StatusInternalServerError)
		return true
	}

	master.Put(keys(old).Keys...)
	until("without a shim the master gets queries", old, holds(pages))
	endpoint, err := master.Publish(ctx, "tcp://"+loopback.Reserve(t))
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"run", "--source", "mooncake", "--engine", endpoint, "--master", address, "--nats", x.NATS,
		"--log-repeat", "0"}
	shim := harness.Start(t, "worker-shim", args...)
	if err := master.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	master.Fault(silent)
	master.Put(keys(prompt).Keys...)
	until("announced objects are in the set", prompt, holds(pages))
	until("missing objects are known from the list", harness.Tokens(20000, harness.BlockSize), holds(0))
	until("earlier objects need a query to the master", old, unanswered)
	prompt = harness.Tokens(8000, pages*harness.BlockSize)
	master.Put(keys(prompt).Keys...)
	until("objects after the list are in the set", prompt, holds(pages))
	master.Remove(keys(prompt).Keys[3*keys(prompt).PerPage])
	until("removed objects are not", prompt, holds(pages-1))

	master.Lose(1)
	master.Put(keys(prompt).Keys[3*keys(prompt).PerPage])
	shim.WaitFor("events of the store are missing")
	until("after a gap the master gets queries", prompt, unanswered)
	master.Fault(nil)
	until("the master's reply counts", prompt, holds(pages))
	master.Fault(silent)
	master.Put("something")
	until("then the events count again", harness.Tokens(30000, harness.BlockSize), holds(0))

	master.Stop()
	// A process that starts meanwhile has a copy of the closed socket until its exec.
	harness.Eventually(t, "the master runs again", func() (bool, string) {
		master, err = mastersim.Start(address)
		return err == nil, fmt.Sprint(err)
	})
	master.Fault(silent)
	if _, err := master.Publish(ctx, endpoint); err != nil {
		t.Fatal(err)
	}
	if err := master.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	master.Put("something")
	until("a restarted master is empty", prompt, holds(0))
	until("earlier objects are gone", old, holds(0))

	shim.Kill()
	until("without a shim the master gets queries again", prompt, unanswered)
	harness.Start(t, "worker-shim", args...)
	if err := master.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	master.Put(keys(prompt).Keys...)
	until("another shim goes on", prompt, holds(pages))
	if s := harness.Status(t, x.NATS); len(s.L3) != 1 || s.L3[0].Store != address || s.L3[0].Questions == 0 ||
		s.L3[0].Failed == 0 || s.L3[0].Set == nil || s.L3[0].Set.Gaps < 2 || s.L3[0].Set.Answered == 0 {
		t.Errorf("status: %+v", s)
	}

	for _, c := range []struct{ args, says string }{
		{"--engine x --master m:9003", "--engine, the master's event endpoint"},
		{"--engine tcp://127.0.0.1:1", `--master "" is not HOST:PORT`},
		{"--engine tcp://127.0.0.1:1 --master m:9003 --worker w", "--worker is not for --source mooncake"},
	} {
		if r := harness.Run(t, "worker-shim", append([]string{"run", "--source", "mooncake"},
			strings.Fields(c.args)...)...); r.Code != 2 || !strings.Contains(r.Stderr, c.says) {
			t.Errorf("%s ended with %d and %s", c.args, r.Code, r.Stderr)
		}
	}
}
