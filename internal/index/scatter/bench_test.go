package scatter

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// still is an indexer with a constant answer.
type still struct {
	Local
	answer api.Answer
}

func (s *still) Find(context.Context, *api.Query) (*api.Answer, error) {
	a := s.answer
	return &a, nil
}

// wires is a transport with an immediate constant answer.
type wires struct {
	fleet
	reply []byte
}

func (w *wires) Send(_, _ string, _ time.Duration, _ string, _ []byte, to rpc.Receiver, tag int) (uint64, error) {
	to.Receive(tag, rpc.Reply{Body: w.reply})
	return 1, nil
}

// BenchmarkFind measures a query of 64 blocks over 64 partitions: all on this node, beside the same without a cluster;
// and two thirds on two other nodes, which answer at once with 20 workers each.
func BenchmarkFind(b *testing.B) {
	const partitions = 64
	local := &still{answer: api.Answer{Model: "m", BlockSize: 16, Blocks: 64, Complete: true}}
	there := api.Answer{Model: "m", BlockSize: 16, Blocks: 64, Complete: true}
	for i := range 20 {
		there.Workers = append(there.Workers,
			api.Overlap{Instance: events.WorkerID(fmt.Sprintf("p%d-w%d", 1+3*i%60, i)), Device: 10})
	}
	body, err := api.Marshal(api.MsgPack, &there)
	if err != nil {
		b.Fatal(err)
	}
	w := &wires{reply: body}
	w.models = func(events.Partition, string) bool { return true }
	s := New(Config{
		Self: "n0", Partitions: partitions, Local: local, View: func() View { return w },
		Transport: w, Hedges: &rpc.Budget{},
		PartitionOf: func(id events.WorkerID) (events.Partition, error) {
			return events.Partition(len(id) % partitions),
				nil
		},
	})
	q := &api.Query{Model: "m", Hashes: make(api.Hashes, 64)}
	for _, c := range []struct {
		name  string
		nodes int
		find  func(context.Context, *api.Query) (*api.Answer, error)
	}{{"alone", 1, local.Find}, {"own", 1, s.Find}, {"three nodes", 3, s.Find}} {
		w.serving, w.fit = nil, nil
		for p := range partitions {
			w.serving, w.fit = append(w.serving, []string{fmt.Sprint("n", p%c.nodes)}), append(w.fit, 1)
		}
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if a, err := c.find(context.Background(), q); err != nil || !a.Complete {
					b.Fatal(a, err)
				}
			}
		})
	}
}

// BenchmarkForward measures the computation of two nodes and a client for a forwarded query of 128 blocks, with 16
// workers on each node in four of eight partitions, without lookups, sends and waits.
func BenchmarkForward(b *testing.B) {
	const partitions = 8
	w := &wires{}
	w.finishes = true
	w.models = func(events.Partition, string) bool { return true }
	shares := map[string]*still{}
	for i := range 32 {
		id := events.WorkerID(fmt.Sprint("worker-", i))
		p := events.Partition(id[len(id)-1]) % partitions
		node := fmt.Sprint("n", p%2)
		if i < partitions {
			w.serving, w.fit = append(w.serving, []string{node}), append(w.fit, 1)
		}
		share := shares[node]
		if share == nil {
			share = &still{answer: api.Answer{Model: "m", BlockSize: 16, Blocks: 128, Complete: true}}
			shares[node] = share
		}
		if i < partitions {
			share.answer.Partitions = append(share.answer.Partitions,
				api.PartitionStatus{Partition: p, Epoch: time.Unix(1_750_000_000, 5), Seq: 123456})
		}
		share.answer.Workers = append(share.answer.Workers,
			api.Overlap{Instance: id, Device: 128})
	}
	node := func(name string) *Scatter {
		return New(Config{Self: name, Partitions: partitions, Local: shares[name], View: func() View { return w },
			Transport: w, Hedges: &rpc.Budget{},
			Forward: func(string, time.Duration, string, string, []byte) error { return nil },
			PartitionOf: func(id events.WorkerID) (events.Partition, error) {
				return events.Partition(id[len(id)-1]) % partitions, nil
			}})
	}
	origin, finisher := node("n0"), node("n1")
	packed, err := api.Marshal(api.MsgPack, &api.Query{Model: "m", Hashes: make(api.Hashes, 128)})
	if err != nil {
		b.Fatal(err)
	}
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		q, answer := &api.Query{}, &api.Answer{}
		if err := api.Unmarshal(api.MsgPack, packed, q); err != nil {
			b.Fatal(err)
		}
		f := origin.Forward(ctx, api.MsgPack, q)
		if f == nil {
			b.Fatal("it is not forwarded")
		}
		there, err := ReadForwarded(f.body)
		if err != nil {
			b.Fatal(err)
		}
		_, a, err := finisher.Finish(ctx, there)
		if err != nil {
			b.Fatal(err)
		}
		body, err := api.Marshal(api.MsgPack, a)
		if err == nil {
			err = api.Unmarshal(api.MsgPack, body, answer)
		}
		if err != nil || len(answer.Workers) != 32 || !answer.Complete {
			b.Fatal(len(answer.Workers), answer.Complete, err)
		}
	}
}
