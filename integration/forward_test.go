package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestForwardedQueries runs three nodes with two replicas. Another node finishes most queries over NATS, with the same
// answers as over HTTP, and every query is counted once. Nodes with forwarding disabled neither forward nor accept
// queries. Clients in another account get answers without forwarding.
func TestForwardedQueries(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	addr, config := loopback.Reserve(t), filepath.Join(dir, "nats.conf")
	text := fmt.Sprintf(`listen: %q
jetstream { store_dir: %q, max_file_store: 1TB }
accounts {
  NODES { jetstream: enabled, users: [{user: node, password: p}], exports: [{service: "kv.v1.default.q.find"}] }
  OTHER { users: [{user: other, password: p}]
    imports: [{service: {account: NODES, subject: "kv.v1.default.q.find"}}] }
}
`, addr, filepath.Join(dir, "data"))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Start(t, "nats-server", "-c", config).WaitFor(`Server is ready`)
	collector := harness.StartCollector(t)
	nodes, https := map[string]*harness.Process{}, map[string]string{}
	start := func(id string, more ...string) {
		nodes[id] = harness.Start(t, "indexer", append([]string{"serve", "--nats", "nats://node:p@" + addr, "--node-id", id,
			"--partition-replicas", "2", "--partitions", "8", "--http-listen", "127.0.0.1:0"}, more...)...)
		https[id] = nodes[id].WaitFor(`HTTP is served" listen=(\S+)`)[1]
		nodes[id].WaitFor(`msg=ready`)
	}
	for _, id := range []string{"a", "b", "c"} {
		start(id, "--otlp-endpoint", collector.URL, "--otlp-headers-file", collector.Headers, "--trace-sample", "1")
	}
	ctx := harness.Context(t)
	connect := func(user string) *jetstream.Conn {
		conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{"nats://" + user + ":p@" + addr},
			Core: user == "other"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(conn.Close)
		return conn
	}
	conn, other := connect("node"), connect("other")
	over := harness.Client(t, conn, "default", client.Options{})
	ns, err := jetstream.OpenNamespace(ctx, conn, "default")
	if err != nil {
		t.Fatal(err)
	}
	hasher, err := events.NewHasher(16, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	prompt := harness.Tokens(1, 10*16)
	const workers = 24
	for i := range workers {
		e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: hasher.Hash(nil, prompt[:(1+i%8)*16])}
		for j := range e.Locals {
			e.Blocks = append(e.Blocks, events.BlockHash(j+1))
		}
		harness.PublishAs(t, ctx, ns, events.WorkerID(fmt.Sprint("w", i)), &events.Batch{Incarnation: 1, FirstID: 1,
			Model: "m", BlockSize: 16, Events: []events.Event{e}})
	}
	harness.AwaitAnnounced(t, ctx, ns, "m", len(nodes))
	asked := uint64(0)
	same := func(a *api.Answer) error {
		if !a.Complete || len(a.Workers) != workers || a.Workers[0].Device != 8 || a.Workers[workers-1].Device != 1 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	}
	ask := func(conn *jetstream.Conn, contentType string, q *api.Query) {
		t.Helper()
		body, err := api.Marshal(contentType, q)
		if err != nil {
			t.Fatal(err)
		}
		asked++
		reply, err := conn.Request(ctx, jetstream.Names("default").Query(ops.Find), contentType, body)
		a := &api.Answer{}
		if err == nil {
			err = api.DecodeReply(reply.ContentType, reply.Body, a)
		}
		if err == nil {
			err = same(a)
		}
		if err != nil || reply.ContentType != contentType {
			t.Fatalf("%v, in %s", err, reply.ContentType)
		}
	}
	harness.Eventually(t, "every node answers whole", func() (bool, string) {
		for _, at := range https {
			var a api.Answer
			if err := harness.HTTPDo(at, "POST", "/v1/find", api.Query{Model: "m", Tokens: prompt}, &a); err != nil {
				return false, err.Error()
			}
			asked++ // errors are counted apart
			if err := same(&a); err != nil {
				return false, err.Error()
			}
		}
		return true, ""
	})
	// count sums up a metric's series of all nodes.
	count := func(series string) (sum uint64) {
		t.Helper()
		for _, at := range https {
			_, text, err := harness.Request(at, "GET", "/metrics", "")
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range regexp.MustCompile(`(?m)^`+series+` (\d+)$`).FindAllStringSubmatch(text, -1) {
				n, _ := strconv.ParseUint(m[1], 10, 64)
				sum += n
			}
		}
		return sum
	}
	const answered, finished = `kvatlas_forwarded_queries_total\{outcome="answered"\}`,
		`kvatlas_request_duration_seconds_count\{operation="own_forward",outcome="ok"\}`
	counted := func() {
		t.Helper()
		harness.Eventually(t, "every query is counted once", func() (bool, string) {
			f, err := over.Funnel(ctx, &api.FunnelRequest{Model: "m"})
			if err != nil {
				return false, err.Error()
			}
			found := count(`kvatlas_request_duration_seconds_count\{operation="find",outcome="ok"\}`)
			best := count(`kvatlas_find_best_ratio_count\{model="m"\}`)
			return f.Requests == asked && found == asked && best == asked,
				fmt.Sprintf("%d asked; the funnel has %d, %d were observed, %d rated", asked, f.Requests, found, best)
		})
	}
	hashes := &api.Query{Model: "m"}
	for _, l := range hasher.Hash(nil, prompt) {
		hashes.Hashes = append(hashes.Hashes, uint64(l))
	}
	for range 100 {
		ask(conn, api.MsgPack, hashes)
		ask(conn, api.JSON, &api.Query{Model: "m", Tokens: prompt})
	}
	counted()
	if n := count(answered); n < 50 { // of 200, except for queries at a node with all partitions, and slow queries
		t.Errorf("%d forwarded queries were answered", n)
	}
	if n := count(`kvatlas_forwarded_queries_total\{outcome="(?:declined|unsent|redelivered)"\}`); n > 0 {
		t.Errorf("%d queries were forwarded to no purpose", n)
	}

	harness.Eventually(t, "a trace has all steps of a forwarded query", func() (bool, string) {
		spans := map[string]harness.CollectedSpan{}
		for _, s := range collector.Spans(func(*harness.CollectedSpan) bool { return true }) {
			spans[s.ID] = s
		}
		for _, s := range spans {
			peer := spans[s.Parent]
			if s.Name == "kvatlas.own_forward" && peer.Name == "peer" &&
				peer.Attributes["kvatlas.peer.kind"] == "forward" && spans[peer.Parent].Name == "kvatlas.find" {
				return true, ""
			}
		}
		names := map[string]int{}
		for _, s := range spans {
			names[s.Name+" under "+spans[s.Parent].Name]++
		}
		return false, fmt.Sprint(names)
	})

	before := count(`kvatlas_peer_requests_total\{kind="forward"\}`)
	for range 20 {
		ask(other, api.MsgPack, hashes)
	}
	counted()
	if count(`kvatlas_peer_requests_total\{kind="forward"\}`) == before {
		t.Error("no query of another account was forwarded")
	}

	for _, id := range []string{"a", "b", "c"} {
		nodes[id].Stop() // a kill would lose spans
		delete(https, id)
	}
	asked = 0
	for _, id := range []string{"d", "e", "f"} {
		start(id, "--forward-queries=false")
	}
	harness.AwaitAnnounced(t, ctx, ns, "m", 3)
	for range 20 {
		harness.Eventually(t, "there is a whole answer", func() (bool, string) {
			a, err := over.Find(ctx, hashes)
			if err == nil {
				err = same(a)
			}
			return err == nil, fmt.Sprint(err)
		})
	}
	if n := count(`kvatlas_peer_requests_total\{kind="forward"\}`) + count(finished); n > 0 {
		t.Errorf("%d queries were forwarded by nodes with forwarding disabled", n)
	}
}
