package integration

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/loopback"
	"github.com/kvatlas/kvatlas/internal/mastersim"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// TestStoreEvents goes the whole way of a store's event stream: a master publishes, worker-shim passes it on, the indexer answers from the set
// even where the master answers no question, and asks the master again where the stream has lost something, begun anew or ended.
func TestStoreEvents(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	defer cancel()
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
	config := hicache.SGLang{Backend: "mooncake", PageSize: blockSize, TPSize: 2, PPSize: 1, Master: hicache.Master{Address: host}}
	if config.MetricsPort, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	x := startIndexer(t, t.TempDir(), "", "--l3-hit-life", "1ns", "--l3-miss-life", "1ns",
		"--l3-config", l3File(t, map[string]hicache.Config{"m": {SGLang: &config}}))
	e := simEngine(t)
	shimOf(t, e, x.nats, "w1")
	serve(t, e, tokens(90000, blockSize))
	x.waitDepth(t, "m", tokens(90000, blockSize), "w1", 1)

	const pages = 8
	old, prompt := tokens(500, pages*blockSize), tokens(7000, pages*blockSize)
	keys := func(prompt []uint32) hicache.PageKeys {
		return config.Keys(config.PageHashes(nil, prompt, hicache.Space{}))
	}
	until := func(what string, prompt []uint32, good func(api.L3) bool) {
		t.Helper()
		var a api.Answer
		for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			var failure *api.Error
			if a, failure = x.query(t, "--model", "m", "--tokens", words(prompt)); failure == nil && good(a.L3) {
				return
			}
		}
		t.Fatalf("%s; the last answer: %+v", what, a.L3)
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
	until("without a shim the master is asked", old, holds(pages))
	endpoint, err := master.Publish(ctx, "tcp://"+loopback.Reserve(t))
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"run", "--source", "mooncake", "--engine", endpoint, "--master", address, "--nats", x.nats, "--log-repeat", "0"}
	shim := start(t, "worker-shim", args...)
	if err := master.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	master.Fault(silent)
	master.Put(keys(prompt).Keys...)
	until("what is announced is known from the events", prompt, holds(pages))
	until("what was never there is known from the list", tokens(20000, blockSize), holds(0))
	until("of what was there before the master is asked", old, unanswered)
	prompt = tokens(8000, pages*blockSize)
	master.Put(keys(prompt).Keys...)
	until("so is what comes after the list", prompt, holds(pages))
	master.Remove(keys(prompt).Keys[3*keys(prompt).PerPage])
	until("and what is removed", prompt, holds(pages-1))

	master.Lose(1)
	master.Put(keys(prompt).Keys[3*keys(prompt).PerPage])
	shim.waitFor("events of the store are missing")
	until("after a gap the master is asked", prompt, unanswered)
	master.Fault(nil)
	until("and says what is so", prompt, holds(pages))
	master.Fault(silent)
	master.Put("something")
	until("then the events count again", tokens(30000, blockSize), holds(0))

	master.Stop()
	if master, err = mastersim.Start(address); err != nil {
		t.Fatal(err)
	}
	master.Fault(silent)
	if _, err := master.Publish(ctx, endpoint); err != nil {
		t.Fatal(err)
	}
	if err := master.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	master.Put("something")
	until("a master that began anew has nothing", prompt, holds(0))
	until("nor what was there long ago", old, holds(0))

	shim.kill()
	until("without a shim the master is asked again", prompt, unanswered)
	start(t, "worker-shim", args...)
	if err := master.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	master.Put(keys(prompt).Keys...)
	until("another shim goes on", prompt, holds(pages))
	var s api.Status
	if r := run(t, "indexer", "status", "--json", "--nats", x.nats); r.code != 0 || json.Unmarshal([]byte(r.stdout), &s) != nil || len(s.L3) != 1 || s.L3[0].Store != address || s.L3[0].Questions == 0 || s.L3[0].Failed == 0 || s.L3[0].Set == nil || s.L3[0].Set.Gaps < 2 || s.L3[0].Set.Answered == 0 {
		t.Errorf("status: %+v, %s", r, r.stdout)
	}

	for _, c := range []struct{ args, says string }{
		{"--engine x --master m:9003", "--engine, the master's event endpoint"},
		{"--engine tcp://127.0.0.1:1", `--master "" is not HOST:PORT`},
		{"--engine tcp://127.0.0.1:1 --master m:9003 --instance w", "--instance is not for --source mooncake"},
	} {
		if r := run(t, "worker-shim", append([]string{"run", "--source", "mooncake"}, strings.Fields(c.args)...)...); r.code != 2 || !strings.Contains(r.stderr, c.says) {
			t.Errorf("%s ended with %d and said %s", c.args, r.code, r.stderr)
		}
	}
}
