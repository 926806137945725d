package doctor

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// fine returns facts without a fault.
func fine() *Facts {
	now := time.Date(2026, 11, 1, 8, 0, 0, 0, time.UTC)
	node := func(name string) survey.Node {
		return survey.Node{Node: name, Status: &api.Status{Node: name, Version: "v1", Ready: true,
			Cluster: &api.ClusterStatus{Copies: 2, Nodes: []api.NodeStatus{
				{Node: "a", Zone: "1", Ready: []events.Partition{0, 1}},
				{Node: "b", Zone: "1", Ready: []events.Partition{0, 2}},
				{Node: "c", Zone: "2", Ready: []events.Partition{0, 1, 2}}}},
			L3: []api.StoreStatus{{Store: "master:9003"}}, Recording: &api.RecordingStatus{Records: 5, Stored: 5}}}
	}
	rank := func(name events.WorkerID) api.WorkerInfo {
		return api.WorkerInfo{Instance: name, Model: "m", BlockSize: 16, Stored: 3, Engine: api.EngineConnected,
			Lease: &api.Lease{Host: "h", State: string(registry.Held), Renewed: now}, Record: &api.WorkerRecord{}}
	}
	return &Facts{
		Shown: "nats://n:4222", Namespace: "default", Partitions: 1,
		Server:  jetstream.ServerInfo{Name: "n1", Version: "2.12.1", MaxPayload: 1 << 20, RoundTrip: time.Millisecond},
		Account: jetstream.AccountInfo{Level: 2, Storage: 1, MaxStorage: 100, MaxStreams: 5},
		Streams: []jetstream.StreamState{{Name: "KV_EVENTS_default_0", Replicas: 1, Direct: true, Batches: true}},
		Clocks:  []Clock{{"node a", time.Second}},
		Nodes:   &survey.Report{Nodes: []survey.Node{node("a"), node("b")}},
		Replicas: []api.PartitionReplicas{{Equal: true, Replicas: []api.ReplicaSum{{Node: "a", Seq: 1, Checksum: "x"},
			{Node: "b", Seq: 1, Checksum: "x"}}}},
		Workers: &api.WorkerList{Complete: true, Workers: []api.WorkerInfo{rank("w1"), rank("w2")}},
		Shims: []control.Shim{{Instance: "w1", Replay: true, Endpoint: "tcp://h:1", Heard: &control.Heard{}},
			{Instance: "w2", Replay: true}},
		Engines: []EngineFacts{{Worker: "w1", URL: "http://w1:8000", Model: "m", BlockSize: 16, Ranks: 1,
			Reported: enginehttp.Engine{Model: "m", BlockSize: 16, Ranks: []enginehttp.Rank{{Replay: "tcp://w1:5657"}}}}},
		Tokenizers: []TokenizerFacts{{"m", ""}},
		Recording: &RecordingFacts{Now: now, RecordingInfo: jetstream.RecordingInfo{First: 1, Last: 9, Batches: 9, Bytes: 900,
			MaxBytes: 1 << 20, MaxAge: time.Hour, Oldest: now.Add(-time.Minute)}},
	}
}

// quiet adds a silent source to a status, as a node does.
func quiet(s *api.Status, q api.QuietSource) {
	q.Source, q.Engine, q.Advice = "source", "tcp://e:1", "see --engine"
	s.QuietSources = append(s.QuietSources, q)
	if q.Severe() {
		s.Problems = append(s.Problems, q.Line())
	} else {
		s.Warnings = append(s.Warnings, q.Line())
	}
}

// store is the registration of a vLLM worker's shared store, under a hash seed.
func store(t *testing.T, seed string) *hicache.Config {
	t.Helper()
	c, _, err := hicache.ParseConfig([]byte(`{"vllm_mooncake_store":{"model_name":"m","tp_size":1,"pp_size":1,` +
		`"num_kv_heads":8,"groups":[{"kind":"full","block_size":16}],"hash_block_size":16,"scheduler_block_size":16,` +
		`"engine_version":"0.32.0","hash_seed":"` + seed + `","master_server_address":"master:50051",` +
		`"master_metrics_port":9003}}`))
	if err != nil {
		t.Fatal(err)
	}
	return &c
}

// TestEachFaultIsFound adds one fault after another to valid facts. Only the check of the fault finds it.
func TestEachFaultIsFound(t *testing.T) {
	w := func(f *Facts) *api.WorkerInfo { return &f.Workers.Workers[0] }
	status := func(f *Facts) *api.Status { return f.Nodes.Nodes[0].Status }
	provoked := map[Fault]map[Severity]bool{}
	for _, c := range []struct {
		check    string
		severity Severity
		what     string // a part of the finding's text
		remedy   string // a part of its remedy
		fault    func(f *Facts)
	}{
		{"nodes", Error, "its lease is ignored", "auth create --shim", func(f *Facts) {
			status(f).Claims = &api.ClaimStatus{Required: true, Unclaimed: []api.UnclaimedRank{
				{Instance: "w1", Model: "other", Lease: true, Events: true}}}
			status(f).Problems = []string{registry.UnclaimedProblem + "w1/0"}
		}},
		{"nodes", Error, "answers leave out its blocks", "revoke its NATS key", func(f *Facts) {
			status(f).Claims = &api.ClaimStatus{Required: true, Unclaimed: []api.UnclaimedRank{
				{Instance: "w1", Model: "other", Events: true}}}
		}},
		{"nodes", Warning, "published no event", "see --engine", func(f *Facts) { quiet(status(f), api.QuietSource{}) }},
		{"nodes", Warning, "nodes poll the store", "see --engine", func(f *Facts) {
			quiet(status(f), api.QuietSource{Store: "s", Failure: "refused"})
		}},
		{"nodes", Error, "do not arrive", "see --engine", func(f *Facts) {
			quiet(status(f), api.QuietSource{Model: "m", Failure: "refused"})
		}},
		{"nats", Error, "unreachable", "indexer serve", func(f *Facts) { f.ConnectError = jetstream.ErrUnavailable }},
		{"nats", Error, "refuses this user", "--nats-creds", func(f *Facts) { f.ConnectError = jetstream.ErrDenied }},
		{"nats", Error, "no room", "max_payload", func(f *Facts) { f.Server.MaxPayload = 1000 }},
		{"nats", Warning, "long round trip", "--nats", func(f *Facts) { f.Server.RoundTrip = time.Second }},
		{"jetstream", Error, "no JetStream", "-js", func(f *Facts) { f.AccountError = jetstream.ErrNoJetStream }},
		{"jetstream", Error, "does not answer", "half of those",
			func(f *Facts) { f.AccountError = jetstream.ErrNoLeader }},
		{"jetstream", Warning, "no atomic batches", "2.12", func(f *Facts) { f.Account.Level = 1 }},
		{"jetstream", Warning, "nearly exhausted", "--store-bytes", func(f *Facts) { f.Account.Storage = 95 }},
		{"jetstream", Error, "nearly exhausted", "--store-bytes", func(f *Facts) { f.Account.Storage = 100 }},
		{"namespace", Error, "does not exist", "--namespace default",
			func(f *Facts) { f.OpenError = jetstream.ErrNoNamespace }},
		{"namespace", Error, "has another version", "version",
			func(f *Facts) { f.OpenError = jetstream.ErrMismatch }},
		{"namespace", Error, "missing or unreadable", "--restore-namespace", func(f *Facts) {
			f.OpenError = &jetstream.RecordError{Namespace: "default", Cause: jetstream.ErrNotFound,
				Streams: []string{"KV_EVENTS_default_0"}, Partitions: 1}
		}},
		{"namespace", Error, "limit on streams is too low", "max_streams: 5",
			func(f *Facts) { f.Account.MaxStreams = 4 }},
		{"streams", Error, "is missing", "an indexer serves",
			func(f *Facts) { f.Streams[0].Err = jetstream.ErrNotFound }},
		{"streams", Error, "have no leader", "more than half",
			func(f *Facts) { f.Streams[0].Err = jetstream.ErrUnavailable }},
		{"streams", Error, "has changed settings", "nats stream rm",
			func(f *Facts) { f.Streams[0].Odd = []string{"rollups"} }},
		{"streams", Error, "reject writes", "restart that server",
			func(f *Facts) { f.Streams[0].Refused = jetstream.ErrFull }},
		{"streams", Warning, "not allow direct gets", "restart an indexer", func(f *Facts) { f.Streams[0].Direct = false }},
		{"streams", Warning, "no atomic batches", "restart an indexer",
			func(f *Facts) { f.Streams[0].Batches = false }},
		{"streams", Warning, "allows rollups", "restart an indexer",
			func(f *Facts) { f.Streams[0].Rollups = true }},
		{"streams", Warning, "missing or behind", "start the NATS servers",
			func(f *Facts) { f.Streams[0].Behind = []string{"n2"} }},
		{"streams", Error, "is full", "--snapshot-bytes", func(f *Facts) {
			f.Streams[0].Bucket, f.Streams[0].Bytes, f.Streams[0].MaxBytes = "kvatlas_default_snap", 95, 100
		}},
		{"streams", Warning, "different numbers of replicas", "--nats-replicas", func(f *Facts) {
			f.Streams = append(f.Streams, jetstream.StreamState{Name: "x", Replicas: 3, Direct: true, Batches: true})
		}},
		{"recording", Warning, "is missing", "--record", func(f *Facts) {
			f.Recording = &RecordingFacts{Err: jetstream.ErrNotFound}
		}},
		{"recording", Warning, "changed settings", "nats stream rm KV_RECORD_default", func(f *Facts) {
			f.Recording.Odd = []string{"discard"}
		}},
		{"recording", Warning, "no limit", "--record-bytes", func(f *Facts) { f.Recording.MaxBytes = -1 }},
		{"recording", Warning, "no limit", "--record-bytes", func(f *Facts) { f.Recording.MaxAge = 0 }},
		{"recording", Warning, "before their age", "--record-bytes", func(f *Facts) {
			f.Recording.First, f.Recording.Bytes = 2, 1<<20
		}},
		{"recording", Warning, "cannot be stored", "auth print", func(f *Facts) {
			status(f).Recording.Failing, status(f).Recording.Dropped = "no room", 1
		}},
		{"recording", Warning, "were dropped", "restart the node", func(f *Facts) { status(f).Recording.Dropped = 1 }},
		{"nodes", Error, "no indexer node answers", "indexer serve",
			func(f *Facts) { f.NodesError = context.Canceled }},
		{"nodes", Error, "does not answer", "--node-id a", func(f *Facts) { f.Nodes.Nodes[0].Status = nil }},
		{"nodes", Error, "not ready", "wait", func(f *Facts) { status(f).Ready = false }},
		{"nodes", Error, "reports a problem", "this", func(f *Facts) {
			status(f).Problems = []string{"a fault" + survey.RemedyMark + "this"}
		}},
		{"nodes", Warning, "the node warns", "--http-cert", func(f *Facts) {
			status(f).Warnings = []string{"tokens are in clear text" + survey.RemedyMark + "give --http-cert"}
		}},
		{"nodes", Error, "served by no node", "indexer cluster", func(f *Facts) {
			status(f).Cluster.Unserved = []events.Partition{0}
		}},
		{"nodes", Warning, "different versions", "upgrade", func(f *Facts) { status(f).Version = "v2" }},
		{"nodes", Warning, "have no zone", "--zone", func(f *Facts) { status(f).Cluster.Nodes[0].Zone = "" }},
		{"nodes", Warning, "in one zone", "wait", func(f *Facts) { status(f).Cluster.Nodes[2].Ready = nil }},
		{"clocks", Warning, "clocks differ", "chrony", func(f *Facts) { f.Clocks[0].Ahead = 3 * time.Second }},
		{"clocks", Error, "clocks differ", "chrony", func(f *Facts) { f.Clocks[0].Ahead = -time.Minute }},
		{"replicas", Error, "not equal", "status --verify", func(f *Facts) {
			f.Replicas[0].Equal, f.Replicas[0].Replicas[1].Checksum = false, "y"
		}},
		{"replicas", Warning, "did not reach the same position", "doctor again", func(f *Facts) {
			f.Replicas[0].Equal, f.Replicas[0].Replicas[1].Seq = false, 2
		}},
		{"workers", Warning, "lease has expired", "indexer workers remove w3", func(f *Facts) {
			f.Workers.Expired = []api.ExpiredWorker{{Instance: "w3", Lease: api.Lease{Host: "h"}}}
		}},
		{"workers", Error, "answers lack workers", "indexer cluster", func(f *Facts) { f.Workers.Complete = false }},
		{"workers", Warning, "no worker is registered", "worker-shim run", func(f *Facts) {
			f.Workers.Workers, f.Shims = nil, nil
		}},
		{"workers", Warning, "no shim has a lease", "indexer workers clear w1", func(f *Facts) { w(f).Lease = nil }},
		{"workers", Error, "has expired", "worker-shim on h",
			func(f *Facts) { w(f).Lease.State = string(registry.Expired) }},
		{"workers", Error, "does not answer its shim", "--engine-gone-after",
			func(f *Facts) { w(f).Engine = api.EngineSilent }},
		{"workers", Warning, "has ended", "restart the engine", func(f *Facts) { w(f).Engine = api.EngineGone }},
		{"workers", Warning, "announced no block", "enable_kv_cache_events", func(f *Facts) { w(f).Stored = 0 }},
		{"workers", Error, "may not be chosen", "--block-size 16", func(f *Facts) {
			w(f).Stored = 0 // the block size explains this, even to a user without permission for the shim's record
			w(f).Record.Because(api.WorkerIncomplete, "other blocks"+survey.RemedyMark+"start the shim with --block-size 16")
		}},
		{"workers", Error, "may not be chosen", "workers change w1", func(f *Facts) {
			w(f).Record.Because(api.WorkerIncomplete, "the capacity is missing")
		}},
		{"models", Error, "different block sizes", "--block-size", func(f *Facts) { w(f).BlockSize = 32 }},
		{"models", Error, "name the same blocks differently", "PYTHONHASHSEED", func(f *Facts) {
			f.Records = []registry.Record{{Instance: "w1", Model: "m", BlockSize: 16, L3: store(t, "0")},
				{Instance: "w2", Model: "m", BlockSize: 16, L3: store(t, "1")}}
		}},
		{"models", Error, "no block of the shared store", "hash_seed", func(f *Facts) {
			unseeded := store(t, "0")
			unseeded.VLLM.HashSeed, unseeded.VLLM.EngineVersion = nil, "0.9.2"
			f.Records = []registry.Record{{Instance: "w1", Model: "m", BlockSize: 16, L3: unseeded}}
		}},
		{"shims", Warning, "does not answer", "indexer auth", func(f *Facts) { f.Shims = f.Shims[:1] }},
		{"shims", Warning, "was stopped while its engine ran", "again before the lease expires", func(f *Facts) {
			f.Shims = f.Shims[:1]
			stopped := time.Now()
			f.Workers.Workers[1].Lease.Stopped = &stopped
		}},
		{"shims", Error, "log accepts no events", "make room", func(f *Facts) {
			f.Shims[0].Waiting = &control.Waiting{Why: "it is full", Do: "make room"}
		}},
		{"shims", Warning, "no replay endpoint", "--replay", func(f *Facts) { f.Shims[0].Replay = false }},
		{"shims", Error, "replay endpoint does not answer", "replay_endpoint", func(f *Facts) {
			f.Shims[0].Heard.ReplayFailed = "connection refused"
		}},
		{"shims", Error, "are unreadable", "--source", func(f *Facts) { f.Shims[0].Heard.Unreadable = 1 }},
		{"shims", Error, "are skipped", "--block-size", func(f *Facts) {
			f.Shims[0].Heard.Skipped = map[string]uint64{"block_size": 7}
		}},
		{"shims", Warning, "do not count", "leave --block-size as it is", func(f *Facts) {
			f.Shims[0].Heard.Skipped = map[string]uint64{"copy_size": 7}
		}},
		{"shims", Error, "are skipped", "docs/engines", func(f *Facts) {
			f.Shims[0].Heard.Skipped = map[string]uint64{"bad_token": 7}
		}},
		{"workers", Error, "several engines publish", "correct it", func(f *Facts) {
			f.Records = []registry.Record{{Instance: "w1",
				Shim: &registry.ShimState{Several: "two" + survey.RemedyMark + "correct it"}}}
		}},
		{"workers", Error, "are skipped", "correct it", func(f *Facts) {
			f.Records = []registry.Record{{Instance: "w1",
				Shim: &registry.ShimState{Unusable: "odd" + survey.RemedyMark + "correct it"}}}
		}},
		{"shims", Warning, "were lost", "buffer_steps", func(f *Facts) { f.Shims[0].Heard.Gaps = 2 }},
		{"shims", Warning, "published before", "reset_prefix_cache",
			func(f *Facts) { f.Shims[0].Heard.JoinedLate = 1 }},
		{"engines", Error, "publishes no events", "--kv-events-config",
			func(f *Facts) { f.Engines[0].Err = enginehttp.ErrNoEvents }},
		{"engines", Warning, "does not answer over HTTP", "workers change --endpoint URL w1", func(f *Facts) {
			f.Engines[0].Err = enginehttp.ErrNotReady
		}},
		{"engines", Warning, "does not report event settings", "--engine-http-token-file", func(f *Facts) {
			f.Engines[0].Err = enginehttp.ErrUnknown
		}},
		{"engines", Error, "different block sizes", "--block-size 32", func(f *Facts) {
			f.Engines[0].Reported.BlockSize = 32
		}},
		{"engines", Warning, "another name", "--model x", func(f *Facts) { f.Engines[0].Reported.Model = "x" }},
		{"engines", Error, "do not name adapters", `"format":"dynamo"`,
			func(f *Facts) { f.Engines[0].Reported.UnnamedAdapters = true }},
		{"engines", Warning, "no replay endpoint", "replay_endpoint",
			func(f *Facts) { f.Engines[0].Reported.Ranks[0].Replay = "" }},
		{"engines", Error, "have no shim", "--ranks 2", func(f *Facts) {
			f.Engines[0].Reported.Ranks = append(f.Engines[0].Reported.Ranks, f.Engines[0].Reported.Ranks[0])
		}},
		{"store", Error, "does not query the store", "--l3-config",
			func(f *Facts) { status(f).L3[0].Down = "refused" }},
		{"store", Warning, "skipped the store", "mooncake", func(f *Facts) { status(f).L3[0].Busy = 1 }},
		{"store", Warning, "incomplete", "mooncake", func(f *Facts) { status(f).L3[0].Set = &api.StoreSet{} }},
		{"tokenizers", Error, "not tokenized", "--tokenizers", func(f *Facts) { f.Tokenizers[0].Error = "refused" }},
	} {
		f := fine()
		c.fault(f)
		n := 0
		for _, k := range checks {
			for _, got := range k.judge(f) {
				n++
				if provoked[got.ID] == nil {
					provoked[got.ID] = map[Severity]bool{}
				}
				provoked[got.ID][got.Severity] = true
				if k.name != c.check || got.Severity != c.severity || !strings.Contains(got.What, c.what) ||
					!strings.Contains(got.Remedy, c.remedy) || got.Where == "" || got.Evidence == "" &&
					!strings.Contains("has ended does not answer", c.what) {
					t.Errorf("%s, %q: %s found %+v", c.check, c.what, k.name, got)
				}
			}
		}
		if n != 1 {
			t.Errorf("%s, %q: %d findings", c.check, c.what, n)
		}
	}
	for _, f := range faults {
		of := provoked[f.ID]
		if of == nil {
			t.Errorf("the test does not provoke the fault %s", f.ID)
		}
		if delete(of, f.Severity); f.Severity != varies && len(of) > 0 {
			t.Errorf("%s is described as %s, and there are findings of %v", f.ID, f.Severity, of)
		}
		delete(provoked, f.ID)
	}
	if len(provoked) > 0 {
		t.Errorf("findings with unlisted faults: %v", provoked)
	}
}

// TestValidFactsHaveNoFindings: valid facts have no findings.
func TestValidFactsHaveNoFindings(t *testing.T) {
	for _, k := range checks {
		if list := k.judge(fine()); len(list) > 0 {
			t.Errorf("%s: %+v", k.name, list)
		}
	}
}

// TestDocumented: the page lists each check, in order.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile("../../../docs/doctor.md")
	if err != nil {
		t.Fatal(err)
	}
	var names, has []string
	for _, c := range checks {
		names = append(names, c.name)
	}
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\|").FindAllStringSubmatch(string(text), -1) {
		has = append(has, m[1])
	}
	if !slices.Equal(has, names) {
		t.Errorf("the page lists %v, the checks are %v", has, names)
	}
}

// TestGroups: findings with different places form a group. Its name contains a few of the places. Other findings stay
// separate.
func TestGroups(t *testing.T) {
	f := fine()
	for i := range 6 {
		f.Workers.Expired = append(f.Workers.Expired, api.ExpiredWorker{Instance: events.WorkerID(fmt.Sprint("gone-", i)),
			Lease: api.Lease{Host: "h"}})
	}
	f.Workers.Expired[5].Lease.Host = "other" // the remedy contains the host
	f.Workers.Workers[0].Lease = nil
	r := &Report{Checks: []Result{{Findings: judgeWorkers(f)}}}
	var got []string
	for _, g := range r.Groups(Warning) {
		got = append(got, fmt.Sprintf("%s %s", g.ID, g.Where()))
	}
	want := []string{"worker_expired gone-0/0, gone-1/0, gone-2/0 and 2 more", "worker_expired gone-5/0",
		"lease_none w1/0"}
	if !slices.Equal(got, want) || len(r.Groups(Error)) != 0 {
		t.Errorf("the groups are %q, want %q", got, want)
	}
}
