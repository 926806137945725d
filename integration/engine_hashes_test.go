package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// TestEngineHashes queries two nodes with a part of the partitions each by engine hashes of a prompt's blocks. Two
// engines have equal hashes, and a third engine has another seed.
func TestEngineHashes(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	var clients []*client.Client
	var first *harness.Indexer
	for i := range 2 {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4", "--partition-replicas", "1", "--http-listen", "127.0.0.1:0")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		c := harness.Ask(t, x.HTTP)
		clients, first = append(clients, c), x
	}
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	for i, seed := range []uint64{0, 0, 7} {
		e, err := enginesim.Start(context.Background(), enginesim.Config{BlockSize: harness.BlockSize, Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Crash)
		harness.StartSimShim(t, e, nats, fmt.Sprint("w", i+1))
		harness.ServePrompt(t, e, prompt[:(8-i)*harness.BlockSize])
		first.WaitDepth(t, "m", prompt, fmt.Sprint("w", i+1), uint32(8-i))
	}
	hashes := func(seed uint64, tokens []uint32) (list api.Hashes) {
		for _, name := range enginesim.AppendNames(nil, seed, harness.BlockSize, tokens) {
			list = append(list, uint64(name))
		}
		return list
	}
	ctx := harness.Context(t)
	depth := func(worker string, n uint32) api.Overlap {
		return api.Overlap{Instance: events.WorkerID(worker), Device: n}
	}
	for _, c := range []struct {
		hashes api.Hashes
		want   []api.Overlap
		reason api.Reason
	}{
		{hashes(0, prompt), []api.Overlap{depth("w1", 8), depth("w2", 7)}, ""},
		{hashes(7, prompt), []api.Overlap{depth("w3", 6)}, ""},
		{hashes(1, prompt), []api.Overlap{}, api.ReasonNotCached},
		{hashes(0, prompt)[1:], []api.Overlap{}, api.ReasonNotCached},
		{api.Hashes{}, []api.Overlap{}, api.ReasonNoBlocks},
	} {
		for i, ask := range clients {
			harness.Eventually(t, fmt.Sprintf("client %d is answered %+v", i, c.want), func() (bool, string) {
				a, err := ask.Find(ctx, &api.Query{Model: "m", EngineHashes: c.hashes})
				return err == nil && a.Complete && reflect.DeepEqual(a.Workers, c.want) && a.Reason == c.reason &&
					a.Blocks == len(c.hashes), fmt.Sprintf("%+v %v", a, err)
			})
			// in the form of a language that rounds large numbers
			body := fmt.Sprintf(`{"model":"m","engine_hashes":["%s"]}`, strings.Trim(strings.ReplaceAll(fmt.Sprint(c.hashes),
				" ", `","`), "[]"))
			if len(c.hashes) == 0 {
				body = `{"model":"m","engine_hashes":[]}`
			}
			var a api.Answer
			if err := harness.HTTPDo(first.HTTP, "POST", "/v1/find", json.RawMessage(body), &a); err != nil ||
				!reflect.DeepEqual(a.Workers, c.want) {
				t.Errorf("%s: %+v, %v", body, a, err)
			}
		}
	}
	for worker, want := range map[events.WorkerID]api.Hashes{"w1": hashes(0, prompt)[:8], "w3": hashes(7, prompt)[:6]} {
		for i, ask := range clients {
			a, err := ask.Find(ctx, &api.Query{Model: "m", Tokens: prompt, WithEngineHashes: true,
				Workers: []events.WorkerID{worker}})
			if err != nil || len(a.Workers) != 1 || !reflect.DeepEqual(a.Workers[0].EngineHashes, want) {
				t.Errorf("client %d gets the hashes %+v, %v of %s; want %x", i, a, err, worker, want)
			}
		}
	}
	if _, err := clients[0].Find(ctx, &api.Query{Model: "m", Tokens: prompt, WithEngineHashes: true}); err == nil {
		t.Error("a query without a worker gets hashes")
	}
	q := api.Query{Model: "m", EngineHashes: hashes(7, prompt)}
	r := &api.SelectRequest{Query: q, ISLTokens: 10*harness.BlockSize + 3, RequestID: "r", Book: true}
	s, err := clients[0].Select(ctx, r)
	if err != nil || s.Worker != "w3" || s.CachedTokens != 6*harness.BlockSize || !s.Booked {
		t.Errorf("%+v, %v", s, err)
	}
	words := strings.Trim(strings.ReplaceAll(fmt.Sprint(hashes(0, prompt)), " ", ","), "[]")
	if a, failure := first.Query(t, "--model", "m", "--engine-hashes", words); failure != nil ||
		!reflect.DeepEqual(a.Workers, []api.Overlap{depth("w1", 8), depth("w2", 7)}) {
		t.Errorf("%+v, %v", a, failure)
	}
}
