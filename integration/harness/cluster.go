package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// StartNATS runs a NATS server with JetStream until the end of the test, and returns the address.
func StartNATS(t testing.TB) string {
	t.Helper()
	addr := loopback.Reserve(t)
	Start(t, "nats-server", "-js", "-sd", filepath.Join(t.TempDir(), "data"), "-a", "127.0.0.1", "-p",
		addr[strings.LastIndex(addr, ":")+1:]).WaitFor(`Server is ready`)
	return addr
}

// OpenNamespace connects to a NATS server until the test ends, and opens the usual namespace.
func OpenNamespace(t testing.TB, ctx context.Context, addr string) *jetstream.Namespace {
	t.Helper()
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{"nats://" + addr}, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	ns, err := jetstream.OpenNamespace(ctx, conn, "default")
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

// PublishAs publishes batches as a worker's shim does, in sequence, and returns the position of the last batch.
func PublishAs(t testing.TB, ctx context.Context, ns *jetstream.Namespace, instance events.WorkerID,
	batches ...*events.Batch) (at api.PartitionSeq) {
	t.Helper()
	log := shim.NewStreamLog(ns, events.RankKey{Instance: instance}, nil)
	if _, err := log.Last(ctx); err != nil {
		t.Fatal(err)
	}
	var err error
	if at.Partition, err = ns.PartitionOf(instance); err != nil {
		t.Fatal(err)
	}
	for _, b := range batches {
		data, err := events.AppendBatch(nil, b)
		if err != nil {
			t.Fatal(err)
		}
		if at.Seq, err = log.Publish(ctx, [][]byte{data}); err != nil {
			t.Fatal(err)
		}
	}
	return at
}

// OnDevice returns the number of device blocks of every worker in an answer, which must be complete.
func OnDevice(a *api.Answer) (map[events.WorkerID]uint32, error) {
	if !a.Complete {
		return nil, fmt.Errorf("incomplete: %v are missing", a.Missing)
	}
	held := map[events.WorkerID]uint32{}
	for _, o := range a.Workers {
		held[o.Instance] = o.Device
	}
	return held, nil
}

// AwaitAnnounced waits until the given number of nodes have announced workers of a model in every served partition, and
// have since read each other's records.
func AwaitAnnounced(t testing.TB, ctx context.Context, ns *jetstream.Namespace, model string, nodes int) {
	t.Helper()
	bucket, err := ns.EnsureNodes(ctx, 10*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var since map[string]uint64 // the heartbeats at the time of all announcements
	Eventually(t, "every node has the locations of the model's workers", func() (bool, string) {
		entries, err := bucket.All(ctx)
		if err != nil {
			return false, err.Error()
		}
		beats := map[string]uint64{}
		for _, e := range entries {
			var r cluster.Record
			if err := json.Unmarshal(e.Value, &r); err != nil {
				return false, err.Error()
			}
			if r.Ready.Len() == 0 || r.Models[model].String() != r.Ready.String() ||
				since != nil && r.Heartbeat < since[r.Node]+2 {
				return false, string(e.Value)
			}
			beats[r.Node] = r.Heartbeat
		}
		if since == nil && len(beats) == nodes {
			since = beats
			return false, "just announced"
		}
		return since != nil, fmt.Sprint(beats)
	})
}
