package scatter

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// still is an indexer that always says the same.
type still struct {
	Local
	answer api.Answer
}

func (s *still) Find(context.Context, *api.Query) (*api.Answer, error) {
	a := s.answer
	return &a, nil
}

// wires answers at once what it always does.
type wires struct {
	fleet
	reply []byte
}

func (w *wires) Send(_, _ string, _ time.Duration, _ string, _ []byte, to rpc.Receiver, tag int) (uint64, error) {
	to.Receive(tag, rpc.Reply{Body: w.reply})
	return 1, nil
}

// BenchmarkFind is a query of 64 blocks over 64 partitions: all of them this node's own, beside the same without a
// cluster; and two thirds of them at two other nodes, which answer at once with 20 workers each.
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
