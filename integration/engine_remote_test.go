package integration

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestRanksOnOtherHosts checks an engine on two hosts that lists all ranks and publishes only rank 0 here. The other
// ranks are remote and may be chosen, until a shim on their host registers them. After the end of the shim, they are
// remote again.
func TestRanksOnOtherHosts(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	front, there := startEngineAPI(t), startRank(t, 1, 16)
	endpoints, replays := loopback.ReserveRow(t, 2), loopback.ReserveRow(t, 2)
	rank := func(n events.Rank) *enginesim.Engine {
		e, err := enginesim.Start(t.Context(), enginesim.Config{BlockSize: 16, Capacity: 100, Rank: n,
			Endpoint: "tcp://" + endpoints[n], Replay: "tcp://" + replays[n]})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		return e
	}
	here := rank(0)
	config := fmt.Sprintf(`{\"publisher\":\"zmq\",\"endpoint\":\"%s\",\"bind\":true,\"replay_endpoint\":\"%s\"}`,
		here.Endpoint(), here.Replay())
	front.says(map[string]string{"/server_info": `{"version":"0.5.23","served_model_name":"llama","page_size":16,` +
		`"dp_size":2,"nnodes":2,"kv_events_config":"` + config + `"}`})
	harness.ServePrompt(t, here, harness.Tokens(1, 4*16))
	first := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine-http", front.URL, "--worker", "w",
		"--lease", "3s")
	first.WaitFor("publish events on other hosts")
	x.WaitDepth(t, "llama", harness.Tokens(1, 4*16), "w", 4)
	states := func(want ...api.EngineState) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("the ranks are %v, and may be chosen", want), func() (bool, string) {
			var list api.WorkerList
			err := harness.HTTPDo(x.HTTP, http.MethodGet, "/v1/workers", nil, &list)
			ok := err == nil && len(list.Workers) == len(want)
			for i := range list.Workers {
				w := &list.Workers[i]
				ok = ok && w.Rank == events.Rank(i) && w.Engine == want[i] && w.Record != nil &&
					w.Record.State == api.WorkerSchedulable
			}
			return ok, fmt.Sprintf("%+v, %v", list.Workers, err)
		})
	}
	states(api.EngineConnected, api.EngineRemote)
	var status api.Status
	err := harness.HTTPDo(x.HTTP, http.MethodGet, "/v1/status", nil, &status)
	if text := strings.Join(status.Warnings, "\n"); err != nil || !strings.Contains(text, "w/1") ||
		status.Engines.Remote != 1 {
		t.Errorf("the status has the warnings %q and %+v, %v", text, status.Engines, err)
	}

	second := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", there.Endpoint(), "--replay",
		there.Replay(), "--worker", "w", "--rank", "1", "--model", "llama", "--block-size", "16", "--lease", "3s")
	second.WaitFor("registered")
	harness.ServePrompt(t, there, harness.Tokens(1000, 2*16))
	states(api.EngineConnected, api.EngineConnected)
	x.WaitDepth(t, "llama", harness.Tokens(1, 4*16), "w", 4)
	x.WaitDepth(t, "llama", harness.Tokens(1000, 2*16), "w", 2)
	second.Kill()
	states(api.EngineConnected, api.EngineRemote)

	// The port of rank 1 on this host accepts connections now.
	late := rank(1)
	first.WaitFor("a remote rank publishes its events here after all")
	harness.ServePrompt(t, late, harness.Tokens(3000, 3*16))
	states(api.EngineConnected, api.EngineConnected)
	x.WaitDepth(t, "llama", harness.Tokens(3000, 3*16), "w", 3)
}

// TestEngineSleepsAndWakes checks that a sleeping engine has no blocks and may not be chosen. Stored blocks after the
// wake-up count, also after the clear that the engine announces late.
func TestEngineSleepsAndWakes(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	front := startEngineAPI(t)
	engine, err := enginesim.Start(t.Context(), enginesim.Config{BlockSize: 16, Capacity: 100,
		Endpoint: "tcp://" + loopback.Reserve(t), Replay: "tcp://" + loopback.Reserve(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(engine.Stop)
	front.vllm("llama", 16, engine)
	sleeps := func(asleep bool) { front.adds("/is_sleeping", fmt.Sprintf(`{"is_sleeping":%t}`, asleep)) }
	sleeps(false)
	prompt, other := harness.Tokens(1, 4*16), harness.Tokens(900, 3*16)
	harness.ServePrompt(t, engine, prompt)
	args := []string{"run", "--nats", x.NATS, "--engine-http", front.URL, "--worker", "w", "--engine-http-check", "200ms"}
	shim := harness.Start(t, "worker-shim", args...)
	x.WaitDepth(t, "llama", prompt, "w", 4)
	chosen := func(want bool) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("the worker is chosen: %t", want), func() (bool, string) {
			var s api.Selection
			err := harness.HTTPOnce(x.HTTP, http.MethodPost, "/v1/select", &api.SelectRequest{
				Query: api.Query{Model: "llama", Tokens: prompt}, Advisory: true}, &s)
			return (err == nil) == want, fmt.Sprint(err, s)
		})
	}
	chosen(true)
	for round := range 2 {
		sleeps(true)
		x.WaitDepth(t, "llama", prompt, "w", 0)
		chosen(false)
		shim.WaitFor("the engine sleeps")
		if round == 1 { // a shim that starts now reads the events from before the sleep
			shim.Kill()
			shim = harness.Start(t, "worker-shim", args...)
			shim.WaitFor("the engine sleeps")
			x.WaitDepth(t, "llama", prompt, "w", 0)
			chosen(false)
		}
		sleeps(false)
		shim.WaitFor("the engine is awake")
		chosen(true)
		x.WaitDepth(t, "llama", prompt, "w", 0)
		engine.Clear()
		harness.ServePrompt(t, engine, other)
		x.WaitDepth(t, "llama", other, "w", 3)
		harness.ServePrompt(t, engine, prompt)
		x.WaitDepth(t, "llama", prompt, "w", 4)
	}
}
