package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/doctor"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// unstaged are the faults that no processes here can be brought to, each with why: internal/doctor provokes them at the
// check, with the facts that it would have.
var unstaged = map[doctor.Fault]string{
	"nats_far":               "loopback is near",
	"jetstream_down":         "a cluster without a majority",
	"jetstream_old":          "a server before 2.12",
	"namespace_version":      "a record of a version to come",
	"stream_unwritable":      "a disk that is full",
	"stream_replicas_behind": "a cluster of NATS servers",
	"stream_replicas_differ": "a cluster of NATS servers",
	"node_not_ready":         "it lasts for a moment",
	"node_warning":           "a port that other hosts can reach",
	"partitions_unserved":    "nodes take over at once",
	"node_versions":          "two releases",
	"zone_shared":            "it lasts for a moment",
	"replicas_unequal":       "a bug",
	"replicas_apart":         "it lasts for a moment",
	"workers_missing":        "nodes take over at once",
	"lease_expired":          "it lasts until the rank is cleared",
	"engine_silent":          "an engine that keeps a connection and says nothing",
	"shim_waiting":           "a log that takes nothing",
	"store_busy":             "thousands of queries at once",
	"store_events":           "a store's own events",
}

// staged are the faults that processes were brought to, over all tests of this file.
type staged struct {
	mu  sync.Mutex
	all map[doctor.Fault]bool
}

// symptom is a finding that is waited for.
type symptom struct {
	id     doctor.Fault
	where  string // is in the finding's place
	remedy string // is in its remedy
}

// await examines until all symptoms are found, each with evidence. The exit status is that of the worst.
func (s *staged) await(t *testing.T, want []symptom, before func(), args ...string) {
	t.Helper()
	harness.Eventually(t, fmt.Sprint("the doctor finds ", want), func() (bool, string) {
		if before != nil {
			before()
		}
		r, report := examine(t, args...)
		all := append(report.Findings(doctor.Error), report.Findings(doctor.Warning)...)
		var missing []symptom
		for _, w := range want {
			if !slices.ContainsFunc(all, func(f doctor.Finding) bool {
				return f.ID == w.id && strings.Contains(f.Where, w.where) && strings.Contains(f.Remedy, w.remedy) &&
					f.What != "" && f.Evidence != ""
			}) {
				missing = append(missing, w)
			}
		}
		status := 0
		switch {
		case len(report.Findings(doctor.Error)) > 0:
			status = 1
		case len(report.Unable()) > 0:
			status = 3
		}
		return len(missing) == 0 && r.Code == status, fmt.Sprintf("missing %v, status %d, not %d\n%s%s", missing, r.Code,
			status, r.Stdout, r.Stderr)
	})
	s.provoked(want...)
}

func (s *staged) provoked(list ...symptom) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range list {
		s.all[w.id] = true
	}
}

// TestDoctorFindsFaults brings NATS servers, nodes, shims and engines into all states that the doctor knows, but for
// those that are listed above with why they are not.
func TestDoctorFindsFaults(t *testing.T) {
	t.Parallel()
	s := &staged{all: map[doctor.Fault]bool{}}
	whole := t.Run("all", func(t *testing.T) {
		for name, stage := range map[string]func(*testing.T, *staged){
			"nats": doctorsNATS, "streams": doctorsStreams, "fleet": doctorsFleet, "stores": doctorsStores,
			"engines": doctorsEngines, "sources": doctorsSources, "claims": doctorsClaims,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				stage(t, s)
			})
		}
	})
	if !whole {
		return
	}
	for _, id := range doctor.Faults() {
		if why, excused := unstaged[id]; excused == s.all[id] {
			t.Errorf("%s: provoked %v, excused %q", id, s.all[id], why)
		}
	}
}

// doctorsSources has an engine store copies that are no whole blocks, and another engine speak at the same shim. The
// masters of two stores are silent, and not reached.
func doctorsSources(t *testing.T, s *staged) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	silent, absent := startMaster(t), startMaster(t)
	published, err := silent.Publish(t.Context(), "tcp://"+loopback.Reserve(t))
	if err != nil {
		t.Fatal(err)
	}
	for master, endpoint := range map[*mastersim.Master]string{silent: published, absent: "tcp://" + loopback.Reserve(t)} {
		harness.Start(t, "worker-shim", "run", "--source", "mooncake", "--engine", endpoint, "--master", master.Addr(),
			"--nats", x.NATS, "--silence", "100ms")
	}
	s.await(t, []symptom{{"source_silent", "for store " + silent.Addr(), "a master without writes"},
		{"source_unreachable", "for store " + absent.Addr(), "publishes events at --engine"}}, nil, "--nats", x.NATS)
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", "ipc://"+t.TempDir()+"/shim", "--listen",
		"--worker", "w", "--model", "m", "--block-size", "16")
	shim.WaitFor("msg=registered")
	stored := func(name, tokens int, medium string) []any {
		return []any{"BlockStored", []int{name}, nil, harness.Tokens(1, tokens), tokens, nil, medium}
	}
	endpoint := "ipc://" + shim.WaitFor(`engine=ipc://(\S+)`)[1]
	for i, topic := range []string{"kv@10.0.0.1@m", "kv@10.0.0.2@m"} {
		pub := dialIn(t, endpoint)
		payload := msgpackOf(t, []any{1.0, []any{stored(i+1, 16, "GPU"), stored(i+10, 24, "CPU")}, 0})
		if err := pub.Send([]byte(topic), number(0), payload); err != nil {
			t.Fatal(err)
		}
		x.WaitDepth(t, "m", harness.Tokens(1, 16), "w", 1)
	}
	s.await(t, []symptom{{"several_engines", "w/0", ""}, {"copies_skipped", "w/0", "chunk"}}, nil, "--nats", x.NATS)
}

// doctorsClaims has the shim of a worker take a lease with a model that its key does not permit.
func doctorsClaims(t *testing.T, s *staged) {
	m := startMatrix(t, "standalone", nil)
	conn, err := jetstream.Connect(t.Context(), jetstream.ConnOptions{URLs: []string{"nats://" + m.addr},
		NkeyFile: filepath.Join(m.dir, "a-"+shimUser+".nk"), InboxPrefix: "_INBOX_" + shimUser})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	ns, err := jetstream.OpenNamespace(t.Context(), conn, "a")
	if err != nil {
		t.Fatal(err)
	}
	lease, err := registry.NewLease(ns, registry.Record{Instance: "w1", Model: "m2", BlockSize: 16, Source: "vllm"},
		registry.LeaseHooks{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- lease.Keep(ctx, func() {}) }()
	defer func() { stop(); <-done }()
	flag, file := m.login(nodeUser)
	s.await(t, []symptom{{"model_unclaimed", "w1/0", "--model"}}, nil, "--namespace", "a", "--nats", m.addr, flag, file,
		"--nats-inbox-prefix", "_INBOX_node")
}

func doctorsNATS(t *testing.T, s *staged) {
	store := fmt.Sprintf("jetstream { store_dir: %q }\n", t.TempDir())
	s.await(t, []symptom{{"nats_unreachable", "127.0.0.1:", "indexer serve"}}, nil, "--nats", loopback.Reserve(t))
	s.await(t, []symptom{{"nats_refused", "", "--nats-creds"}}, nil, "--nats",
		natsWith(t, "authorization { user: a, password: b }\n"))
	s.await(t, []symptom{{"jetstream_off", "judge", "jetstream: enabled"}, {"nats_payload", "judge", "max_payload: "}},
		nil, "--nats", natsWith(t, "max_payload: 65536\n"))

	// An account with little room.
	at := natsWith(t, store+
		`accounts { A { jetstream: { max_streams: 10, max_file: 2000000 }, users: [ { user: a, password: b } ] } }`)
	user := []string{"--nats", at, "--nats-user", "a", "--nats-password", "b"}
	s.await(t, []symptom{{"namespace_missing", "default", "--namespace default"},
		{"node_none", "default", "indexer serve"}}, nil, user...)
	admin := adminOf(t, jetstream.ConnOptions{URLs: []string{"nats://" + at}, User: "a", Password: "b", Core: true})
	admin.call("STREAM.CREATE.fill", map[string]any{"name": "fill", "subjects": []string{"fill"}, "storage": "file"})
	for range 2 {
		admin.publish("fill", 950_000)
	}
	s.await(t, []symptom{{"jetstream_storage", "judge", "max_file"}}, nil, user...)
	admin.call("STREAM.DELETE.fill", nil)
	harness.Start(t, "indexer", append([]string{"serve", "--http-listen", "", "--partitions", "8"}, user...)...).
		WaitFor(`max|limit|storage|resources`)
	s.await(t, []symptom{{"namespace_streams", "default", "max_streams: 12"}}, nil, user...)
}

// admin asks JetStream's API what no program of ours does.
type admin struct {
	*testing.T
	conn *jetstream.Conn
	ctx  context.Context
}

func adminOf(t *testing.T, o jetstream.ConnOptions) *admin {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 8*harness.Patience)
	t.Cleanup(cancel)
	o.Wait = true
	conn, err := jetstream.Connect(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return &admin{t, conn, ctx}
}

// call calls JetStream's API.
func (a *admin) call(verb string, args any) (answer map[string]any) {
	a.Helper()
	var body []byte
	if args != nil {
		var err error
		if body, err = json.Marshal(args); err != nil {
			a.Fatal(err)
		}
	}
	r, err := a.conn.Request(a.ctx, "$JS.API."+verb, "", body)
	if err == nil {
		err = json.Unmarshal(r.Body, &answer)
	}
	if err != nil || answer["error"] != nil {
		a.Fatalf("%s: %v, %v", verb, err, answer)
	}
	return answer
}

// change changes a stream's settings.
func (a *admin) change(stream string, settings map[string]any) {
	a.Helper()
	config := a.call("STREAM.INFO."+stream, nil)["config"].(map[string]any)
	for name, to := range settings {
		config[name] = to
	}
	a.call("STREAM.UPDATE."+stream, config)
}

func (a *admin) publish(subject string, bytes int) {
	a.Helper()
	if _, err := a.conn.Request(a.ctx, subject, "", make([]byte, bytes)); err != nil {
		a.Fatal(err)
	}
}

func doctorsStreams(t *testing.T, s *staged) {
	nats := harness.StartNATS(t)
	nodes := map[string]*harness.Process{}
	for id, zone := range map[string]string{"node-a": "rack-1", "node-b": ""} {
		nodes[id] = harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", id, "--partitions", "2",
			"--http-listen", "", "--zone", zone)
		nodes[id].WaitFor(`msg=ready`)
	}
	s.await(t, []symptom{{"worker_none", "default", "worker-shim run"}, {"node_without_zone", "default", "--zone"}}, nil,
		"--nats", nats)

	// A host whose clock is a minute behind.
	ctx, cancel := context.WithTimeout(context.Background(), 2*harness.Patience)
	defer cancel()
	options := jetstream.ConnOptions{URLs: []string{"nats://" + nats}, Core: true}
	harness.Eventually(t, "all clocks are found ahead", func() (bool, string) { // once nodes know each other
		r := doctor.Examine(ctx, doctor.Config{Namespace: "default", Shown: nats, Timeout: harness.Patience,
			Now:     func() time.Time { return time.Now().Add(-time.Minute) },
			Connect: func(ctx context.Context) (*jetstream.Conn, error) { return jetstream.Connect(ctx, options) }})
		for _, of := range []string{"NATS server ", "node node-a", "node node-b"} {
			if f := found(*r, doctor.Error, "clocks", of); f == nil || f.ID != "clock_offset" ||
				!strings.Contains(f.Evidence, "ahead of") || !strings.Contains(f.Remedy, "chrony") {
				return false, fmt.Sprintf("%s: %+v", of, r)
			}
		}
		return true, ""
	})
	s.provoked(symptom{id: "clock_offset"})

	nodes["node-b"].Kill()
	s.await(t, []symptom{{"node_silent", "node-b", "--node-id node-b"}}, nil, "--nats", nats)

	admin := adminOf(t, options)
	log := jetstream.StreamName("default", 0)
	admin.change(log, map[string]any{"max_msgs_per_subject": 5, "allow_direct": false, "allow_atomic": false})
	admin.change("KV_kvatlas_default_snap", map[string]any{"max_bytes": 20_000})
	admin.change("KV_kvatlas_default_workers", map[string]any{"allow_rollup_hdrs": true})
	s.await(t, []symptom{{"stream_changed", log, "nats stream rm"}, {"stream_no_direct_gets", log, "restart an indexer"},
		{"stream_no_batches", log, "restart an indexer"}, {"stream_rollups", "workers", "restart an indexer"},
		{"bucket_full", "snap", "--snapshot-bytes"}},
		func() { admin.publish("$KV.kvatlas_default_snap.fill", 19_000) }, "--nats", nats)
	nodes["node-a"].Kill()
	admin.call("STREAM.DELETE."+log, nil)
	s.await(t, []symptom{{"stream_missing", log, "an indexer serves"}, {"node_none", "default", "--nats"}}, nil,
		"--nats", nats)
	admin.call("STREAM.PURGE.KV_kvatlas_default", map[string]any{"filter": "$KV.kvatlas_default.namespace"})
	admin.publish("$KV.kvatlas_default.namespace", 10)
	s.await(t, []symptom{{"namespace_record", "default", "--restore-namespace"}}, nil, "--nats", nats)
}

// doctorsFleet is of shims beside engines that are not as they should be.
func doctorsFleet(t *testing.T, s *staged) {
	file := filepath.Join(t.TempDir(), "tokenizers.yaml")
	if err := os.WriteFile(file, []byte("models:\n  m: {tokenize: \"http://"+loopback.Reserve(t)+"\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	x := harness.StartIndexer(t, t.TempDir(), "", "--tokenizers", file)
	ctx, cancel := context.WithTimeout(context.Background(), 4*harness.Patience)
	defer cancel()
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	next := 0
	serve := func(e *enginesim.Engine) {
		t.Helper()
		next++
		harness.ServePrompt(t, e, harness.Tokens(1000*next, 4*harness.BlockSize))
	}
	held := func(name string, e *enginesim.Engine) { // a prompt of the engine's is known
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
	harness.Start(t, "worker-shim", "run", "--engine", deaf.Endpoint(), "--worker", "noreplay", "--model", "m",
		"--block-size", "16", "--nats", x.NATS)
	dead := harness.StartSimEngine(t)
	serve(dead)
	harness.StartSimShim(t, dead, x.NATS, "dead", "--replay", "tcp://"+loopback.Reserve(t))
	narrow := harness.StartSimEngine(t)
	harness.StartSimShim(t, narrow, x.NATS, "wide", "--model", "wide", "--block-size", "32")
	garbled := harness.StartSimEngine(t)
	harness.StartSimShim(t, garbled, x.NATS, "garbled")
	held("garbled", garbled)
	if err := garbled.Garble(); err != nil {
		t.Fatal(err)
	}
	lossy := harness.StartSimEngine(t)
	harness.StartSimShim(t, lossy, x.NATS, "lossy")
	held("lossy", lossy)
	lossy.Drop(1, false)
	serve(lossy)
	gone := harness.StartSimEngine(t)
	harness.StartSimShim(t, gone, x.NATS, "gone")
	held("gone", gone)
	gone.Crash()
	harness.StartSimShim(t, harness.StartSimEngine(t), x.NATS, "quiet")
	frozen := harness.StartSimEngine(t)
	shim := harness.StartSimShim(t, frozen, x.NATS, "frozen")
	held("frozen", frozen)
	if err := shim.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := harness.StartSimShim(t, harness.StartSimEngine(t), x.NATS, "stopped")
	stopped.WaitFor("msg=registered")
	stopped.Stop()
	killed := harness.StartSimShim(t, harness.StartSimEngine(t), x.NATS, "killed", "--lease", "1s")
	killed.WaitFor("msg=registered")
	killed.Kill()
	hasher, err := events.NewHasher(32, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	harness.PublishAs(t, ctx, ns, "unleased", &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 32,
		Events: []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1},
			Locals: hasher.Hash(nil, harness.Tokens(1, 32))}}})
	s.await(t, []symptom{
		{"shim_no_replay", "noreplay/0", "--replay"}, {"joined_late", "noreplay/0", "reset_prefix_cache"},
		{"replay_dead", "dead/0", "replay_endpoint"}, {"events_skipped", "wide/0", "--block-size"},
		{"engine_unusable", "wide/0", "--block-size"}, {"messages_unreadable", "garbled/0", "--source"},
		{"messages_lost", "lossy/0", "buffer_steps"}, {"engine_gone", "gone/0", "start it again"},
		{"engine_quiet", "quiet/0", "enable_kv_cache_events"}, {"shim_silent", "frozen/0", "--shim frozen"},
		{"shim_stopped", "stopped/0", "again"},
		{"lease_none", "unleased/0", "forget unleased"}, {"block_sizes", "model m", "--block-size"},
		{"worker_incomplete", "wide/0", "workers change wide"}, {"tokenizer_failed", "model m", "--tokenizers"},
		{"node_problem", "node ", ""}, {"worker_expired", "killed/0", "workers remove killed"},
	}, func() { // engines go on, so that shims find out
		serve(deaf)
		serve(dead)
		serve(narrow)
		serve(lossy)
	}, "--nats", x.NATS)
}

// doctorsStores is of workers that share stores.
func doctorsStores(t *testing.T, s *staged) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	nobody := loopback.Reserve(t)
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
		harness.StartSimShim(t, e, x.NATS, name, "--model", model, "--l3-config", file)
		harness.ServePrompt(t, e, harness.Tokens(1, 4*harness.BlockSize))
		x.WaitDepth(t, model, harness.Tokens(1, 4*harness.BlockSize), name, 4)
		return e
	}
	shim("seed-0", "seeds", `"engine_version":"0.32.0","hash_seed":"0",`)
	shim("seed-1", "seeds", `"engine_version":"0.32.0","hash_seed":"1",`)
	shim("unseeded", "unseeded", `"engine_version":"0.9.2",`)
	shim("alone", "alone", `"engine_version":"0.32.0","hash_seed":"0",`)
	s.await(t, []symptom{
		{"store_names", "model seeds", "PYTHONHASHSEED"}, {"store_uncredited", "unseeded/0", "hash_seed"},
		{"store_down", "store 127.0.0.1:", "--l3-config"},
	}, func() { // the store is asked for the rest
		x.Query(t, "--model", "alone", "--tokens", harness.CommaList(harness.Tokens(1, 8*harness.BlockSize)))
	}, "--nats", x.NATS)
}

// doctorsEngines is of what engines say over HTTP.
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
	silent, stranger, other := startEngineAPI(t), startEngineAPI(t), startEngineAPI(t)
	silent.says(map[string]string{"/kv_event_sources": `{"0":{"enable_kv_cache_events":false}}`,
		"/version": `{"version":"0.32.0"}`})
	stranger.says(map[string]string{"/": "hello"})
	start("silent", silent.URL)
	start("away", "http://"+loopback.Reserve(t))
	start("stranger", stranger.URL)
	adapters := startEngineAPI(t)
	adapters.says(map[string]string{"/server_info": `{"version":"0.5.22","served_model_name":"m","page_size":16,` +
		`"dp_size":1,"enable_lora":true,"kv_events_config":"{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:1\"}"}`})
	start("adapters", adapters.URL)
	e := start("other", other.URL)
	other.vllm("another", 32, e, e)
	other.mu.Lock()
	other.answers["/kv_event_sources"] = strings.ReplaceAll(other.answers["/kv_event_sources"], "replay_endpoint", "none")
	other.mu.Unlock()
	s.await(t, []symptom{
		{"engine_no_events", "silent at ", "enable_kv_cache_events"},
		{"engine_unreachable", "away at ", "change --endpoint URL away"},
		{"engine_unknown", "stranger at ", "--engine-http-token-file"}, {"engine_block_size", "other at ", "--block-size 32"},
		{"engine_model", "other at ", "--model another"}, {"engine_no_replay", "other at ", "replay_endpoint"},
		{"ranks_without_shim", "other at ", "--ranks 2"}, {"engine_unnamed_adapters", "adapters at ", "0.5.23"},
	}, nil, "--nats", x.NATS)
}
