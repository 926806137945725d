package integration

import (
	"context"
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

// TestEngineLoad reports to one node that an engine is full: no node chooses it any more, and one that starts later
// knows it too. What Dynamo's workers publish, of each release, counts the same, and so does what is published on a
// worker's own subject, where nothing is heard of another. Costs stay as they are.
func TestEngineLoad(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	config := filepath.Join(t.TempDir(), "routing.yaml")
	if err := os.WriteFile(config, []byte("active_decode_blocks_threshold: 0.9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	launch := func(id string) (*harness.Process, *client.Client) {
		p := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", id, "--partitions", "4", "--http-listen",
			"127.0.0.1:0", "--routing-config", config)
		c, err := client.HTTP([]string{"http://" + p.WaitFor(`HTTP is served" listen=(\S+)`)[1]}, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		p.WaitFor(`msg=ready`)
		return p, c
	}
	node, one := launch("n1")
	_, two := launch("n2")
	for _, worker := range []events.WorkerID{"7", "8"} { // 8 does not say how much it has room for
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
	request := &client.SelectRequest{Query: client.Query{Model: "m", Tokens: harness.Tokens(1, harness.BlockSize),
		Explain: true}}
	// dropped waits until a node drops these workers, and says so; again is called meanwhile.
	dropped := func(who string, c *client.Client, again func(), want ...string) {
		t.Helper()
		harness.Eventually(t, who+" drops who is full", func() (bool, string) {
			again()
			s, err := c.Select(ctx, request)
			var got []string
			switch {
			case err == nil && s.Explanation != nil:
				for _, d := range s.Explanation.Dropped {
					got = append(got, string(d.Worker)+" "+d.Reason)
				}
				for _, c := range s.Explanation.Candidates {
					if c.Cost != 2 { // prefill and decode of one block
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
	dropped("a node that has just started", three, full, seven)
	known, err := three.EngineLoads(ctx)
	if err != nil || len(known.Loads) != 1 || known.Loads[0].Worker != "7" || *known.Loads[0].UsedBlocks != 95 {
		t.Errorf("%+v, %v", known, err)
	}
	both := report(two, api.EngineLoad{Worker: "7", UsedBlocks: number(91)},
		api.EngineLoad{Worker: "8", UsedBlocks: number(46), TotalBlocks: number(50)})
	dropped("a node", three, both, "overloaded")
	dropped("a node", one, report(two, api.EngineLoad{Worker: "7", UsedBlocks: number(90)},
		api.EngineLoad{Worker: "8", UsedBlocks: number(45)}))

	// Published, on the subject of the worker that it is about.
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
	node.WaitFor("of another worker than its subject")
	dropped("a node", two, func() {}, seven)

	// As Dynamo publishes it, through the shim of its fleet.
	shim := harness.Start(t, "worker-shim", "run", "--source", "dynamo-nats", "--engine", dynamoSubject, "--model", "m",
		"--block-size", "16", "--nats", nats)
	active, _ := msgpack.Marshal(map[string]any{"worker_id": 7, "dp_rank": 0, "active_decode_blocks": nil,
		"active_prefill_tokens": nil, "kv_used_blocks": 5})
	envelope, _ := msgpack.Marshal(map[string]any{"topic": "kv_metrics", "publisher_id": 1, "sequence": 1,
		"published_at": 1, "payload": active})
	dropped("a node", one, publish("namespace.dynamo.component.backend.endpoint.generate.kv_metrics", envelope))
	dropped("a node", one, publish("namespace.dynamo.kv_metrics", []byte(`{"worker_id":7,"data":{"request_active_slots":1,
		"request_total_slots":4,"kv_active_blocks":95,"kv_total_blocks":100,"num_requests_waiting":0,
		"gpu_cache_usage_perc":0.95,"gpu_prefix_cache_hit_rate":0.0}}`)), seven)
	publish("namespace.dynamo.component.backend.kv_metrics", []byte(`{"worker_id":7}`))()
	shim.WaitFor("none of Dynamo's loads")
}
