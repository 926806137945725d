package scatter

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestTenThousandWorkers lists 10,000 workers over three nodes, in messages of the usual size.
func TestTenThousandWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const partitions, workers = 16, 10_000
		f := &fleet{
			t: t, nodes: map[string]*node{}, states: map[string]string{},
			delay:  func() time.Duration { return time.Millisecond },
			models: func(events.Partition, string) bool { return true },
		}
		names := []string{"n0", "n1", "n2"}
		for i, name := range names {
			n := &node{partitions: partitions, seq: func(events.Partition) events.StreamSeq { return 1 }}
			n.serves = func(p events.Partition) bool { return int(p)%3 != i } // two of three nodes have each partition
			f.nodes[name] = n
		}
		for p := range partitions {
			var serving []string
			for _, name := range names {
				if f.nodes[name].serves(events.Partition(p)) {
					serving = append(serving, name)
				}
			}
			f.serving, f.fit = append(f.serving, serving), append(f.fit, 2)
		}
		for i := range workers {
			p := events.Partition(i % partitions)
			w := worker{name: events.WorkerID(fmt.Sprintf("p%d-vllm-decode-%05d", p, i)), partition: p,
				model: "meta-llama/Llama-3.3-70B-Instruct", size: 16}
			for _, n := range f.nodes {
				if n.serves(p) {
					n.workers = append(n.workers, w)
				}
			}
		}
		s := New(Config{
			Self: "n0", Partitions: partitions, PartitionOf: partitionOf, Local: f.nodes["n0"],
			View: func() View { return f }, Transport: f, Hedges: &rpc.Budget{},
		})
		largest := 0
		list := &api.WorkerList{}
		for more := true; more; more = list.Next != nil { // like a client
			part, err := s.Workers(t.Context(), api.WorkersRequest{After: list.Next, Limit: api.WorkersPage})
			if err != nil {
				t.Fatal(err)
			}
			for i := range part.Workers { // like the registry
				part.Workers[i].Lease = &api.Lease{Holder: "ZXCVBNMASDFGHJKLQWERTYUIOP",
					Host: "gpu-node-0123.cluster.local", L3: "SGLang HiCache on Mooncake, mooncake-master:9003"}
			}
			body, err := api.Marshal(api.MsgPack, part)
			if err != nil {
				t.Fatal(err)
			}
			largest = max(largest, len(body))
			list.Append(part)
		}
		if !list.Complete || len(list.Workers) != workers {
			t.Fatalf("%d workers; complete: %v", len(list.Workers), list.Complete)
		}
		seen := map[events.WorkerID]bool{}
		for i := range list.Workers {
			if seen[list.Workers[i].Instance] = true; i > 0 &&
				list.Workers[i-1].Place().Compare(list.Workers[i].Place()) >= 0 {
				t.Fatalf("%s follows %s", list.Workers[i].Instance, list.Workers[i-1].Instance)
			}
		}
		t.Logf("the largest of the client's messages has %d bytes; %d requests between nodes", largest, f.asked.Load())
		if len(seen) != workers || largest > 1<<20-512 {
			t.Errorf("%d workers in messages of up to %d bytes", len(seen), largest)
		}
		whole, err := s.Workers(t.Context(), api.WorkersRequest{})
		if err != nil || len(whole.Workers) != workers || whole.Next != nil {
			t.Errorf("at once: %v: %d workers", err, len(whole.Workers))
		}
		time.Sleep(time.Minute) // until the waits for replies have ended
	})
}
