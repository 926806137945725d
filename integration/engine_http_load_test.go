package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// TestShimReportsLoad: a shim reads the load of its engine only while a node chooses workers. Requests that no router
// has booked send a request to another worker, and explanations and the list of workers show them.
func TestShimReportsLoad(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	var fronts []*engineAPI
	for i := range 2 {
		front := startEngineAPI(t)
		front.vllm("llama", 16, startRank(t, 0, 16))
		shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine-http", front.URL, "--worker",
			fmt.Sprint("w", i), "--engine-http-check", "0s", "--engine-http-load", "100ms")
		shim.WaitFor("connected to the engine")
		fronts = append(fronts, front)
	}
	metrics := func(running, waiting int, usage float64) {
		fronts[0].mu.Lock()
		defer fronts[0].mu.Unlock()
		text := fronts[0].answers["/metrics"]
		config, _, _ := strings.Cut(text, "\n")
		fronts[0].answers["/metrics"] = fmt.Sprintf("%s\nvllm:num_requests_running{engine=\"0\"} %d.0\n"+
			"vllm:num_requests_waiting{engine=\"0\"} %d.0\nvllm:kv_cache_usage_perc{engine=\"0\"} %v\n", config, running,
			waiting, usage)
	}
	// read returns how often the metrics were read for the load. For the settings they are read after the version.
	read := func() int {
		fronts[0].mu.Lock()
		defer fronts[0].mu.Unlock()
		return fronts[0].asked["/metrics"] - fronts[0].asked["/version"]
	}
	metrics(4, 3, 0.5)
	workers := func() (list api.WorkerList, err error) {
		return list, harness.HTTPDo(x.HTTP, "GET", "/v1/workers", nil, &list)
	}
	harness.Eventually(t, "both workers may be chosen", func() (bool, string) {
		list, err := workers()
		ready := 0
		for _, w := range list.Workers {
			if w.Record != nil && w.Record.State == api.WorkerSchedulable {
				ready++
			}
		}
		return err == nil && ready == 2, fmt.Sprint(list, err)
	})
	if n := read(); n > 0 {
		t.Errorf("the load was read %d times without a choice", n)
	}
	// chosen returns the choice, and the report of w0.
	chosen := func() (worker events.WorkerID, of *routing.Reported, err error) {
		var s api.Selection
		err = harness.HTTPDo(x.HTTP, "POST", "/v1/select", &api.SelectRequest{Query: api.Query{Model: "llama",
			Tokens: harness.Tokens(1, 4*16), Explain: true}}, &s)
		if err == nil {
			for _, c := range s.Explanation.Candidates {
				if c.Worker == "w0" {
					of = c.Reported
				}
			}
		}
		return s.Worker, of, err
	}
	want := routing.EngineRequests{Running: 4, Waiting: 3, Others: 7, OthersWaiting: 3, OthersBlocks: 50,
		OthersPrefillTokens: 3 * 50 * 16 / 4}
	harness.Eventually(t, "the busy engine is not chosen", func() (bool, string) {
		worker, of, err := chosen()
		return err == nil && worker == "w1" && of != nil && of.Requests != nil && *of.Requests == want &&
				of.UsedBlocks == 50 && of.Capacity == 100 && of.Source == "vllm" && of.AgeS < 30,
			fmt.Sprintf("%s %+v %v", worker, of, err)
	})
	if list, err := workers(); err != nil || list.Workers[0].Reported == nil ||
		list.Workers[0].Reported.Requests == nil || list.Workers[0].Reported.Requests.Running != 4 {
		t.Errorf("the list of workers: %+v, %v", list, err)
	}
	if r := harness.Run(t, "indexer", "workers", "--nats", x.NATS); !strings.Contains(r.Stdout,
		"w0/0 reports 4 running and 3 waiting requests, 7 of them of other routers, 50 of 100 blocks in use (from vllm, ") {
		t.Errorf("indexer workers prints %s%s", r.Stdout, r.Stderr)
	}
	metrics(0, 0, 0)
	harness.Eventually(t, "the idle engine is chosen too", func() (bool, string) {
		worker, of, err := chosen()
		return err == nil && worker == "w0" && of != nil && *of.Requests == (routing.EngineRequests{}),
			fmt.Sprintf("%s %+v %v", worker, of, err)
	})
}
