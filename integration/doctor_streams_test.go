package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// admin sends requests to JetStream's API that no program of kvatlas sends.
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

// publish publishes a message to a stream. The stream must accept it.
func (a *admin) publish(subject string, bytes int) {
	a.Helper()
	var answer struct{ Error any }
	r, err := a.conn.Request(a.ctx, subject, "", make([]byte, bytes))
	if err == nil {
		err = json.Unmarshal(r.Body, &answer)
	}
	if err != nil || answer.Error != nil {
		a.Fatalf("%s, %d bytes: %v, %v", subject, bytes, err, answer.Error)
	}
}

// fill publishes a message that fills a stream to 95 % of its limit.
func (a *admin) fill(stream, subject string) {
	a.Helper()
	info := a.call("STREAM.INFO."+stream, nil)
	used := info["state"].(map[string]any)["bytes"].(float64)
	limit := info["config"].(map[string]any)["max_bytes"].(float64)
	if missing := int(0.95*limit - used); missing > 0 {
		a.publish(fmt.Sprintf("%s.%d", subject, missing), missing)
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

	// A host has a clock a minute behind.
	ctx := harness.Context(t)
	options := jetstream.ConnOptions{URLs: []string{"nats://" + nats}, Core: true}
	clocks := func(offset time.Duration) *doctor.Report {
		return doctor.Examine(ctx, doctor.Config{Namespace: "default", Shown: nats, Timeout: harness.Patience,
			Now:     func() time.Time { return time.Now().Add(offset) },
			Connect: func(ctx context.Context) (*jetstream.Conn, error) { return jetstream.Connect(ctx, options) }})
	}
	// after the nodes have each other's records
	harness.Eventually(t, "all clocks are found ahead", func() (bool, string) {
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
	s.mend(t, args, remedy{[]doctor.Fault{"clock_offset"}, "", func() {}}) // the clock of this host is right

	nodes["node-b"].Kill()
	s.await(t, []symptom{{"node_silent", "node-b", "indexer serve --nats " + nats + " --node-id node-b"}}, nil, args...)
	s.mend(t, args, remedy{[]doctor.Fault{"node_silent"}, "node-b", func() { serve("node-b", "--zone", "rack-2") }})

	admin := adminOf(t, options)
	log, other := jetstream.Names("default").Stream(0), jetstream.Names("default").Stream(1)
	admin.change(log, map[string]any{"max_msgs_per_subject": 5})
	admin.change(other, map[string]any{"allow_direct": false, "allow_atomic": false})
	const snapshots = "KV_kvatlas_default_snap"
	admin.change(snapshots, map[string]any{"max_bytes": 200_000})
	admin.publish("$KV.kvatlas_default_snap.other", 15_000) // in place of large snapshots
	admin.change("KV_kvatlas_default_workers", map[string]any{"allow_rollup_hdrs": true})
	s.await(t, []symptom{{"stream_changed", log, "nats stream rm " + log},
		{"stream_no_direct_gets", other, "restart an indexer"},
		{"stream_no_batches", other, "restart an indexer"}, {"stream_rollups", "workers", "restart an indexer"},
		{"bucket_full", "snap", "--snapshot-bytes"}},
		func() { admin.fill(snapshots, "$KV.kvatlas_default_snap.fill") }, args...)
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

// doctorsRecording breaks the stream of recorded requests, and follows the remedies.
func doctorsRecording(t *testing.T, s *staged) {
	const stream, bytes = "KV_RECORD_default", "1048576"
	nats := harness.StartNATS(t)
	var node *harness.Process
	stop := func() {
		if node != nil {
			node.Kill()
		}
	}
	serve := func(bytes string) {
		t.Helper()
		stop()
		node = harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", "node-a", "--http-listen", "", "--record",
			"--record-bytes", bytes)
		node.WaitFor(`msg=ready`)
	}
	serve(bytes)
	args := []string{"--nats", nats}
	admin := adminOf(t, jetstream.ConnOptions{URLs: []string{"nats://" + nats}, Core: true})
	for _, c := range []struct {
		id           doctor.Fault
		remedy       string
		break_, mend func()
	}{
		{"recording_missing", "restart an indexer with --record", func() { admin.call("STREAM.DELETE."+stream, nil) },
			func() { serve(bytes) }},
		{"recording_changed", "nats stream rm " + stream,
			func() { admin.change(stream, map[string]any{"max_msgs_per_subject": 5}) },
			func() {
				stop()
				admin.call("STREAM.DELETE."+stream, nil)
				serve(bytes)
			}},
		{"recording_unlimited", "--record --record-bytes",
			func() { admin.change(stream, map[string]any{"max_bytes": -1, "max_age": 0}) }, func() { serve(bytes) }},
		{"recording_short", "--record-bytes", func() {
			for range 5 {
				admin.publish("kv.v1.default.record.node-b", 300_000)
			}
		}, func() { serve("16777216") }},
	} {
		c.break_()
		s.await(t, []symptom{{c.id, stream, c.remedy}}, nil, args...)
		s.mend(t, args, remedy{[]doctor.Fault{c.id}, stream, c.mend})
	}
}
