package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// doctorsFleet has shims beside faulty engines.
func doctorsFleet(t *testing.T, s *staged) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx := harness.Context(t)
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	next := 0
	serve := func(e *enginesim.Engine) {
		t.Helper()
		next++
		harness.ServePrompt(t, e, harness.Tokens(1000*next, 4*harness.BlockSize))
	}
	shims := map[string]*harness.Process{}
	beside := func(e *enginesim.Engine, name string, more ...string) { // replaces the engine's shim
		t.Helper()
		if shims[name] != nil {
			shims[name].Kill()
		}
		shims[name] = harness.StartSimShim(t, e, x.NATS, name, more...)
	}
	held := func(name string, e *enginesim.Engine) { // waits for a prompt of the engine in the index
		t.Helper()
		serve(e)
		x.WaitDepth(t, "m", harness.Tokens(1000*next, 4*harness.BlockSize), name, 4)
	}

	deaf, err := enginesim.Start(t.Context(), enginesim.Config{NoReplay: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(deaf.Stop)
	serve(deaf) // before there is a shim
	shims["noreplay"] = harness.Start(t, "worker-shim", "run", "--engine", deaf.Endpoint(), "--worker", "noreplay",
		"--model", "m", "--block-size", "16", "--nats", x.NATS)
	late, err := enginesim.Start(t.Context(), enginesim.Config{Buffer: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(late.Stop)
	serve(late) // more than the replay buffer
	serve(late)
	beside(late, "late")
	dead := harness.StartSimEngine(t)
	serve(dead)
	beside(dead, "dead", "--replay", "tcp://"+loopback.Reserve(t))
	narrow := harness.StartSimEngine(t)
	beside(narrow, "wide", "--model", "wide", "--block-size", "32")
	garbled := harness.StartSimEngine(t)
	beside(garbled, "garbled")
	held("garbled", garbled)
	if err := garbled.Garble(); err != nil {
		t.Fatal(err)
	}
	lossy := harness.StartSimEngine(t)
	beside(lossy, "lossy")
	held("lossy", lossy)
	lossy.Drop(1, false)
	serve(lossy)
	gone := harness.StartSimEngine(t)
	beside(gone, "gone")
	held("gone", gone)
	gone.Crash()
	quiet := harness.StartSimEngine(t)
	beside(quiet, "quiet")
	frozen := harness.StartSimEngine(t)
	beside(frozen, "frozen")
	held("frozen", frozen)
	if err := shims["frozen"].Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	lives := harness.StartSimEngine(t)
	beside(lives, "stopped")
	shims["stopped"].WaitFor("msg=registered")
	shims["stopped"].Stop()
	beside(harness.StartSimEngine(t), "killed", "--lease", "1s")
	shims["killed"].WaitFor("msg=registered")
	shims["killed"].Kill()
	hasher, err := events.NewHasher(32, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"unleased", "forgotten"} {
		harness.PublishAs(t, ctx, ns, events.WorkerID(name), &events.Batch{Incarnation: 1, FirstID: 1, Model: "m",
			BlockSize: 32, Events: []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1},
				Locals: hasher.Hash(nil, harness.Tokens(1, 32))}}})
	}
	args := []string{"--nats", x.NATS}
	s.await(t, []symptom{
		{"shim_no_replay", "noreplay/0", "--replay"}, {"joined_late", "late/0", "buffer_steps"},
		{"replay_dead", "dead/0", "replay_endpoint"}, {"engine_unusable", "wide/0", "--block-size"},
		{"messages_unreadable", "garbled/0", "--source"},
		{"messages_lost", "lossy/0", "buffer_steps"}, {"engine_gone", "gone/0", "restart the engine"},
		{"engine_quiet", "quiet/0", "enable_kv_cache_events"}, {"shim_silent", "frozen/0", "--shim frozen"},
		{"shim_stopped", "stopped/0", "again"},
		{"lease_none", "unleased/0", "workers clear unleased"}, {"block_sizes", "model m", "--block-size"},
		{"worker_expired", "killed/0", "workers remove killed"},
	}, func() { // engines continue, so that shims detect the fault
		serve(deaf)
		serve(dead)
		serve(narrow)
		serve(lossy)
		serve(late)
	}, args...)
	again := func(e *enginesim.Engine) {
		t.Helper()
		if err := e.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	run := func(words ...string) {
		t.Helper()
		if r := harness.Run(t, "indexer", append(words, args...)...); r.Code != 0 {
			t.Fatalf("%q: %+v", words, r)
		}
	}
	s.mend(t, args,
		remedy{[]doctor.Fault{"shim_no_replay", "joined_late", "node_problem"}, "noreplay/0", func() {
			deaf.Stop()
			beside(harness.StartSimEngine(t), "noreplay") // the engine has a replay endpoint
		}},
		remedy{[]doctor.Fault{"joined_late"}, "late/0", func() {
			late.Stop()
			beside(harness.StartSimEngine(t), "late") // the engine keeps more messages, and has published nothing yet
		}},
		remedy{[]doctor.Fault{"replay_dead"}, "dead/0", func() { beside(dead, "dead") }},
		remedy{[]doctor.Fault{"engine_unusable", "events_skipped", "worker_incomplete"}, "wide/0", func() {
			shims["wide"].Stop()
			shims["wide"] = harness.StartSimShim(t, narrow, x.NATS, "wide", "--model", "wide")
			shims["wide"].WaitFor("models remove wide")
			run("workers", "clear", "wide")
			run("models", "remove", "wide")
		}},
		remedy{[]doctor.Fault{"messages_unreadable"}, "garbled/0", func() {
			again(garbled)
			beside(garbled, "garbled")
		}},
		remedy{[]doctor.Fault{"messages_lost"}, "lossy/0", func() {
			again(lossy)
			beside(lossy, "lossy")
		}},
		remedy{[]doctor.Fault{"engine_gone"}, "gone/0", func() { again(gone) }},
		remedy{[]doctor.Fault{"engine_quiet"}, "quiet/0", func() { serve(quiet) }},
		remedy{[]doctor.Fault{"shim_silent"}, "frozen/0", func() { resume(t, shims["frozen"]) }},
		remedy{[]doctor.Fault{"shim_stopped"}, "stopped/0", func() { beside(lives, "stopped") }},
		remedy{[]doctor.Fault{"lease_none"}, "forgotten/0", func() { run("workers", "clear", "forgotten") }},
		remedy{[]doctor.Fault{"lease_none"}, "unleased/0", func() { beside(harness.StartSimEngine(t), "unleased") }},
		remedy{[]doctor.Fault{"block_sizes"}, "model m", func() {}}, // the shim above has the size of the other shims
		remedy{[]doctor.Fault{"worker_expired"}, "killed/0", func() { run("workers", "remove", "killed") }},
	)
}

// doctorsTokenizers has a node with an unreachable tokenizer.
func doctorsTokenizers(t *testing.T, s *staged) {
	file := filepath.Join(t.TempDir(), "tokenizers.yaml")
	write := func(url string) {
		t.Helper()
		if err := os.WriteFile(file, []byte("models:\n  m: {tokenize: \""+url+"\"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("http://" + loopback.Reserve(t))
	data := t.TempDir()
	x := harness.StartIndexer(t, data, "", "--tokenizers", file)
	e := harness.StartSimEngine(t)
	harness.StartSimShim(t, e, x.NATS, "w")
	harness.ServePrompt(t, e, harness.Tokens(1, 4*harness.BlockSize))
	args := []string{"--nats", x.NATS}
	s.await(t, []symptom{{"tokenizer_failed", "model m", "--tokenizers"},
		{"node_problem", "model m", "--tokenizers"}}, nil, args...)
	url, _, _ := startTokenizer(t, harness.Tokens(1, 4*harness.BlockSize))
	s.mend(t, args, remedy{[]doctor.Fault{"tokenizer_failed", "node_problem"}, "", func() {
		write(url)
		x.Kill()
		harness.StartIndexer(t, data, x.NATS, "--tokenizers", file)
	}})
}

// doctorsStores has workers with shared stores.
func doctorsStores(t *testing.T, s *staged) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	nobody := loopback.Reserve(t)
	shims := map[string]*harness.Process{}
	shim := func(name, model, naming string) *enginesim.Engine {
		t.Helper()
		_, port, _ := strings.Cut(nobody, ":")
		text := `{"vllm_mooncake_store":{"model_name":"m","tp_size":1,"pp_size":1,"num_kv_heads":8,` +
			`"groups":[{"kind":"full","block_size":16}],"hash_block_size":16,"scheduler_block_size":16,` + naming +
			`"master_server_address":"127.0.0.1:50051","master_metrics_port":` + port + `}}`
		file := filepath.Join(t.TempDir(), "l3.json")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		e := harness.StartSimEngine(t)
		if shims[name] != nil {
			shims[name].Kill()
		}
		shims[name] = harness.StartSimShim(t, e, x.NATS, name, "--model", model, "--l3-config", file)
		harness.ServePrompt(t, e, harness.Tokens(1, 4*harness.BlockSize))
		x.WaitDepth(t, model, harness.Tokens(1, 4*harness.BlockSize), name, 4)
		return e
	}
	shim("seed-0", "seeds", `"engine_version":"0.32.0","hash_seed":"0",`)
	shim("seed-1", "seeds", `"engine_version":"0.32.0","hash_seed":"1",`)
	shim("unseeded", "unseeded", `"engine_version":"0.9.2",`)
	shim("alone", "alone", `"engine_version":"0.32.0","hash_seed":"0",`)
	args := []string{"--nats", x.NATS}
	ask := func() { // looks up the rest in the store
		x.Query(t, "--model", "alone", "--tokens", harness.CommaList(harness.Tokens(1, 8*harness.BlockSize)))
	}
	s.await(t, []symptom{
		{"store_names", "model seeds", "PYTHONHASHSEED"}, {"store_uncredited", "unseeded/0", "hash_seed"},
		{"store_down", "store 127.0.0.1:", "--l3-config"},
	}, ask, args...)
	s.mend(t, args,
		remedy{[]doctor.Fault{"store_names"}, "model seeds", func() {
			shim("seed-1", "seeds", `"engine_version":"0.32.0","hash_seed":"0",`)
		}},
		remedy{[]doctor.Fault{"store_uncredited"}, "unseeded/0", func() {
			shim("unseeded", "unseeded", `"engine_version":"0.32.0","hash_seed":"0",`)
		}},
		remedy{[]doctor.Fault{"store_down"}, "store ", func() {
			master, err := mastersim.Start(nobody)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(master.Stop)
			harness.Eventually(t, "the store gets another request", func() (bool, string) {
				ask()
				l3 := harness.Status(t, x.NATS).L3
				return len(l3) > 0 && l3[0].Down == "", fmt.Sprint(l3)
			})
		}})
}

// doctorsEngines is about the engines' HTTP APIs.
func doctorsEngines(t *testing.T, s *staged) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	start := func(name, endpoint string) *enginesim.Engine {
		t.Helper()
		e := harness.StartSimEngine(t)
		harness.StartSimShim(t, e, x.NATS, name, "--serving-endpoint", endpoint)
		harness.ServePrompt(t, e, harness.Tokens(1, 4*harness.BlockSize))
		x.WaitDepth(t, "m", harness.Tokens(1, 4*harness.BlockSize), name, 4)
		return e
	}
	shims := map[string]*harness.Process{}
	rank := func(e *enginesim.Engine, name, endpoint string, more ...string) {
		t.Helper()
		if shims[name] != nil {
			shims[name].Kill()
		}
		shims[name] = harness.StartSimShim(t, e, x.NATS, name, append(more, "--serving-endpoint", endpoint)...)
		shims[name].WaitFor("msg=registered")
	}
	silent, stranger, other, adapters := startEngineAPI(t), startEngineAPI(t), startEngineAPI(t), startEngineAPI(t)
	silent.says(map[string]string{"/kv_event_sources": `{"0":{"enable_kv_cache_events":false}}`,
		"/version": `{"version":"0.32.0"}`})
	hidden := start("silent", silent.URL)
	away := start("away", "http://"+loopback.Reserve(t))
	stranger.says(map[string]string{"/": "hello"})
	start("stranger", stranger.URL)
	sglang := func(version, more string) {
		adapters.says(map[string]string{"/server_info": `{"version":"` + version + `","served_model_name":"m",` +
			`"page_size":16,"dp_size":1,"enable_lora":true,"kv_events_config":"{\"publisher\":\"zmq\",` + more +
			`\"endpoint\":\"tcp://*:1\",\"replay_endpoint\":\"tcp://*:2\"}"}`})
	}
	sglang("0.5.22", "")
	start("adapters", adapters.URL)
	wide := func(r events.Rank) *enginesim.Engine { return startRank(t, r, 32) }
	first, second := wide(0), wide(1)
	rank(first, "other", other.URL)
	other.vllm("another", 32, first, second)
	other.mu.Lock()
	other.answers["/kv_event_sources"] = strings.ReplaceAll(other.answers["/kv_event_sources"], "replay_endpoint", "none")
	other.mu.Unlock()
	args := []string{"--nats", x.NATS}
	s.await(t, []symptom{
		{"engine_no_events", "silent at ", "enable_kv_cache_events"},
		{"engine_unreachable", "away at ", "change --endpoint URL away"},
		{"engine_unknown", "stranger at ", "--engine-http-token-file"}, {"engine_block_size", "other at ", "--block-size 32"},
		{"engine_model", "other at ", "--model another"}, {"engine_no_replay", "other at ", "replay_endpoint"},
		{"ranks_without_shim", "other at ", "--ranks 2"}, {"engine_unnamed_adapters", "adapters at ", "0.5.23"},
	}, nil, args...)
	front := startEngineAPI(t)
	front.vllm("m", 16, away)
	s.mend(t, args,
		remedy{[]doctor.Fault{"engine_no_events"}, "silent at ", func() { silent.vllm("m", 16, hidden) }},
		remedy{[]doctor.Fault{"engine_unreachable"}, "away at ", func() {
			if r := harness.Run(t, "indexer", append([]string{"workers", "change", "--endpoint", front.URL, "away"},
				args...)...); r.Code != 0 {
				t.Fatalf("%+v", r)
			}
		}},
		remedy{[]doctor.Fault{"engine_unknown"}, "stranger at ", func() { stranger.vllm("m", 16, hidden) }},
		remedy{[]doctor.Fault{"engine_unnamed_adapters"}, "adapters at ", func() { sglang("0.5.23", "") }},
		remedy{[]doctor.Fault{"engine_block_size", "engine_model", "engine_no_replay", "ranks_without_shim"}, "other at ",
			func() {
				other.vllm("another", 32, first, second) // started again with replay endpoints
				shims["other"].Kill()
				harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine-http", other.URL, "--worker", "other",
					"--model", "another").WaitFor("msg=registered")
			}},
	)
}
