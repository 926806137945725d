//go:build judges

package torture

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

const (
	clusterServers    = 3
	clusterNodes      = 3 // and twice as many at times
	clusterEngines    = 4
	clusterCopies     = 2 // of every partition, on nodes
	clusterPartitions = 6
)

// clusterServer is the configuration of a NATS server. Clients and servers get only the addresses of the proxies.
const clusterServer = `
server_name: %q
listen: %q
http: %q
jetstream { store_dir: %q, max_file_store: 4GB, max_memory_store: 256MB }
cluster { name: torture, listen: %q, advertise: %q, no_advertise: true, routes: [%s] }
`

// clusterWorld is a redundant deployment: NATS servers with three copies of every stream and bucket, indexers with two
// copies of every partition, and engines with shims.
type clusterWorld struct {
	*stage
	addrs    []string // of the NATS servers, past all proxies
	monitors []string
	marked   []events.LocalHash // the last announced block of every engine
	spare    []*daemon          // stopped nodes
}

// startClusterWorld makes a deployment of stopped processes. The arguments are added to the nodes' command lines.
func startClusterWorld(
	t testing.TB, rng *rand.Rand, programs func(string) string, counters map[string]int, engines int, args ...string,
) *clusterWorld {
	w := &clusterWorld{stage: newStage(t, counters)}
	var free []string
	for range 3 * clusterServers {
		free = append(free, loopback.Reserve(t))
	}
	w.addrs, w.monitors = free[:clusterServers], free[2*clusterServers:]
	var routes []string
	for i := range clusterServers {
		routes = append(routes, w.proxy(fmt.Sprintf("nats→nats-server %d", i+1), free[clusterServers+i]).addr())
	}
	for i := range clusterServers {
		name := fmt.Sprintf("nats-server %d", i+1)
		config := filepath.Join(w.dir, fmt.Sprintf("nats%d.conf", i+1))
		text := fmt.Sprintf(clusterServer, fmt.Sprint("n", i+1), w.addrs[i], w.monitors[i],
			filepath.Join(w.dir, fmt.Sprint("store", i+1)), free[clusterServers+i], routes[i],
			`"nats://`+strings.Join(routes, `", "nats://`)+`"`)
		if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		w.servers = append(w.servers, w.daemon(name, harness.Program(t, "nats-server"), nil, "-c", config))
	}
	toNATS := func(who string) string {
		var urls []string
		for i, addr := range w.addrs {
			urls = append(urls, "nats://"+w.proxy(fmt.Sprintf("%s→nats-server %d", who, i+1), addr).addr())
		}
		rng.Shuffle(len(urls), func(i, j int) { urls[i], urls[j] = urls[j], urls[i] })
		return strings.Join(urls, ",")
	}
	interval := []string{"1s", "3s", "10s"}[rng.IntN(3)]
	for i := range 2 * clusterNodes {
		id := fmt.Sprintf("node-%d", i+1)
		d := w.daemon("indexer "+id, programs("indexer"), func(code int, last string) bool {
			return code == 1 && strings.Contains(last, "not available")
		}, append([]string{"serve", "--nats", toNATS(id), "--node-id", id, "--partition-replicas", fmt.Sprint(clusterCopies),
			"--nats-replicas", fmt.Sprint(clusterServers), "--http-listen", "127.0.0.1:0",
			"--partitions", fmt.Sprint(clusterPartitions), "--index-shards", fmt.Sprint(1 + i%3),
			"--snapshot-interval", interval, "--log-bytes", fmt.Sprint(64 << 20), "--pending-for",
			"24h", "--tombstone-for", "24h", "--log-level", "debug"}, args...)...)
		if i < clusterNodes {
			w.nodes = append(w.nodes, d)
		} else {
			w.spare = append(w.spare, d)
		}
	}
	for i := range engines {
		w.engine(i, rng, programs, toNATS)
	}
	return w
}

// healthy checks whether a NATS server has caught up with the other servers.
func (w *clusterWorld) healthy(i int) error {
	r, err := (&http.Client{Timeout: harness.HTTPTimeout}).Get("http://" + w.monitors[i] + "/healthz")
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(r.Body)
		return fmt.Errorf("%s", body)
	}
	return nil
}

// settled returns an error unless all nodes are ready, and every partition has the intended number of replicas with the
// whole log applied.
func (w *clusterWorld) settled() error { return w.settledBut(0) }

// settledBut is settled with a permitted lag of messages in every log.
func (w *clusterWorld) settledBut(lag uint64) error {
	ready := 0
	for _, d := range w.nodes {
		status, err := w.inOrder(d, lag)
		if err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
		c := status.Cluster
		if c == nil || len(c.Nodes) != len(w.nodes) || len(c.Short) > 0 || len(c.Unserved) > 0 {
			return fmt.Errorf("the cluster of %s differs: %+v", d.name, c)
		}
		for _, n := range c.Nodes {
			if n.Leaving || len(n.Releasing) > 0 {
				return fmt.Errorf("%s: something moves: %+v", d.name, n)
			}
		}
		ready += len(status.Partitions)
	}
	if ready != clusterPartitions*clusterCopies {
		return fmt.Errorf("%d replicas are kept in all, of %d partitions", ready, clusterPartitions)
	}
	return nil
}

// replicas runs the comparison of all nodes' replicas. The replicas must be equal and have the intended number.
func (w *clusterWorld) replicas() error {
	r := harness.Run(w.t, "indexer", "status", "--verify", "--json", "--nats", strings.Join(w.addrs, ","))
	var status api.Status
	if err := json.Unmarshal([]byte(r.Stdout), &status); err != nil {
		return fmt.Errorf("status --verify ended with %d: %s%s", r.Code, r.Stdout, r.Stderr)
	}
	for _, p := range status.Replicas {
		for i, a := range p.Replicas {
			for _, b := range p.Replicas[:i] {
				if a.Seq == b.Seq && a.Checksum != b.Checksum {
					w.t.Fatalf("replicas differ: %+v", p)
				}
			}
		}
		if !p.Equal {
			return fmt.Errorf("the replicas of partition %d are at different positions: %+v", p.Partition, p.Replicas)
		}
		if len(p.Replicas) != clusterCopies {
			return fmt.Errorf("%d replicas of partition %d", len(p.Replicas), p.Partition)
		}
	}
	if r.Code != 0 || len(status.Replicas) != clusterPartitions {
		return fmt.Errorf("status --verify ended with %d and lists %d partitions: %s", r.Code, len(status.Replicas),
			r.Stderr)
	}
	return nil
}

// back returns an error until a restarted process is ready.
func (w *clusterWorld) back(d *daemon) error {
	if i := slices.Index(w.servers, d); i >= 0 {
		return w.healthy(i)
	}
	if slices.Contains(w.nodes, d) {
		return w.settledBut(100)
	}
	return nil
}
