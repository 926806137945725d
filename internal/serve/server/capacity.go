package server

import (
	"context"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/operate/capacity"
	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// newCapacity returns the tracker of sampled references to blocks, or nil if CapacityRefs is 0.
func (s *Server) newCapacity() *capacity.Tracker {
	if s.CapacityRefs == 0 {
		return nil
	}
	return capacity.New(capacity.Config{Samples: s.CapacityRefs, Blocks: func(model string) (blocks uint64) {
		for _, r := range s.registry.Pool(model).Ranks {
			blocks += r.Record.TotalKVBlocks
		}
		return max(blocks, s.node.DistinctBlocks())
	}})
}

// newBoard returns the capacity curves for metrics, or nil without samples. Only the node with the first name computes
// curves, because a curve needs the samples of all nodes.
func (s *Server) newBoard() *capacity.Board {
	if s.capacity == nil {
		return nil
	}
	return capacity.NewBoard(capacity.BoardConfig{
		Models: func() (models []string) {
			if !s.firstNode() {
				return nil
			}
			for _, p := range s.registry.Pools() {
				models = append(models, p.Model)
			}
			return models
		},
		Compute: func(ctx context.Context, model string) (*api.Capacity, error) {
			return s.Capacity(ctx, &api.CapacityRequest{Model: model})
		},
	})
}

// requestedHook returns the function that samples the blocks of requests; nil if sampling is off.
func (s *Server) requestedHook() func(*funnel.Request, []funnel.Name) {
	if s.capacity == nil {
		return nil
	}
	return func(r *funnel.Request, names []funnel.Name) {
		s.capacity.Requested(r.Model, r.BlockSize, r.At, r.Worker, names)
	}
}

// CapacitySamples returns this node's sampled references.
func (s *Server) CapacitySamples(
	ctx context.Context, r *peerapi.CapacitySamplesRequest,
) (*peerapi.CapacitySamples, error) {
	out := &peerapi.CapacitySamples{Disabled: s.capacity == nil, Workers: []events.WorkerID{}}
	if out.Disabled {
		return out, nil
	}
	if err := s.funnel.Flush(ctx); err != nil {
		return nil, api.AsError(err)
	}
	out.Dropped = s.funnel.Dropped()
	if of := s.capacity.Samples(r.Model, int(r.Most)); of != nil {
		out.BlockSize, out.Below, out.Refs = of.BlockSize, uint64(of.Below), capacity.Encode(of.Refs)
		out.Workers, out.Skipped = of.Workers, of.Skipped
	}
	return out, nil
}

// capacityPart has the samples of a node, with the decoded references.
type capacityPart struct {
	*peerapi.CapacitySamples
	refs []capacity.Ref
}

// Capacity returns the hit rates of a model from the samples of all nodes.
func (s *Server) Capacity(ctx context.Context, r *api.CapacityRequest) (*api.Capacity, error) {
	if err := s.named(&r.Model); err != nil {
		return nil, err
	}
	if err := s.admit(); err != nil {
		return nil, err
	}
	sizes, workers, err := s.tierSizes(ctx, r.Model)
	if err != nil {
		return nil, err
	}
	names := s.nodes()
	most := max(1, peerapi.MaxCapacitySamples/max(1, len(names)))
	q := &peerapi.CapacitySamplesRequest{Model: r.Model, Most: uint32(most)}
	parts, missing, err := fromNodes(ctx, s, names,
		func(ctx context.Context, n oneNode, _ string) (part capacityPart, err error) {
			if part.CapacitySamples, err = n.CapacitySamples(ctx, q); err == nil {
				part.refs, err = capacity.Decode(part.Refs)
			}
			return part, err
		})
	if err != nil {
		return nil, err
	}
	var all []*capacity.Samples
	var answered, disabled []string
	dropped := uint64(0)
	for _, p := range parts {
		part := p.answer
		if part.BlockSize != 0 {
			all = append(all, &capacity.Samples{BlockSize: part.BlockSize, Below: funnel.Name(part.Below), Refs: part.refs,
				Workers: part.Workers, Skipped: part.Skipped})
		}
		if part.Disabled {
			disabled = append(disabled, p.node)
		}
		answered = append(answered, p.node)
		dropped += part.Dropped
	}
	if len(all) == 0 && len(missing) == 0 && len(s.registry.Pool(r.Model).Ranks) == 0 &&
		len(s.node.BlockSizes(r.Model)) == 0 {
		return nil, unknownModel(r.Model)
	}
	out := capacity.Report(r.Model, capacity.Compute(all, workers), sizes)
	out.Nodes, out.Missing, out.Dropped = answered, missing, dropped
	out.Disabled = append(out.Disabled, disabled...)
	return out, nil
}

// tierSizes returns the sizes of a model's tiers: the registered sizes of device memory, and the held blocks of all
// other tiers and ranks. It also returns the number of workers. Workers that compute no prompts do not count.
func (s *Server) tierSizes(ctx context.Context, model string) (sizes capacity.Sizes, workers int, err error) {
	list, err := s.Workers(ctx, api.WorkersRequest{})
	if err != nil {
		return sizes, 0, err
	}
	pool, counted := s.registry.Pool(model), map[events.WorkerID]bool{}
	for i := range pool.Ranks {
		if r := &pool.Ranks[i]; computesPrompts(r.Record) {
			counted[r.Instance] = true
			sizes[events.Device-1].Blocks += r.Record.TotalKVBlocks
		}
	}
	for i := range list.Workers {
		w := &list.Workers[i]
		rank := pool.Rank(events.RankKey{Instance: w.Instance, Rank: w.Rank})
		if w.Model != model || rank != nil && !computesPrompts(rank.Record) {
			continue
		}
		counted[w.Instance] = true
		held := [events.NumTiers]uint64{w.Blocks.Device, w.Blocks.Host, w.Blocks.Disk, w.Blocks.External}
		if rank != nil && rank.Record.TotalKVBlocks > 0 {
			held[events.Device-1] = 0
		}
		for tier, n := range held {
			sizes[tier].Blocks += n
			sizes[tier].Held = sizes[tier].Held || n > 0
		}
	}
	return sizes, len(counted), nil
}

// computesPrompts reports whether a worker has a cache of prompts that it computes itself.
func computesPrompts(r *api.WorkerRecord) bool {
	role := routing.Role(r.Role)
	return role != routing.Decode && role != routing.Encode
}
