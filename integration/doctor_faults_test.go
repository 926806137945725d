package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// unstaged are the faults that processes of a test cannot cause, with the reason. internal/operate/doctor tests such
// faults with facts.
var unstaged = map[doctor.Fault]string{
	"nats_far":               "loopback is near",
	"jetstream_down":         "a cluster without a majority",
	"jetstream_old":          "a server before 2.12",
	"namespace_version":      "a record of a version to come",
	"stream_leaderless":      "a cluster of NATS servers",
	"stream_unwritable":      "a disk that is full",
	"stream_replicas_behind": "a cluster of NATS servers",
	"stream_replicas_differ": "a cluster of NATS servers",
	"node_not_ready":         "lasts for a moment",
	"node_warning":           "a port that other hosts can reach",
	"partitions_unserved":    "nodes take over at once",
	"node_versions":          "two releases",
	"zone_shared":            "lasts for a moment",
	"replicas_unequal":       "a bug",
	"replicas_apart":         "lasts for a moment",
	"workers_missing":        "nodes take over at once",
	"lease_expired":          "lasts until the rank is cleared",
	"engine_silent":          "a silent engine with an open connection",
	"shim_waiting":           "a refusing log",
	"store_busy":             "thousands of queries at once",
	"recording_failing":      "a stream without room, on a server with room",
	"recording_dropped":      "8 MiB of records in an outage",
	"store_events":           "a store's own events",
}

// staged are the faults that processes have caused, over all tests of this file.
type staged struct {
	mu          sync.Mutex
	all, mended map[doctor.Fault]bool
}

// symptom is an expected finding.
type symptom struct {
	id     doctor.Fault // of the finding, or of a consequence
	where  string       // is in the finding's place
	remedy string       // part of the remedy
}

// await runs the doctor until all symptoms are found, with evidence. The exit status is that of the worst finding.
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

// TestDoctorFindsFaults brings NATS servers, nodes, shims and engines into all states of the doctor, except for the
// states above. Then the test follows the advice of every finding, and the finding disappears.
func TestDoctorFindsFaults(t *testing.T) {
	t.Parallel()
	s := &staged{all: map[doctor.Fault]bool{}, mended: map[doctor.Fault]bool{}}
	var stages testkit.Group
	for name, stage := range map[string]func(*testing.T, *staged){
		"nats": doctorsNATS, "streams": doctorsStreams, "fleet": doctorsFleet, "stores": doctorsStores,
		"engines": doctorsEngines, "sources": doctorsSources, "claims": doctorsClaims, "tokenizers": doctorsTokenizers,
		"recording": doctorsRecording,
	} {
		stages.Run(t, name, func(t *testing.T) { stage(t, s) })
	}
	if stages.Wait(); t.Failed() {
		return
	}
	for _, f := range doctor.Faults() {
		id := f.ID
		if why, excused := unstaged[id]; excused == s.all[id] {
			t.Errorf("%s: provoked %v, excused %q", id, s.all[id], why)
		}
		if s.all[id] != s.mended[id] {
			t.Errorf("%s: caused %v, advice followed %v", id, s.all[id], s.mended[id])
		}
	}
}

// doctorsSources has an engine with copies of partial blocks, and another engine at the same shim. The masters of two
// stores are silent or unreachable.
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
	s.mend(t, args, remedy{[]doctor.Fault{"source_silent"}, silent.Addr(), func() {
		if err := silent.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		silent.Put("an object")
	}},
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

// doctorsClaims makes a shim write a lease with a forbidden model.
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
		nil)
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
		small.start(limits(13, 50<<30)) // the account also has the stream that filled the storage
		harness.Start(t, "indexer", append([]string{"serve", "--http-listen", "", "--partitions", "8"}, user...)...).
			WaitFor(`msg=ready`)
	}})
}
