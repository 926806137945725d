package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// records is a NATS server with three nodes.
type records struct {
	*testing.T
	ctx     context.Context
	nats    string
	nodes   []*harness.Process
	https   []string
	clients []*client.Client // over HTTP, to a single node each
}

func startRecords(t *testing.T) *records {
	ctx := harness.Context(t)
	s := &records{T: t, ctx: ctx, nats: harness.StartNATS(t)}
	for i := range 3 {
		s.nodes, s.https = append(s.nodes, nil), append(s.https, "")
		s.clients = append(s.clients, nil)
		s.start(i)
	}
	return s
}

// start starts the i-th node.
func (s *records) start(i int) {
	s.Helper()
	p := harness.Start(s, "indexer", "serve", "--nats", s.nats, "--node-id", fmt.Sprint("n", i), "--partitions", "4",
		"--http-listen", "127.0.0.1:0")
	s.nodes[i], s.https[i] = p, p.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	p.WaitFor(`msg=ready`)
	c, err := client.HTTP([]string{"http://" + s.https[i]}, client.Options{Absent: harness.Patience})
	if err != nil {
		s.Fatal(err)
	}
	s.clients[i] = c
}

// seen waits until every node lists a rank that satisfies so.
func (s *records) seen(what, worker string, so func(api.WorkerInfo) bool) {
	s.Helper()
	for i, c := range s.clients {
		harness.Eventually(s, fmt.Sprintf("node %d: %s %s", i, worker, what), func() (bool, string) {
			list, err := c.Workers(s.ctx)
			if err != nil {
				return false, err.Error()
			}
			for _, w := range list.Workers {
				if string(w.Instance) == worker && so(w) {
					return true, ""
				}
			}
			text, _ := json.Marshal(list)
			return false, string(text)
		})
	}
}

// gone waits until no node lists a worker.
func (s *records) gone(worker string) {
	s.Helper()
	for i, c := range s.clients {
		harness.Eventually(s, fmt.Sprintf("node %d: %s is gone", i, worker), func() (bool, string) {
			list, err := c.Workers(s.ctx)
			if err != nil {
				return false, err.Error()
			}
			for _, w := range list.Workers {
				if string(w.Instance) == worker && w.Record != nil {
					return false, fmt.Sprintf("%+v", w.Record)
				}
			}
			return true, ""
		})
	}
}

func is(state api.WorkerState, reason string) func(api.WorkerInfo) bool {
	return func(w api.WorkerInfo) bool {
		return w.Record != nil && w.Record.State == state &&
			strings.Contains(strings.Join(w.Record.Reasons, "; "), reason)
	}
}

func (s *records) command(words string, want int, said string) {
	s.Helper()
	r := harness.Run(s, "indexer", append(strings.Fields(words), "--nats", s.nats)...)
	if r.Code != want || !strings.Contains(r.Stdout+r.Stderr, said) {
		s.Errorf("indexer %s: %+v, want %d and %q", words, r, want, said)
	}
}

// TestWorkerRecords checks that all nodes have the shim's data of a worker and the operators' changes, made on any node
// over any interface. A drained worker stays drained after restarts of the shim and of all nodes.
func TestWorkerRecords(t *testing.T) {
	t.Parallel()
	s := startRecords(t)
	e := harness.StartSimEngine(t)
	flags := []string{"--serving-endpoint", "http://w1:8000", "--role", "decode", "--total-kv-blocks", "1000",
		"--max-num-batched-tokens", "8192", "--taint", "b,a", "--topology", "zone=eu-1", "--lora-adapter", "sql",
		"--stable-routing-id", "slot-7"}
	shim := harness.StartSimShim(t, e, s.nats, "w1", flags...)
	want := api.WorkerSpec{Endpoint: "http://w1:8000", Role: api.RoleDecode, TotalKVBlocks: 1000,
		MaxBatchedTokens: 8192, Taints: []string{"a", "b"}, TopologyDomains: map[string]string{"zone": "eu-1"},
		LoRAAdapters: []string{"sql"}, StableRoutingID: "slot-7", Events: api.EventsShim}
	s.seen("is registered with all data of the shim", "w1", func(w api.WorkerInfo) bool {
		return w.Record != nil && w.Record.State == api.WorkerSchedulable && w.Record.Reasons == nil &&
			reflect.DeepEqual(w.Record.WorkerSpec, want) && w.Incarnation > 0
	})
	s.command("workers", 0, "schedulable, decode")
	s.command("workers drain w1 --why fans", 0, "draining")
	s.seen("is drained", "w1", is(api.WorkerDraining, "fans"))
	shim.Kill()
	shim = harness.StartSimShim(t, e, s.nats, "w1", "--serving-endpoint", "http://new:8000")
	s.seen("has another shim and is drained", "w1", func(w api.WorkerInfo) bool {
		return is(api.WorkerDraining, "fans")(w) && w.Record.Endpoint == "http://new:8000"
	})
	status, reply, err := harness.Request(s.https[1], http.MethodPatch, "/v1/workers/w1",
		`{"role":"prefill","taints":[],"endpoint":null,"drain":true}`)
	if err != nil || status != 200 || !strings.Contains(reply, `"role":"prefill"`) {
		t.Errorf("PATCH: %d %s %v", status, reply, err)
	}
	changed := func(w api.WorkerInfo) bool {
		return is(api.WorkerDraining, "fans")(w) && w.Record.Role == api.RolePrefill &&
			w.Record.Endpoint == "http://new:8000" && w.Record.Taints != nil && len(w.Record.Taints) == 0
	}
	s.seen("is changed", "w1", changed)
	for i := range s.nodes {
		s.nodes[i].Stop()
		s.start(i)
	}
	s.seen("is unchanged after the restart of the nodes", "w1", changed)
	s.command("workers undrain w1", 0, "schedulable")
	s.command("workers change w1 --reset --total-kv-blocks 7", 0, "http://new:8000")
	s.seen("may be chosen", "w1", func(w api.WorkerInfo) bool {
		return is(api.WorkerSchedulable, "")(w) && w.Record.Role == api.RoleAggregated && w.Record.TotalKVBlocks == 7
	})
	s.command("workers remove w1", 1, "stop the shim")
	e.Crash()
	s.seen("has an ended engine", "w1", is(api.WorkerUnschedulable, "its ports refuse"))
	shim.Stop()
}

// TestRegisteredWorkers registers workers on a node, without events or with a shim in the node. All nodes list the
// workers, and another node removes them.
func TestRegisteredWorkers(t *testing.T) {
	t.Parallel()
	s := startRecords(t)
	e := harness.StartSimEngine(t)
	no, declared := "a name/with ÄÖ", &api.WorkerRegistration{Model: "m", BlockSize: 16}
	declared.Instance, declared.Events, declared.RankSize = "a name/with ÄÖ", api.EventsNone, 2
	w, err := s.clients[0].RegisterWorker(s.ctx, declared)
	if err != nil || len(w.Ranks) != 2 || w.Ranks[1].State != api.WorkerSchedulable {
		t.Fatalf("%+v, %v", w, err)
	}
	s.seen("is registered", no, func(w api.WorkerInfo) bool { return is(api.WorkerSchedulable, "")(w) && w.Rank == 1 })
	drain := true
	drained, err := s.clients[1].ChangeWorker(s.ctx, &api.WorkerChange{Instance: declared.Instance, Drain: &drain})
	if err != nil || drained.Ranks[0].State != api.WorkerDraining {
		t.Errorf("%+v, %v", drained, err)
	}
	query := &api.SelectRequest{Query: api.Query{Model: "m", Tokens: harness.Tokens(1, 20)}}
	for i, c := range s.clients { // choices exclude drained workers too
		harness.Eventually(t, fmt.Sprintf("node %d chooses no draining worker", i), func() (bool, string) {
			a, err := c.Select(s.ctx, query)
			return api.AsError(err).Code == api.CodeNoWorkers, fmt.Sprintf("%+v %v", a, err)
		})
	}
	drain = false
	_, err = s.clients[1].ChangeWorker(s.ctx, &api.WorkerChange{Instance: declared.Instance, Drain: &drain})
	if err != nil {
		t.Error(err)
	}
	for i, c := range s.clients {
		harness.Eventually(t, fmt.Sprintf("node %d chooses the worker again", i), func() (bool, string) {
			a, err := c.Select(s.ctx, query)
			return err == nil && string(a.Worker) == no, fmt.Sprintf("%+v %v", a, err)
		})
	}
	if _, err := s.clients[2].RemoveWorker(s.ctx, declared.Instance); err != nil {
		t.Error(err)
	}
	s.gone(no)

	status, reply, err := harness.Request(s.https[0], http.MethodPost, "/v1/workers", fmt.Sprintf(
		`{"instance":"shimmed","model":"m","block_size":16,"endpoint":"http://s:1","events_endpoint":%q,"replay_endpoint":%q}`,
		e.Endpoint(), e.Replay()))
	if err != nil || status != 200 || !strings.Contains(reply, "the shim is about to start") {
		t.Errorf("POST: %d %s %v", status, reply, err)
	}
	prompt := harness.Tokens(1, 3*harness.BlockSize)
	harness.ServePrompt(t, e, prompt)
	s.seen("has a shim in the node", "shimmed", func(w api.WorkerInfo) bool {
		return is(api.WorkerSchedulable, "")(w) && w.Blocks.Device == 3 && w.Record.Endpoint == "http://s:1" &&
			w.Record.Events == api.EventsShim
	})
	for body, want := range map[string]string{
		`{"instance":"shimmed","model":"m","block_size":16,"events":"none"}`:                     "already_registered",
		`{"instance":"other","model":"m","block_size":32,"events":"none"}`:                       "block_size_mismatch",
		`{"instance":"other","model":"m","block_size":16,"role":["prefill","decode"]}`:           "one role",
		`{"instance":"other","model":"m","block_size":16,"events_endpoint":"ftp://x"}`:           "malformed",
		`{"instance":"other","model":"m","block_size":16,"total_kv_blocks":-1}`:                  "total_kv_blocks is -1",
		`{"instance":"other","model":"m","block_size":16,"rank_start":4294967295,"rank_size":2}`: "beyond 32 bits",
	} {
		if status, reply, err := harness.Request(s.https[0], http.MethodPost, "/v1/workers", body); err != nil ||
			status < 400 || status >= 500 || !strings.Contains(reply, want) {
			t.Errorf("%s: %d %s %v, want %q", body, status, reply, err, want)
		}
	}
	status, reply, err = harness.Request(s.https[1], http.MethodPatch, "/v1/workers/nobody", `{"drain":true}`)
	if err != nil || status != 404 || !strings.Contains(reply, "unknown_worker") {
		t.Errorf("PATCH of an unknown worker: %d %s %v", status, reply, err)
	}
	if status, reply, err = harness.Request(s.https[1], http.MethodPut, "/v1/workers", `{}`); err != nil ||
		status != 405 || !strings.Contains(reply, "GET or POST") {
		t.Errorf("PUT: %d %s %v", status, reply, err)
	}
	if _, err := s.clients[1].RemoveWorker(s.ctx, "shimmed"); err != nil {
		t.Error(err)
	}
	s.gone("shimmed")
	s.command("workers register x --model m --block-size 16 --role prefill", 0, "prefill")
	s.seen("is registered", "x", is(api.WorkerSchedulable, ""))
	s.command("workers remove x", 0, "it is removed")
}
