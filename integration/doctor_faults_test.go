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
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// unstaged are the faults that no processes here can be brought to, each with why: internal/operate/doctor provokes
// them at the check, with the facts that it would have.
var unstaged = map[doctor.Fault]string{
	"nats_far":               "loopback is near",
	"jetstream_down":         "a cluster without a majority",
	"jetstream_old":          "a server before 2.12",
	"namespace_version":      "a record of a version to come",
	"stream_leaderless":      "a cluster of NATS servers",
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
	mu          sync.Mutex
	all, mended map[doctor.Fault]bool
}

// symptom is a finding that is waited for.
type symptom struct {
	id     doctor.Fault // of the finding, or of what it leads to
	where  string       // is in the finding's place
	remedy string       // is in its remedy
}

// await examines until all symptoms are found, each with evidence. The exit status is that of the worst.
func (s *staged) await(t *testing.T, want []symptom, before func(), args ...string) {
	t.Helper()
	var all []doctor.Finding
	harness.Eventually(t, fmt.Sprint("the doctor finds ", want), func() (bool, string) {
		if before != nil {
			before()
		}
		r, report := examine(t, args...)
		all = append(report.Findings(doctor.Error), report.Findings(doctor.Warning)...)
		var missing []symptom
		for _, w := range want {
			if !slices.ContainsFunc(all, func(f doctor.Finding) bool {
				return (f.ID == w.id || slices.Contains(f.Causes, w.id)) && strings.Contains(f.Where, w.where) &&
					strings.Contains(f.Remedy, w.remedy) && f.What != "" && f.Evidence != ""
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
	for _, f := range all {
		for _, id := range f.Causes {
			s.provoked(symptom{id: id})
		}
	}
}

func (s *staged) provoked(list ...symptom) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range list {
		s.all[w.id] = true
	}
}

// TestDoctorFindsFaults brings NATS servers, nodes, shims and engines into all states that the doctor knows, but for
// those that are listed above with why they are not. Then it does what the advice of each finding says, and the finding
// disappears.
func TestDoctorFindsFaults(t *testing.T) {
	t.Parallel()
	s := &staged{all: map[doctor.Fault]bool{}, mended: map[doctor.Fault]bool{}}
	whole := t.Run("all", func(t *testing.T) {
		for name, stage := range map[string]func(*testing.T, *staged){
			"nats": doctorsNATS, "streams": doctorsStreams, "fleet": doctorsFleet, "stores": doctorsStores,
			"engines": doctorsEngines, "sources": doctorsSources, "claims": doctorsClaims, "tokenizers": doctorsTokenizers,
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
		if s.all[id] != s.mended[id] {
			t.Errorf("%s: provoked %v, its advice carried out %v", id, s.all[id], s.mended[id])
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
	unheard := "tcp://" + loopback.Reserve(t)
	for master, endpoint := range map[*mastersim.Master]string{silent: published, absent: unheard} {
		harness.Start(t, "worker-shim", "run", "--source", "mooncake", "--engine", endpoint, "--master", master.Addr(),
			"--nats", x.NATS, "--silence", "100ms")
	}
	args := []string{"--nats", x.NATS}
	s.await(t, []symptom{{"source_silent", "for store " + silent.Addr(), "a master without writes"},
		{"source_unreachable", "for store " + absent.Addr(), "publishes events at --engine"}}, nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"source_silent"}, silent.Addr(), func() { silent.Put("an object") }},
		remedy{[]doctor.Fault{"source_unreachable"}, absent.Addr(), func() {
			if _, err := absent.Publish(t.Context(), unheard); err != nil {
				t.Fatal(err)
			}
			if err := absent.WaitSubscribers(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			absent.Put("an object")
		}})
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", "ipc://"+t.TempDir()+"/shim", "--listen",
		"--worker", "w", "--model", "m", "--block-size", "16", "--lease", "1s")
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
	s.await(t, []symptom{{"several_engines", "w/0", "without --worker"}, {"copies_skipped", "w/0", "chunk"}}, nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"several_engines", "copies_skipped"}, "w/0", func() {
		shim.Stop()
		harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", "ipc://"+t.TempDir()+"/shim", "--listen",
			"--model", "m", "--block-size", "16").WaitFor("msg=")
	}})
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
	flag, file := m.login(nodeUser)
	args := []string{"--namespace", "a", "--nats", m.addr, flag, file, "--nats-inbox-prefix", "_INBOX_node"}
	s.await(t, []symptom{{"model_unclaimed", "w1/0", "--model"}}, nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"model_unclaimed", "worker_none"}, "", func() {
		stop()
		<-done
		flag, file := m.login(shimUser)
		harness.StartSimShim(t, harness.StartSimEngine(t), m.addr, "w1", "--namespace", "a", "--model", "m1", flag, file,
			"--nats-inbox-prefix", "_INBOX_"+shimUser).WaitFor("msg=registered")
	}})
}

func doctorsNATS(t *testing.T, s *staged) {
	server := &confNATS{t: t, addr: loopback.Reserve(t)}
	jetstreamIn := fmt.Sprintf("jetstream { store_dir: %q }\n", t.TempDir())
	args := []string{"--nats", server.addr}
	s.await(t, []symptom{{"nats_unreachable", server.addr, "nats-server -js"}}, nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"nats_unreachable"}, "", func() { server.start(jetstreamIn) }})
	s.await(t, []symptom{{"namespace_missing", "default", "indexer serve --nats " + server.addr + " --namespace default"}},
		nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"namespace_missing", "node_none"}, "default", func() {
		harness.Start(t, "indexer", "serve", "--nats", server.addr, "--namespace", "default", "--http-listen", "",
			"--partitions", "2", "--log-bytes", "10000000").
			WaitFor(`msg=ready`)
	}})
	users := &confNATS{t: t, addr: loopback.Reserve(t)}
	users.start("authorization { user: a, password: b }\n")
	s.await(t, []symptom{{"nats_refused", "", "--nats-user with NATS_PASSWORD"}}, nil, "--nats", users.addr)
	s.mend(t, []string{"--nats", users.addr, "--nats-user", "a", "--nats-password", "b"},
		remedy{[]doctor.Fault{"nats_refused"}, "", func() {}})
	bare := &confNATS{t: t, addr: loopback.Reserve(t)}
	bare.start("max_payload: 65536\n")
	args = []string{"--nats", bare.addr}
	s.await(t, []symptom{{"jetstream_off", "judge", "jetstream {}"}, {"nats_payload", "judge", "max_payload: "}}, nil,
		args...)
	s.mend(t, args, remedy{[]doctor.Fault{"jetstream_off", "nats_payload"}, "judge", func() {
		bare.start(fmt.Sprintf("max_payload: %d\njetstream { store_dir: %q }\n", jetstream.MessageRoom, t.TempDir()))
	}})

	// An account with little room.
	small := &confNATS{t: t, addr: loopback.Reserve(t)}
	store := fmt.Sprintf("jetstream { store_dir: %q, max_file_store: 100G }\n", t.TempDir())
	limits := func(streams, bytes int) string {
		return store + fmt.Sprintf("accounts { A { jetstream: { max_streams: %d, max_file: %d }, "+
			"users: [ { user: a, password: b } ] } }", streams, bytes)
	}
	small.start(limits(10, 2_000_000))
	user := []string{"--nats", small.addr, "--nats-user", "a", "--nats-password", "b"}
	admin := adminOf(t, jetstream.ConnOptions{URLs: []string{"nats://" + small.addr}, User: "a", Password: "b", Core: true})
	admin.call("STREAM.CREATE.fill", map[string]any{"name": "fill", "subjects": []string{"fill"}, "storage": "file"})
	for range 2 {
		admin.publish("fill", 950_000)
	}
	s.await(t, []symptom{{"jetstream_storage", "judge", "max_file"}}, nil, user...)
	s.mend(t, user, remedy{[]doctor.Fault{"jetstream_storage"}, "judge", func() { small.start(limits(10, 50<<30)) }})
	harness.Start(t, "indexer", append([]string{"serve", "--http-listen", "", "--partitions", "8"}, user...)...).
		WaitFor(`max|limit|storage|resources`)
	s.await(t, []symptom{{"namespace_streams", "default", "max_streams: 12"}}, nil, user...)
	s.mend(t, user, remedy{[]doctor.Fault{"namespace_streams", "node_none"}, "default", func() {
		small.start(limits(13, 50<<30)) // the account has the stream that filled it too
		harness.Start(t, "indexer", append([]string{"serve", "--http-listen", "", "--partitions", "8"}, user...)...).
			WaitFor(`msg=ready`)
	}})
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
	serve := func(id string, more ...string) {
		t.Helper()
		if nodes[id] != nil {
			nodes[id].Kill()
		}
		nodes[id] = harness.Start(t, "indexer", append([]string{"serve", "--nats", nats, "--node-id", id, "--partitions", "2",
			"--http-listen", ""}, more...)...)
		nodes[id].WaitFor(`msg=ready`)
	}
	serve("node-a", "--zone", "rack-1")
	serve("node-b")
	args := []string{"--nats", nats}
	s.await(t, []symptom{{"worker_none", "default", "worker-shim run"}, {"node_without_zone", "default", "--zone"}}, nil,
		args...)
	s.mend(t, args, remedy{[]doctor.Fault{"node_without_zone"}, "default", func() { serve("node-b", "--zone", "rack-2") }},
		remedy{[]doctor.Fault{"worker_none"}, "default", func() {
			harness.StartSimShim(t, harness.StartSimEngine(t), nats, "w").WaitFor("msg=registered")
		}})

	// A host whose clock is a minute behind.
	ctx, cancel := context.WithTimeout(context.Background(), 2*harness.Patience)
	defer cancel()
	options := jetstream.ConnOptions{URLs: []string{"nats://" + nats}, Core: true}
	clocks := func(offset time.Duration) *doctor.Report {
		return doctor.Examine(ctx, doctor.Config{Namespace: "default", Shown: nats, Timeout: harness.Patience,
			Now:     func() time.Time { return time.Now().Add(offset) },
			Connect: func(ctx context.Context) (*jetstream.Conn, error) { return jetstream.Connect(ctx, options) }})
	}
	harness.Eventually(t, "all clocks are found ahead", func() (bool, string) { // once nodes know each other
		r := clocks(-time.Minute)
		for _, of := range []string{"NATS server ", "node node-a", "node node-b"} {
			if f := found(*r, doctor.Error, "clocks", of); f == nil || f.ID != "clock_offset" ||
				!strings.Contains(f.Evidence, "ahead of") || !strings.Contains(f.Remedy, "chrony") {
				return false, fmt.Sprintf("%s: %+v", of, r)
			}
		}
		return true, ""
	})
	s.provoked(symptom{id: "clock_offset"})
	s.mend(t, args, remedy{[]doctor.Fault{"clock_offset"}, "", func() {}}) // with this host's clock, which is right

	nodes["node-b"].Kill()
	s.await(t, []symptom{{"node_silent", "node-b", "indexer serve --nats " + nats + " --node-id node-b"}}, nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"node_silent"}, "node-b", func() { serve("node-b", "--zone", "rack-2") }})

	admin := adminOf(t, options)
	log, other := jetstream.StreamName("default", 0), jetstream.StreamName("default", 1)
	admin.change(log, map[string]any{"max_msgs_per_subject": 5})
	admin.change(other, map[string]any{"allow_direct": false, "allow_atomic": false})
	admin.change("KV_kvatlas_default_snap", map[string]any{"max_bytes": 20_000})
	admin.change("KV_kvatlas_default_workers", map[string]any{"allow_rollup_hdrs": true})
	s.await(t, []symptom{{"stream_changed", log, "nats stream rm " + log},
		{"stream_no_direct_gets", other, "restart an indexer"},
		{"stream_no_batches", other, "restart an indexer"}, {"stream_rollups", "workers", "restart an indexer"},
		{"bucket_full", "snap", "--snapshot-bytes"}},
		func() { admin.publish("$KV.kvatlas_default_snap.fill", 19_000) }, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"stream_changed", "stream_no_direct_gets", "stream_no_batches", "stream_rollups",
		"bucket_full"}, "", func() {
		for _, node := range nodes {
			node.Kill()
		}
		admin.call("STREAM.DELETE."+log, nil)
		for id, zone := range map[string]string{"node-a": "rack-1", "node-b": "rack-2"} {
			serve(id, "--zone", zone, "--snapshot-bytes", "1000000")
		}
	}})
	for _, node := range nodes {
		node.Kill()
	}
	admin.call("STREAM.DELETE."+log, nil)
	s.await(t, []symptom{{"node_none", "default", "indexer serve --nats " + nats}}, nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"node_none", "stream_missing"}, "", func() {
		serve("node-a", "--zone", "rack-1")
	}})
	nodes["node-a"].Kill()
	admin.call("STREAM.PURGE.KV_kvatlas_default", map[string]any{"filter": "$KV.kvatlas_default.namespace"})
	admin.publish("$KV.kvatlas_default.namespace", 10)
	s.await(t, []symptom{{"namespace_record", "default", "--restore-namespace"}}, nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"namespace_record"}, "", func() {
		serve("node-a", "--zone", "rack-1", "--restore-namespace")
	}})
}

// doctorsFleet is of shims beside engines that are not as they should be.
func doctorsFleet(t *testing.T, s *staged) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx, cancel := context.WithTimeout(context.Background(), 4*harness.Patience)
	defer cancel()
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	next := 0
	serve := func(e *enginesim.Engine) {
		t.Helper()
		next++
		harness.ServePrompt(t, e, harness.Tokens(1000*next, 4*harness.BlockSize))
	}
	shims := map[string]*harness.Process{}
	beside := func(e *enginesim.Engine, name string, more ...string) { // in place of the shim that it has
		t.Helper()
		if shims[name] != nil {
			shims[name].Kill()
		}
		shims[name] = harness.StartSimShim(t, e, x.NATS, name, more...)
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
	shims["noreplay"] = harness.Start(t, "worker-shim", "run", "--engine", deaf.Endpoint(), "--worker", "noreplay",
		"--model", "m", "--block-size", "16", "--nats", x.NATS)
	late, err := enginesim.Start(t.Context(), enginesim.Config{Buffer: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(late.Stop)
	serve(late) // more than it keeps for a replay
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
		{"messages_lost", "lossy/0", "buffer_steps"}, {"engine_gone", "gone/0", "start it again"},
		{"engine_quiet", "quiet/0", "enable_kv_cache_events"}, {"shim_silent", "frozen/0", "--shim frozen"},
		{"shim_stopped", "stopped/0", "again"},
		{"lease_none", "unleased/0", "forget unleased"}, {"block_sizes", "model m", "--block-size"},
		{"worker_expired", "killed/0", "workers remove killed"},
	}, func() { // engines go on, so that shims find out
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
			beside(harness.StartSimEngine(t), "noreplay") // which has a replay endpoint
		}},
		remedy{[]doctor.Fault{"joined_late"}, "late/0", func() {
			late.Stop()
			beside(harness.StartSimEngine(t), "late") // which keeps more, and has said nothing yet
		}},
		remedy{[]doctor.Fault{"replay_dead"}, "dead/0", func() { beside(dead, "dead") }},
		remedy{[]doctor.Fault{"engine_unusable", "events_skipped", "worker_incomplete"}, "wide/0", func() {
			shims["wide"].Stop()
			shims["wide"] = harness.StartSimShim(t, narrow, x.NATS, "wide", "--model", "wide")
			shims["wide"].WaitFor("forget --model wide")
			run("forget", "wide")
			run("forget", "--model", "wide")
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
		remedy{[]doctor.Fault{"lease_none"}, "forgotten/0", func() { run("forget", "forgotten") }},
		remedy{[]doctor.Fault{"lease_none"}, "unleased/0", func() { beside(harness.StartSimEngine(t), "unleased") }},
		remedy{[]doctor.Fault{"block_sizes"}, "model m", func() {}}, // the shim above has the size of the others
		remedy{[]doctor.Fault{"worker_expired"}, "killed/0", func() { run("workers", "remove", "killed") }},
	)
}

// doctorsTokenizers has a node that asks for tokens where nobody makes them.
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

// doctorsStores is of workers that share stores.
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
	ask := func() { // the store is asked for the rest
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
			harness.Eventually(t, "the store is asked again", func() (bool, string) {
				ask()
				l3 := harness.Status(t, x.NATS).L3
				return len(l3) > 0 && l3[0].Down == "", fmt.Sprint(l3)
			})
		}})
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
