package integration

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestDynamoPlane sends requests over NATS as Dynamo's frontend does to its router. A booking on a node is marked on
// another node, and the loads follow.
func TestDynamoPlane(t *testing.T) {
	t.Parallel()
	address := harness.StartNATS(t)
	for _, id := range []string{"n1", "n2"} {
		harness.Start(t, "indexer", "serve", "--nats", address, "--node-id", id, "--partitions", "4", "--http-listen",
			"", "--guess-policy", "off").WaitFor(`msg=ready`)
	}
	conn := connectNATS(t, "nats://"+address)
	c, err := client.NATS(conn, "default", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := harness.Context(t)
	for _, worker := range []events.WorkerID{"7", "8"} {
		if _, err := c.RegisterWorker(ctx, &api.WorkerRegistration{Instance: worker, Model: "org/m.1",
			BlockSize: harness.BlockSize, WorkerSpec: api.WorkerSpec{Events: api.EventsNone}}); err != nil {
			t.Fatal(err)
		}
	}
	tokens, _ := json.Marshal(harness.Tokens(1, 2*harness.BlockSize+1))
	ask := func(verb, requestID, body string) string {
		t.Helper()
		m := nats.NewMsg("kv.v1.default.dynamo.org=2Fm=2E1." + verb)
		m.Data = []byte(strings.Replace(body, "TOKENS", string(tokens), 1))
		if requestID != "" {
			m.Header.Set("x-request-id", requestID)
		}
		reply, err := conn.RequestMsgWithContext(ctx, m)
		if err != nil {
			t.Fatal(err)
		}
		return string(reply.Data)
	}
	var chosen struct {
		Worker json.Number `json:"worker_id"`
	}
	harness.Eventually(t, "both nodes have the workers", func() (bool, string) {
		text := ""
		for range 20 {
			if text = ask("generate", "", `{"tokens":TOKENS}`); json.Unmarshal([]byte(text), &chosen) != nil ||
				chosen.Worker == "" {
				return false, text
			}
		}
		return true, text
	})
	text := ask("select", "", `{"tokens":TOKENS}`)
	if rest := `,"required_blocks":3,"overlap_blocks":0}`; text != `{"worker_id":7`+rest && text != `{"worker_id":8`+rest {
		t.Errorf("select: %s", text)
	}
	text = ask("generate", "r1", `{"method":"new","tokens":TOKENS}`)
	if err := json.Unmarshal([]byte(text), &chosen); err != nil || text !=
		fmt.Sprintf(`{"method":"new","worker_id":%s,"dp_rank":0,"overlap_blocks":0}`, chosen.Worker) {
		t.Fatalf("new: %s", text)
	}
	isl := 2*harness.BlockSize + 1
	loads := func(prefill int, blocks, requests int) {
		t.Helper()
		other := map[json.Number]string{"7": "8", "8": "7"}[chosen.Worker]
		row := func(worker string, prefill, blocks, requests int) string {
			return fmt.Sprintf(`{"worker_id":%s,"dp_rank":0,"potential_prefill_tokens":%d,"potential_decode_blocks":%d,`+
				`"active_requests":%d}`, worker, prefill, blocks, requests)
		}
		first, second := row(string(chosen.Worker), prefill, blocks, requests), row(other, isl, 2, 0)
		if other == "7" {
			first, second = second, first
		}
		want := `{"method":"potential_loads","loads":[` + first + "," + second +
			`],"pending_count":0,"pending_isl_tokens":0}`
		harness.Eventually(t, "both nodes have the loads", func() (bool, string) {
			text := want
			for i := 0; i < 20 && text == want; i++ {
				text = ask("generate", "", `{"method":"potential_loads","tokens":TOKENS}`)
			}
			return text == want, text + "\nwant " + want
		})
	}
	loads(2*isl, 2, 1)
	if text := ask("generate", "r1", `{"method":"new","tokens":TOKENS}`); len(text) == 0 || text[:10] != `{"error":{` {
		t.Errorf("a used id: %s", text)
	}
	if text := ask("generate", "", `{"method":"mark_prefill","request_id":"r1"}`); text !=
		`{"method":"prefill_marked","success":true}` {
		t.Errorf("mark_prefill: %s", text)
	}
	loads(isl, 2, 1)
	if text := ask("generate", "r1", `{"method":"mark_free"}`); text != `{"method":"free_marked","success":true}` {
		t.Errorf("mark_free: %s", text)
	}
	loads(isl, 2, 0)
	harness.Eventually(t, "the id is free on all nodes", func() (bool, string) {
		text := ask("generate", "r1", `{"method":"mark_free"}`)
		return text == `{"method":"free_marked","success":false}`, text
	})
}
