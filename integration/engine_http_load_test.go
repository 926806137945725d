package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
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

// TestShimReadsLoadSocket: a shim subscribes to SGLang's load socket only while a node chooses workers. The loads need
// no request to /v1/loads, which the shim sends again when the socket is silent.
func TestShimReadsLoadSocket(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	front, engine := startEngineAPI(t), startRank(t, 0, 16)
	loads := loopback.Reserve(t)
	pub, err := zmtpserver.ListenPub(t.Context(), "tcp://"+loads, zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pub.Stop)
	_, port, _ := strings.Cut(loads, ":")
	wildcard := func(endpoint string) string { return strings.Replace(endpoint, "127.0.0.1", "*", 1) }
	config := fmt.Sprintf(`{"publisher":"zmq","endpoint":%q,"replay_endpoint":%q}`, wildcard(engine.Endpoint()),
		wildcard(engine.Replay()))
	front.says(map[string]string{
		"/v1/models": `{"data":[{"id":"llama"}]}`,
		"/server_info": fmt.Sprintf(`{"version":"0.5.23","served_model_name":"llama","page_size":16,"dp_size":1,
			"max_total_num_tokens":1600,"kv_events_config":%q,"kv_events":{"block_size":16,"dp_size":1,
			"load_endpoint_port_base":%s,"load_topic":"load"}}`, config, port)})
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine-http", front.URL, "--worker", "w0",
		"--engine-http-check", "0s", "--engine-http-load", "100ms")
	shim.WaitFor("connected to the engine")
	sent := byte(0)
	send := func(running, waiting, tokens uint64) { // as LoadStat of SGLang 0.5.23
		sent++
		stat := msgp.AppendStr(msgp.AppendArrayHead(nil, 11), "LoadStat")
		for _, v := range []uint64{running, waiting, tokens, 1600, 0, 77, 0, 0, 0, 0} {
			stat = msgp.AppendUint(stat, v)
		}
		if err := pub.Send([]byte("load"), []byte{0, 0, 0, 0, 0, 0, 0, sent}, stat); err != nil {
			t.Fatal(err)
		}
	}
	reported := func() (of *routing.Reported, err error) {
		var s api.Selection
		err = harness.HTTPDo(x.HTTP, "POST", "/v1/select", &api.SelectRequest{Query: api.Query{Model: "llama",
			Tokens: harness.Tokens(1, 4*16), Explain: true}}, &s)
		if err == nil && len(s.Explanation.Candidates) == 1 {
			of = s.Explanation.Candidates[0].Reported
		}
		return of, err
	}
	asked := func() int {
		front.mu.Lock()
		defer front.mu.Unlock()
		return front.asked["/v1/loads"]
	}
	if pub.Has("load") {
		t.Error("the shim has subscribed to the load socket without a choice")
	}
	for _, want := range []routing.EngineRequests{{Running: 4, Waiting: 3}, {Running: 1}} {
		harness.Eventually(t, fmt.Sprintf("the load socket reports %+v", want), func() (bool, string) {
			of, err := reported()
			if pub.Has("load") {
				send(uint64(want.Running), uint64(want.Waiting), 33)
			}
			return err == nil && of != nil && of.Requests != nil && of.Requests.Running == want.Running &&
				of.Requests.Waiting == want.Waiting && of.UsedBlocks == 3 && of.Capacity == 100 &&
				of.Source == "sglang load socket", fmt.Sprintf("%+v %v", of, err)
		})
	}
	front.adds("/v1/loads", `{"loads":[{"dp_rank":0,"num_running_reqs":9,"num_waiting_reqs":0,"num_used_tokens":160,
		"max_total_num_tokens":1600}]}`)
	before := asked()
	harness.Eventually(t, "the shim reads the API of an engine with a silent load socket", func() (bool, string) {
		of, err := reported()
		return err == nil && of != nil && of.Requests != nil && of.Requests.Running == 9 && of.Source == "sglang" &&
			asked() > before, fmt.Sprintf("%+v %v", of, err)
	})
}
