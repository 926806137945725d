package node

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// HeldByRoot returns the held blocks of a model's workers in some partitions, by the first block of their prompts, and
// the partitions without an index. Each rank and tier of a block counts. Any goroutine may call HeldByRoot. Writers do
// not wait for it.
func (n *Node) HeldByRoot(model string, of []events.Partition) (
	held map[events.LocalHash]uint64, absent []events.Partition, err error,
) {
	if len(of) == 0 {
		return nil, nil, nil
	}
	absent = (&scratch{reflected: n.progress(nil)}).recordServing(of)
	view := n.view()
	served, failure := view.serving(&api.Query{Model: model}, n.registered(model))
	switch {
	case failure == nil:
	case failure.Code == api.CodeUnknownModel:
		return nil, absent, nil // other partitions have workers of the model
	default:
		return nil, absent, failure
	}
	held = map[events.LocalHash]uint64{}
	for _, shard := range served.Shards {
		var ranks radix.RankSet
		some := false
		for _, r := range served.Ranks {
			if r.Shard == shard && slices.Contains(of, r.Partition) && !slices.Contains(absent, r.Partition) {
				ranks.Add(r.ID)
				some = true
			}
		}
		if some {
			n.shards[shard].index.EachHeld(served.Space, &ranks, func(root events.LocalHash, holdings uint64) {
				held[root] += holdings
			})
		}
	}
	return held, absent, nil
}
