//go:build judges

package dynamo

import (
	"context"
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// TestEventPlaneOverNATS runs Dynamo's own publishers that relay engines' events over NATS. The index must be equal to
// the engines if the shim subscribes to the subject of the endpoint, of all endpoints, or of the component as before
// 1.0.
func TestEventPlaneOverNATS(t *testing.T) {
	for _, scope := range []string{"backend", "backend.endpoint.generate", "backend.endpoint.*"} {
		t.Run(scope, func(t *testing.T) {
			p := startPlane(t, t.TempDir(), true)
			shim := harness.Start(t, "worker-shim", "run", "--source", "dynamo-nats", "--engine",
				"namespace.kvatlas.component."+scope+".kv-events", "--model", "m", "--block-size", fmt.Sprint(planeBlock),
				"--nats", "nats://"+p.indexer.NATS, "--silence", "100ms")
			shim.WaitFor("has published no event since the start")
			p.serve(200)
			shim.WaitFor("the source has published its first event")
			p.equal("live")
			for _, e := range p.engines {
				if err := e.Clear(); err != nil {
					t.Fatal(err)
				}
			}
			p.serve(10)
			p.equal("after clears")
		})
	}
}

// TestRouterOverNATS runs Dynamo's own router, which sends requests to a worker. The requests count as load until their
// end.
func TestRouterOverNATS(t *testing.T) {
	p := startPlane(t, t.TempDir(), true)
	shim := harness.Start(t, "worker-shim", "run", "--source", "dynamo-nats", "--engine",
		"namespace.kvatlas.component.backend.endpoint.*.kv-events", "--model", "m", "--block-size", fmt.Sprint(planeBlock),
		"--nats", "nats://"+p.indexer.NATS, "--silence", "100ms")
	shim.WaitFor("has published no event since the start")
	p.serve(20)
	p.equal("live")
	p.workers.Do(map[string]any{"op": "router", "folder": t.TempDir()}, nil)
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	loads := func(when, want string) {
		t.Helper()
		harness.Eventually(t, when, func() (bool, string) {
			l, err := p.client.Loads(ctx, "m")
			if err != nil {
				return false, err.Error()
			}
			for _, r := range l.Models[0].Ranks {
				if string(r.Worker) == p.workers.Worker && r.Rank == 0 {
					got := fmt.Sprintf("%d tokens, %d blocks, %d requests", r.ActivePrefillTokens, r.ActiveBlocks,
						r.ActiveRequests)
					return got == want, got
				}
			}
			return false, "no load of the worker"
		})
	}
	route := func(id string, tokens ...uint32) {
		p.workers.Do(map[string]any{"op": "route", "id": id, "tokens": tokens}, nil)
	}
	end := func(op, id string) { p.workers.Do(map[string]any{"op": op, "id": id}, nil) }
	route("a", harness.Tokens(1, 13)...)
	loads("a request", "13 tokens, 3 blocks, 1 requests")
	route("b", harness.Tokens(1, 8)...)
	loads("another one with the same blocks", "21 tokens, 3 blocks, 2 requests")
	end("prefilled", "a")
	loads("prefill is done", "8 tokens, 3 blocks, 2 requests")
	end("free", "a")
	loads("one has ended", "8 tokens, 2 blocks, 1 requests")
	end("free", "b")
	loads("both have ended", "0 tokens, 0 blocks, 0 requests")
}
