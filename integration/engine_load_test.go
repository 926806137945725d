package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestEngineLoad reports a full engine to a node: no node chooses the engine, including a later node. Reports of
// Dynamo's workers, of every release, count the same, and so do reports on a worker's own subject, which accepts no
// report of another worker. Costs do not change.
func TestEngineLoad(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	config := filepath.Join(t.TempDir(), "routing.yaml")
	if err := os.WriteFile(config, []byte("active_decode_blocks_threshold: 0.9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx := harness.Context(t)
	launch := func(id string) (*harness.Process, *client.Client) {
		p := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", id, "--partitions", "4", "--http-listen",
			"127.0.0.1:0", "--routing-config", config)
		c := harness.Ask(t, p.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		p.WaitFor(`msg=ready`)
		return p, c
	}
	node, one := launch("n1")
	_, two := launch("n2")
	for _, worker := range []events.WorkerID{"7", "8"} { // worker 8 does not report its capacity
		r := &api.WorkerRegistration{Instance: worker, Model: "m", BlockSize: harness.BlockSize,
			WorkerSpec: api.WorkerSpec{Events: api.EventsNone}}
		if worker == "7" {
			r.TotalKVBlocks = 100
		}
		if _, err := one.RegisterWorker(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	number := func(v uint64) *uint64 { return &v }
	request := &api.SelectRequest{Query: api.Query{Model: "m", Tokens: harness.Tokens(1, harness.BlockSize),
		Explain: true}, Policy: "dynamo"}
	// dropped waits until a node excludes the given workers, with the reason. again is called meanwhile.
	dropped := func(who string, c *client.Client, again func(), want ...string) {
		t.Helper()
		harness.Eventually(t, who+" excludes full workers", func() (bool, string) {
			again()
			s, err := c.Select(ctx, request)
			var got []string
			switch {
			case err == nil && s.Explanation != nil:
				for _, d := range s.Explanation.Dropped {
					got = append(got, string(d.Worker)+" "+d.Reason)
				}
				for _, c := range s.Explanation.Candidates {
					if c.Cost != 2 { // prefill and decode of a block
						got = append(got, fmt.Sprintf("the cost is %v", c.Cost))
					}
				}
			case client.CodeOf(err) == api.CodeOverloaded:
				got = append(got, "overloaded")
			default:
				got = append(got, fmt.Sprint(err))
			}
			return strings.Join(got, "; ") == strings.Join(want, "; "), strings.Join(got, "; ")
		})
	}
	report := func(c *client.Client, loads ...api.EngineLoad) func() {
		return func() {
			if err := c.EngineLoad(ctx, loads...); err != nil {
				t.Fatal(err)
			}
		}
	}
	seven := "7 is overloaded: used blocks, as it reports, is 95, above 90"
	full := report(one, api.EngineLoad{Worker: "7", UsedBlocks: number(95), TotalBlocks: number(1000)})
	for i, c := range []*client.Client{one, two} {
		dropped(fmt.Sprint("node ", i), c, full, seven)
	}
	_, three := launch("n3")
	dropped("a new node", three, full, seven)
	known, err := three.EngineLoads(ctx)
	if err != nil || len(known.Loads) != 1 || known.Loads[0].Worker != "7" || *known.Loads[0].UsedBlocks != 95 {
		t.Errorf("%+v, %v", known, err)
	}
	both := report(two, api.EngineLoad{Worker: "7", UsedBlocks: number(91)},
		api.EngineLoad{Worker: "8", UsedBlocks: number(46), TotalBlocks: number(50)})
	dropped("a node", three, both, "overloaded")
	dropped("a node", one, report(two, api.EngineLoad{Worker: "7", UsedBlocks: number(90)},
		api.EngineLoad{Worker: "8", UsedBlocks: number(45)}))

	// Publish on the subject of the worker.
	conn := connectNATS(t, "nats://"+nats)
	publish := func(subject string, data []byte) func() {
		return func() {
			if err := conn.Publish(subject, data); err != nil {
				t.Fatal(err)
			}
		}
	}
	dropped("a node", two, publish("kv.v1.default.engine.7", []byte(`{"loads":[{"worker":"7","kv_active_blocks":95,
		"request_active_slots":3,"gpu_cache_usage_perc":0.95}]}`)), seven)
	publish("kv.v1.default.engine.8", []byte(`{"loads":[{"worker":"7","kv_used_blocks":0}]}`))()
	node.WaitFor("the report names another worker than the subject")
	dropped("a node", two, func() {}, seven)

	// Publish as Dynamo does, through the shim of the fleet.
	shim := harness.Start(t, "worker-shim", "run", "--source", "dynamo-nats", "--engine", dynamoSubject, "--model", "m",
		"--block-size", "16", "--nats", nats)
	active, _ := msgpack.Marshal(map[string]any{"worker_id": 7, "dp_rank": 0, "active_decode_blocks": nil,
		"active_prefill_tokens": nil, "kv_used_blocks": 5})
	envelope := onEventPlane("kv_metrics", active)
	dropped("a node", one, publish("namespace.dynamo.component.backend.endpoint.generate.kv_metrics", envelope))
	dropped("a node", one, publish("namespace.dynamo.kv_metrics", []byte(`{"worker_id":7,"data":{"request_active_slots":1,
		"request_total_slots":4,"kv_active_blocks":95,"kv_total_blocks":100,"num_requests_waiting":0,
		"gpu_cache_usage_perc":0.95,"gpu_prefix_cache_hit_rate":0.0}}`)), seven)
	publish("namespace.dynamo.component.backend.kv_metrics", []byte(`{"worker_id":7}`))()
	shim.WaitFor("without kv_metrics of Dynamo's")
}

// onEventPlane puts a payload into the envelope of Dynamo's event plane.
func onEventPlane(topic string, payload []byte) []byte {
	envelope, err := msgpack.Marshal(map[string]any{"topic": topic, "publisher_id": 1, "sequence": 1, "published_at": 1,
		"payload": payload})
	if err != nil {
		panic(err)
	}
	return envelope
}

// TestRequestsOfDynamosRouters publishes requests of a Dynamo router to a worker. Both nodes choose the other worker
// until the requests end, and a request that is also booked on a node counts once.
func TestRequestsOfDynamosRouters(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	ctx := harness.Context(t)
	nodes := make([]*client.Client, 2)
	for i := range nodes {
		p := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", fmt.Sprint("n", i), "--partitions", "4",
			"--http-listen", "127.0.0.1:0", "--request-expiry", "15m")
		c := harness.Ask(t, p.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		p.WaitFor(`msg=ready`)
		nodes[i] = c
	}
	for _, worker := range []events.WorkerID{"7", "8"} {
		if _, err := nodes[0].RegisterWorker(ctx, &api.WorkerRegistration{Instance: worker, Model: "m",
			BlockSize: harness.BlockSize, WorkerSpec: api.WorkerSpec{Events: api.EventsNone}}); err != nil {
			t.Fatal(err)
		}
	}
	const component = "namespace.dynamo.component.backend"
	harness.Start(t, "worker-shim", "run", "--source", "dynamo-nats", "--engine",
		component+".endpoint.generate.kv-events", "--model", "m", "--block-size", "16", "--nats", nats)
	conn := connectNATS(t, "nats://"+nats)
	publish := func(subject string, message map[string]any) {
		payload, err := msgpack.Marshal(message)
		if err != nil {
			t.Fatal(err)
		}
		topic := subject[strings.LastIndex(subject, ".")+1:]
		if err := conn.Publish(subject, onEventPlane(topic, payload)); err != nil {
			t.Fatal(err)
		}
	}
	event := func(id string, worker uint64, data any) map[string]any {
		return map[string]any{"request_id": id, "worker": map[string]any{"worker_id": worker, "dp_rank": 0}, "data": data,
			"router_id": 99, "lora_name": nil}
	}
	add := func(tokens int, blocks ...uint64) map[string]any {
		return map[string]any{"AddRequest": map[string]any{"token_sequence": blocks, "track_prefill_tokens": true,
			"expected_output_tokens": nil, "prefill_load_hint": map[string]any{"initial_effective_prefill_tokens": tokens,
				"expected_prefill_duration": nil}}}
	}
	sequences := component + ".endpoint.generate.active_sequences_events"
	// loads waits until both nodes have the given loads of worker 7. It calls again until then, because NATS keeps no
	// message for a late subscriber.
	loads := func(when, want string, again func()) {
		t.Helper()
		harness.Eventually(t, when, func() (bool, string) {
			again()
			for _, c := range nodes {
				l, err := c.Loads(ctx, "m")
				if err != nil {
					return false, err.Error()
				}
				r := l.Models[0].Ranks[0]
				if got := fmt.Sprintf("%s: %d tokens, %d blocks, %d requests", r.Worker, r.ActivePrefillTokens, r.ActiveBlocks,
					r.ActiveRequests); got != want {
					return false, got
				}
			}
			return true, ""
		})
	}
	none := func() {}
	loads("a request is added", "7: 40 tokens, 2 blocks, 1 requests",
		func() { publish(sequences, event("r1", 7, add(40, 11, 12))) })
	for i, c := range nodes {
		for range 8 {
			s, err := c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m",
				Tokens: harness.Tokens(1, harness.BlockSize)}})
			if err != nil || s.Worker != "8" {
				t.Fatalf("node %d chooses %+v, %v", i, s, err)
			}
		}
	}
	publish(sequences, event("r1", 7, "MarkPrefillCompleted"))
	publish(component+".active_sequences_events", event("r2", 7, add(0, 11, 13)))
	loads("prefill is done, and another request shares a block", "7: 0 tokens, 3 blocks, 2 requests", none)
	publish("namespace.dynamo.prefill_events", map[string]any{"request_id": "old", "worker_id": 7,
		"data": map[string]any{"NewPrefill": 70}, "router_id": 99})
	loads("an old release publishes prefill apart", "7: 70 tokens, 3 blocks, 3 requests", none)
	publish(sequences, event("old", 7, "Free"))
	publish(sequences, event("r1", 7, "Free"))
	publish(sequences, event("r2", 8, "Free")) // of another worker: not the same request
	loads("requests are freed", "7: 0 tokens, 2 blocks, 1 requests", none)
	if _, err := nodes[0].Book(ctx, &api.BookRequest{Prompt: api.Prompt{Model: "m",
		Tokens: harness.Tokens(1, 3*harness.BlockSize)}, RequestID: "r2", Worker: "7",
		EffectivePrefillTokens: 5}); err != nil {
		t.Fatal(err)
	}
	loads("both nodes have the booking", "7: 5 tokens, 3 blocks, 1 requests", none)
	publish(sequences, event("r2", 7, add(0, 11, 13)))
	loads("the request was booked here too", "7: 5 tokens, 3 blocks, 1 requests", none)
	publish(sequences, event("r2", 7, "Free")) // the booking router frees the request
	publish(sequences, event("r3", 7, add(1)))
	loads("the end does not end the booking", "7: 6 tokens, 3 blocks, 2 requests", none)
	s, err := nodes[1].Status(ctx)
	if err != nil || s.RouterRequests == nil || s.RouterRequests.Requests != 1 || s.RouterRequests.Own < 3 ||
		s.RouterRequests.Freed != 2 {
		t.Errorf("%+v, %v", s.RouterRequests, err)
	}
}
