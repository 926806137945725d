package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// TestGuesses runs two nodes and three workers without events. Both nodes guess the blocks of requests that were routed
// through a node, before and after the end of the request. So do later nodes. The removal of a worker removes the
// guesses.
func TestGuesses(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	start := func(name string, flags ...string) (*harness.Indexer, *client.Client) {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", append([]string{"serve", "--nats", nats,
			"--node-id", name, "--partitions", "4", "--http-listen", "127.0.0.1:0", "--guess-ttl", "10m"}, flags...)...)}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		c := harness.Ask(t, x.HTTP)
		return x, c
	}
	first, one := start("n1")
	_, two := start("n2")
	for _, w := range []string{"w1", "w2", "w3"} {
		if r := harness.Run(t, "indexer", "workers", "register", w, "--nats", nats, "--model", "m", "--block-size",
			fmt.Sprint(harness.BlockSize)); r.Code != 0 {
			t.Fatalf("%+v", r)
		}
	}
	ctx := harness.Context(t)
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	request := func(id string, blocks int) *api.SelectRequest {
		return &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt[:blocks*harness.BlockSize]},
			RequestID: id, Book: id != ""}
	}
	for _, c := range []*client.Client{one, two} {
		harness.Eventually(t, "three workers are registered", func() (bool, string) {
			s, err := c.Select(ctx, request("", 10))
			return err == nil && s.Candidates == 3 && s.Guessed == 0, fmt.Sprintf("%+v %v", s, err)
		})
	}
	a, err := two.Find(ctx, &api.Query{Model: "m", Tokens: prompt})
	if err != nil || len(a.Workers) != 0 || a.Reason != api.ReasonNotCached {
		t.Errorf("workers without events have no blocks: %+v, %v", a, err)
	}
	s, err := one.Select(ctx, request("r1", 8))
	if err != nil || !s.Booked {
		t.Fatal(s, err)
	}
	harness.Eventually(t, "the other node has the request", func() (bool, string) {
		err := two.PrefillComplete(ctx, "m", "r1") // otherwise other workers would be cheaper
		return err == nil, fmt.Sprint(err)
	})
	worker := s.Worker
	// A query has the guessed blocks; a query with a common prefix has the guessed prefix.
	guessed := func(who string, c *client.Client, blocks int, want uint32) {
		t.Helper()
		harness.Eventually(t, who+" guesses", func() (bool, string) {
			s, err := c.Select(ctx, request("", blocks))
			return err == nil && s.Worker == worker && s.Device == 0 && s.Guessed == want &&
				s.CachedTokens == uint64(want)*harness.BlockSize, fmt.Sprintf("%+v %v", s, err)
		})
		a, err := c.Find(ctx, &api.Query{Model: "m", Tokens: prompt[:blocks*harness.BlockSize]})
		if err != nil || len(a.Workers) != 1 || a.Workers[0].Instance != worker || a.Workers[0].Guessed != want ||
			a.Workers[0].Device != 0 || a.Reason != "" {
			t.Errorf("%s: %+v, %v", who, a, err)
		}
	}
	guessed("n1", one, 10, 8)
	guessed("n2", two, 10, 8)
	guessed("n2", two, 5, 5)
	_, three := start("n3")
	guessed("a new node", three, 10, 8)
	if err := two.Free(ctx, "m", "r1"); err != nil {
		t.Fatal(err)
	}
	guessed("n1, after the end", one, 10, 8)
	guessed("n2, after the end", two, 10, 8)
	_, four := start("n4")
	a, err = four.Find(ctx, &api.Query{Model: "m", Tokens: prompt}) // a ready node has the requests
	if err != nil || len(a.Workers) != 1 || a.Workers[0].Instance != worker || a.Workers[0].Guessed != 8 {
		t.Errorf("a new node after the end: %+v, %v; want 8 blocks of %v", a, err, worker)
	}

	// By hand.
	file := filepath.Join(t.TempDir(), "prompt.json")
	if err := os.WriteFile(file, []byte("["+harness.CommaList(prompt)+"]"), 0o600); err != nil {
		t.Fatal(err)
	}
	for words, want := range map[string]string{
		"select":                           "confirm 0 blocks on the device; the worker probably holds 8",
		"select --policy dynamo --explain": "GUESSED BLOCKS",
		"query":                            "GUESSED",
		"query --explain":                  string(worker) + "/0 probably holds 8 blocks",
	} {
		args := append(strings.Fields(words), "--nats", nats, "--model", "m", "--tokens-file", file)
		if r := harness.Run(t, "indexer", args...); r.Code != 0 || !strings.Contains(r.Stdout, want) {
			t.Errorf("%s: %+v, want %q", words, r, want)
		}
	}
	status, text, err := harness.Request(first.HTTP, "GET", "/metrics", "")
	if err != nil || status != 200 || !strings.Contains(text, `kvatlas_guessed_blocks{model="m"} 8`) {
		t.Errorf("%d %v: there is no kvatlas_guessed_blocks of 8 in the metrics", status, err)
	}

	if r := harness.Run(t, "indexer", "workers", "remove", string(worker), "--nats", nats); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	comes := func(what string, workers int) {
		t.Helper()
		for _, c := range []*client.Client{one, two} {
			harness.Eventually(t, what, func() (bool, string) {
				s, err := c.Select(ctx, request("", 10))
				return err == nil && s.Candidates == workers && s.Guessed == 0, fmt.Sprintf("%+v %v", s, err)
			})
		}
	}
	comes("the worker is gone", 2)
	if r := harness.Run(t, "indexer", "workers", "register", string(worker), "--nats", nats, "--model", "m",
		"--block-size", fmt.Sprint(harness.BlockSize)); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	comes("the worker is back with nothing", 3)
}

// TestPredictOnRoute runs a worker with events. The index guesses the blocks of routed requests, until the worker's own
// events are later or the engine ends, in answers and in choices.
func TestPredictOnRoute(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "", "--predict-ttl", "1m")
	c := harness.Ask(t, x.HTTP)
	engine := startRank(t, 0, harness.BlockSize)
	harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", engine.Endpoint(), "--replay", engine.Replay(),
		"--worker", "w", "--model", "m", "--block-size", fmt.Sprint(harness.BlockSize)).WaitFor("connected to the engine")
	harness.ServePrompt(t, engine, harness.Tokens(7, harness.BlockSize))
	x.WaitDepth(t, "m", harness.Tokens(7, harness.BlockSize), "w", 1)
	ctx := harness.Context(t)
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	send := func(id string) {
		t.Helper()
		harness.Eventually(t, "the worker can be chosen", func() (bool, string) {
			s, err := c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt}, RequestID: id,
				Book: true})
			return err == nil && s.Booked, fmt.Sprintf("%+v %v", s, err)
		})
	}
	guessed := func(what string, want uint32) {
		t.Helper()
		harness.Eventually(t, what, func() (bool, string) {
			a, err := c.Find(ctx, &api.Query{Model: "m", Tokens: prompt, Idle: true})
			return err == nil && len(a.Workers) == 1 && a.Workers[0].Guessed == want, fmt.Sprintf("%+v %v", a, err)
		})
	}
	send("r1")
	guessed("after the route", 10)
	// The first token has arrived without events of the blocks: they were not computed, or are evicted already.
	if err := c.PrefillComplete(ctx, "m", "r1"); err != nil {
		t.Fatal(err)
	}
	guessed("after later events", 0)
	send("r2")
	guessed("after another route", 10)
	engine.Stop()
	guessed("the engine has ended", 0)
	var status api.Status
	if err := harness.HTTPDo(x.HTTP, "GET", "/v1/status", nil, &status); err != nil || len(status.Guesses) != 1 ||
		status.Guesses[0].Dropped["refuted"] != 10 || status.Guesses[0].Dropped["removed"] != 10 {
		t.Errorf("%+v, %v; want 10 blocks refuted and 10 removed", status.Guesses, err)
	}
}

// TestGuessAsTheEngineEvicts runs a worker without events and with room for 16 blocks. The index guesses that the
// oldest blocks are evicted, from the end of a prompt.
func TestGuessAsTheEngineEvicts(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "", "--guess-policy", "lru", "--guess-ttl", "1s")
	c := harness.Ask(t, x.HTTP)
	if r := harness.Run(t, "indexer", "workers", "register", "w", "--nats", x.NATS, "--model", "m", "--block-size",
		fmt.Sprint(harness.BlockSize), "--total-kv-blocks", "16"); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	ctx := harness.Context(t)
	first, second := harness.Tokens(1, 10*harness.BlockSize), harness.Tokens(2, 10*harness.BlockSize)
	for i, prompt := range [][]uint32{first, second} {
		id := fmt.Sprint("r", i)
		harness.Eventually(t, "the worker can be chosen", func() (bool, string) {
			s, err := c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt}, RequestID: id,
				Book: true})
			return err == nil && s.Booked, fmt.Sprintf("%+v %v", s, err)
		})
		if err := c.Free(ctx, "m", id); err != nil {
			t.Fatal(err)
		}
	}
	for i, prompt := range [][]uint32{first, second} {
		want := []uint32{6, 10}[i]
		a, err := c.Find(ctx, &api.Query{Model: "m", Tokens: prompt})
		if err != nil || len(a.Workers) != 1 || a.Workers[0].Guessed != want {
			t.Errorf("prompt %d: %+v, %v; want %d blocks", i, a, err, want)
		}
	}
}

// TestGuessFlags checks that meaningless combinations of flags are refused.
func TestGuessFlags(t *testing.T) {
	t.Parallel()
	for _, bad := range [][]string{
		{"--guess-policy", "fifo", `"fifo" is none of ttl, lru, off`}, {"--guess-ttl", "-1s", "negative"},
		{"--guess-ttl", "0s", "--guess-policy off"}, {"--predict-ttl", "2m", "not from 0 (off) to 1m0s"},
		{"--guess-max-blocks", "-1", "2^28"}, {"--guess-prune-ratio", "1.5", "not above 0 and up to 1"},
	} {
		r := harness.Run(t, "indexer", "serve", "--data", t.TempDir(), bad[0], bad[1])
		if r.Code != 2 || !strings.Contains(r.Stderr, bad[0]) || !strings.Contains(r.Stderr, bad[2]) {
			t.Errorf("%v: %+v", bad, r)
		}
	}
}
