package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// startRouting starts indexer nodes with constants of routing.
func startRouting(t *testing.T, nats string, constants string, names ...string) (nodes []*harness.Indexer) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "routing.yaml")
	if err := os.WriteFile(file, []byte(constants), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			name, "--partitions", "2", "--http-listen", "127.0.0.1:0", "--routing-config", file)}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		nodes = append(nodes, x)
	}
	return nodes
}

// register registers a worker without events.
func register(t *testing.T, x *harness.Indexer, worker, more string) {
	t.Helper()
	status, text, err := harness.Request(x.HTTP, "POST", "/v1/workers", fmt.Sprintf(
		`{"instance":%q,"model":"m","block_size":%d,"events":"none"%s}`, worker, harness.BlockSize, more))
	if err != nil || status != 200 {
		t.Fatal(status, text, err)
	}
}

// TestSelectDisaggregated chooses a decode and a prefill worker, over NATS and by hand, and frees both.
func TestSelectDisaggregated(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	x := startRouting(t, nats, `disaggregation: {bypass: prefill_load, prefill_busy_threshold: 1,
  kv_transfer_domain: zone, kv_transfer_enforcement: required}`, "n0")[0]
	register(t, x, "d1", `,"role":"decode","topology_domains":{"zone":"a"}`)
	register(t, x, "d2", `,"role":"decode","topology_domains":{"zone":"b"}`)
	register(t, x, "p1", `,"role":"prefill","max_num_batched_tokens":100,"topology_domains":{"zone":"a"}`)
	ctx := harness.Context(t)
	c, err := client.NATS(connectNATS(t, "nats://"+nats), "default", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	prompt := harness.Tokens(1, 120)
	request := func(id string) *api.SelectRequest {
		return &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt}, RequestID: id, Book: id != "",
			Disaggregated: true}
	}
	harness.Eventually(t, "both pools are registered", func() (bool, string) {
		s, err := c.Select(ctx, request(""))
		return err == nil && s.Candidates == 3 && s.Worker == "d1" && s.Prefill != nil && s.Prefill.Worker == "p1",
			fmt.Sprintf("%+v %v", s, err)
	})
	if s, err := c.Select(ctx, request("r1")); err != nil || !s.Booked || s.Disaggregation.Bypass {
		t.Fatalf("%+v, %v", s, err)
	}
	s, err := c.Select(ctx, request("r2"))
	if err != nil || s.Prefill != nil || !strings.Contains(s.Disaggregation.Reason, "p1 has 120 tokens to compute") {
		t.Fatalf("p1 is busy: %+v, %+v, %v", s, s.Disaggregation, err)
	}
	loads := func(want ...uint64) {
		t.Helper()
		list, err := c.Loads(ctx, "m")
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range list.Models[0].Ranks {
			if l.ActivePrefillTokens != want[i] {
				t.Fatalf("%+v, want %v prefill tokens", list.Models[0].Ranks, want)
			}
		}
	}
	loads(120, 0, 120)
	if err := c.PrefillComplete(ctx, "m", "r1"); err != nil {
		t.Fatal(err)
	}
	loads(120, 0, 0)
	if err := c.Free(ctx, "m", "r2"); err != nil {
		t.Fatal(err)
	}
	loads(0, 0, 0)
	file := filepath.Join(t.TempDir(), "prompt.json")
	if err := os.WriteFile(file, []byte("["+harness.CommaList(prompt)+"]"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := harness.Run(t, "indexer", "select", "--nats", nats, "--model", "m", "--tokens-file", file, "--disaggregated",
		"--advisory", "--explain")
	if r.Code != 0 || !strings.Contains(r.Stdout, "worker d1 rank 0") || !strings.Contains(r.Stdout, "worker p1 rank 0") ||
		!strings.Contains(r.Stdout, "dropped by near: worker d2") || !strings.Contains(r.Stdout, "room for 100") {
		t.Errorf("select --disaggregated: %+v", r)
	}
	if _, err := c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt},
		Disaggregated: true, Role: "decode"}); client.CodeOf(err) != api.CodeMalformed {
		t.Errorf("disaggregated with a role: %v", err)
	}
}

// TestSelectSessions runs two nodes with session affinity. Both nodes have all bindings, also after the end of the
// first node, and so does a new node.
func TestSelectSessions(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	const constants = "session_affinity: {ttl_secs: 3600, mode: hard, by_prompt: true}"
	nodes := startRouting(t, nats, constants, "n0", "n1")
	for i := range 3 {
		register(t, nodes[0], fmt.Sprint("w", i), "")
	}
	ctx := harness.Context(t)
	var asks []*client.Client
	for _, x := range nodes {
		c := harness.Ask(t, x.HTTP)
		asks = append(asks, c)
	}
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	request := func(id, session string) *api.SelectRequest {
		return &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt}, RequestID: id, Book: id != "",
			SessionID: session}
	}
	for i, c := range asks {
		harness.Eventually(t, fmt.Sprintf("node %d has three workers", i), func() (bool, string) {
			s, err := c.Select(ctx, request("", "s"))
			return err == nil && s.Candidates == 3, fmt.Sprintf("%+v %v", s, err)
		})
	}
	first, err := asks[0].Select(ctx, request("r0", "s"))
	if err != nil || first.Session == nil || first.Session.Binding != api.SessionMade {
		t.Fatalf("%+v, %v", first, err)
	}
	kept := func(c *client.Client, what string) {
		t.Helper()
		harness.Eventually(t, what, func() (bool, string) { // a node without the session may choose the same worker
			l, err := c.Sessions(ctx, &api.SessionsRequest{SessionID: "s"})
			return err == nil && len(l.Sessions) == 1 && l.Sessions[0].Worker == first.Worker, fmt.Sprintf("%+v %v", l, err)
		})
		if s, err := c.Select(ctx, request("", "s")); err != nil || s.Worker != first.Worker || s.Probability != 1 {
			t.Errorf("%s: %+v, %v", what, s, err)
		}
	}
	kept(asks[1], "the other node has the session's worker")
	s, err := asks[1].Select(ctx, request("r1", "s"))
	if err != nil || s.Worker != first.Worker || s.Session == nil || s.Session.Binding != api.SessionKept {
		t.Fatalf("%+v, %v", s, err)
	}
	turn := func(i, blocks int) *api.SelectRequest { // of a conversation without an id
		r := request(fmt.Sprint("turn", i), "")
		r.Tokens = harness.Tokens(1, blocks*harness.BlockSize)
		return r
	}
	begins, err := asks[0].Select(ctx, turn(0, 20))
	if err != nil || begins.Session == nil || begins.Session.Binding != api.SessionMade {
		t.Fatalf("%+v, %v", begins, err)
	}
	long := filepath.Join(t.TempDir(), "long.json")
	text := "[" + harness.CommaList(turn(1, 30).Tokens) + "]"
	if err := os.WriteFile(long, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	decided := fmt.Sprintf("affinity by prompt to worker %s rank 0 decided", begins.Worker)
	harness.Eventually(t, "every node has the binding of the prompt's session", func() (bool, string) {
		for range 10 { // any node answers
			r := harness.Run(t, "indexer", "select", "--nats", nats, "--model", "m", "--tokens-file", long, "--explain")
			if !strings.Contains(r.Stdout, decided) {
				return false, fmt.Sprintf("%+v", r)
			}
		}
		return true, ""
	})
	next, err := asks[1].Select(ctx, turn(1, 30))
	if err != nil || next.Worker != begins.Worker || next.Session == nil || next.Session.Binding != api.SessionKept {
		t.Errorf("the next turn at the other node: %+v, %v", next, err)
	}
	pinned := request("r2", "s")
	pinned.Pinned = &routing.Target{Worker: "w0"}
	if first.Worker == "w0" {
		pinned.Pinned.Worker = "w1"
	}
	if _, err := asks[1].Select(ctx, pinned); client.CodeOf(err) != api.CodeConflict {
		t.Errorf("a request of the session elsewhere: %v", err)
	}
	endSession(t, ctx, nats, asks, "s", first)
	if s, err = asks[0].Select(ctx, request("r4", "s")); err != nil || s.Session == nil ||
		s.Session.Binding != api.SessionMade {
		t.Fatalf("after the end of the session: %+v, %v", s, err)
	}
	first = s
	kept(asks[1], "the other node has the session's new worker")
	nodes[0].Kill()
	third := startRouting(t, nats, constants, "n2")[0]
	c := harness.Ask(t, third.HTTP)
	kept(c, "a new node has the session's worker")
	file := filepath.Join(t.TempDir(), "prompt.json")
	if err := os.WriteFile(file, []byte("["+harness.CommaList(prompt)+"]"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := harness.Run(t, "indexer", "select", "--nats", nats, "--model", "m", "--tokens-file", file, "--session", "s",
		"--book", "r3")
	if r.Code != 0 || !strings.Contains(r.Stdout, "worker "+string(first.Worker)) ||
		!strings.Contains(r.Stdout, "session s: kept") {
		t.Errorf("select --session: %+v", r)
	}
}

// TestSelectWaits makes a request wait on a node until another node has the end of a worker's request.
func TestSelectWaits(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	nodes := startRouting(t, nats, "queue: {threshold_tokens: 100, max_requests: 1}", "n0", "n1")
	register(t, nodes[0], "w1", "")
	ctx := harness.Context(t)
	var asks []*client.Client
	for _, x := range nodes {
		c := harness.Ask(t, x.HTTP)
		asks = append(asks, c)
	}
	request := func(id string) *api.SelectRequest {
		return &api.SelectRequest{Query: api.Query{Model: "m", Tokens: harness.Tokens(1, 120)}, RequestID: id,
			Book: true}
	}
	harness.Eventually(t, "the worker is registered", func() (bool, string) {
		s, err := asks[0].Select(ctx, request("r0"))
		return err == nil && s.Worker == "w1", fmt.Sprintf("%+v %v", s, err)
	})
	got := make(chan error, 1)
	go func() {
		_, err := asks[0].Select(ctx, request("r1"))
		got <- err
	}()
	harness.Eventually(t, "a request waits", func() (bool, string) {
		list, err := asks[0].Loads(ctx, "m")
		return err == nil && list.Models[0].PendingCount == 1 && list.Models[0].PendingISLTokens == 120,
			fmt.Sprintf("%+v %v", list, err)
	})
	status, text, err := harness.Request(nodes[0].HTTP, "POST", "/v1/select",
		`{"model":"m","tokens":[1,2,3],"request_id":"r2","book":true}`)
	if err != nil || status != 429 ||
		!strings.Contains(text, `"queue":{"reason":"requests","class":"default","limit":1,`) {
		t.Errorf("another request: %d %s %v", status, text, err)
	}
	harness.Eventually(t, "the other node ends the first request", func() (bool, string) {
		err := asks[1].Free(ctx, "m", "r0")
		return err == nil, fmt.Sprint(err)
	})
	if err := <-got; err != nil {
		t.Errorf("the waiting request: %v", err)
	}
}

// endSession ends a session at the second node. Its binding is listed on all nodes before, and on no node afterwards.
func endSession(t *testing.T, ctx context.Context, nats string, asks []*client.Client, id string,
	bound *api.Selection) {
	t.Helper()
	list := harness.IndexerJSON[api.SessionList](t, nats, "sessions --prompts")
	if list.Total != 2 || list.Total != len(list.Sessions) || !list.Affinity {
		t.Errorf("sessions: %+v", list)
	}
	of := func(c *client.Client) *api.SessionList {
		l, err := c.Sessions(ctx, &api.SessionsRequest{SessionID: id})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	for i, c := range asks {
		l := of(c)
		if len(l.Sessions) != 1 || l.Sessions[0].Worker != bound.Worker || l.Sessions[0].ID != id ||
			l.Sessions[0].Expires.Sub(l.Sessions[0].LastUse).Round(time.Second) != time.Hour {
			t.Errorf("node %d: %+v", i, l)
		}
	}
	if r := harness.Run(t, "indexer", "sessions", id, "--nats", nats); r.Code != 0 ||
		!strings.Contains(r.Stdout, string(bound.Worker)) {
		t.Errorf("indexer sessions: %+v", r)
	}
	ended, err := asks[1].EndSession(ctx, "m", id)
	if err != nil || len(ended.Sessions) != 1 || ended.Sessions[0].Worker != bound.Worker {
		t.Errorf("end: %+v, %v", ended, err)
	}
	for i, c := range asks {
		harness.Eventually(t, fmt.Sprintf("node %d has ended the session", i), func() (bool, string) {
			l := of(c)
			return len(l.Sessions) == 0, fmt.Sprintf("%+v", l)
		})
	}
	if r := harness.Run(t, "indexer", "sessions", "end", id, "--nats", nats); r.Code != 0 ||
		!strings.Contains(r.Stdout, "nothing has ended") {
		t.Errorf("a second end: %+v", r)
	}
}
