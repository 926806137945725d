package server

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/removal"
	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/index/sole"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// demandWindow is the time of the requests that stand for the demand.
const demandWindow = time.Hour

// longestKept is the number of workers with the longest prefixes of a request that a part has.
const longestKept = 32

// RemovalPart returns the blocks of some partitions by holder, and the demand for blocks on this node.
func (s *Server) RemovalPart(ctx context.Context, q *api.RemovalRequest) (*peerapi.RemovalPart, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	out, err := s.node.Sole(q)
	if err != nil {
		return nil, err
	}
	sample, err := s.funnel.Sample(ctx, q.Model)
	if err != nil {
		return nil, api.AsError(err)
	}
	sum, err := s.funnel.Funnel(ctx, q.Model, demandWindow)
	if err != nil {
		return nil, api.AsError(err)
	}
	if hours := sum.To.Sub(sum.From).Hours(); hours > 0 {
		out.PerHour = float64(sum.Requests) / hours
	}
	for _, hashes := range sample {
		a, err := s.find(ctx, &api.Query{Model: q.Model, BlockSize: q.BlockSize, Hashes: api.Hashes(raw(hashes)),
			L3: api.L3Off})
		if err != nil {
			return nil, err
		}
		depths := map[events.WorkerID]uint32{}
		for i := range a.Workers {
			o := &a.Workers[i]
			in := tiers(o)
			depths[o.Instance] = max(depths[o.Instance], in.Blocks())
		}
		longest := slices.SortedFunc(maps.Keys(depths), func(a, b events.WorkerID) int {
			return cmp.Or(cmp.Compare(depths[b], depths[a]), cmp.Compare(a, b))
		})
		of := peerapi.RemovalDepths{Workers: longest[:min(len(longest), longestKept)]}
		for _, worker := range of.Workers {
			of.Blocks = append(of.Blocks, depths[worker])
		}
		out.Requests = append(out.Requests, of)
	}
	return out, nil
}

// raw converts local hashes.
func raw(hashes []events.LocalHash) []uint64 {
	list := make([]uint64, len(hashes))
	for i, h := range hashes {
		list[i] = uint64(h)
	}
	return list
}

// RemovalOrder joins the parts of all nodes. Each partition is of one node that serves it.
func (s *Server) RemovalOrder(ctx context.Context, q *api.RemovalRequest) (*api.RemovalOrder, error) {
	named := *q
	if err := s.named(&named.Model); err != nil {
		return nil, err
	}
	if err := s.admit(); err != nil {
		return nil, err
	}
	out := &api.RemovalOrder{Model: named.Model, Workers: []api.RemovalCost{}}
	share, unserved := s.sharePartitions()
	out.Missing = unserved
	parts, missing, err := fromNodes(ctx, s, s.nodes(),
		func(ctx context.Context, n oneNode, name string) (*peerapi.RemovalPart, error) {
			part := named
			part.Partitions = share[name]
			return n.RemovalPart(ctx, &part)
		})
	if err != nil {
		return nil, err
	}
	out.Unheard = missing
	for _, name := range missing {
		out.Missing = append(out.Missing, share[name]...)
	}
	var found sole.Blocks
	var sample [][]removal.Depth
	zeroBits := uint32(0) // of the smallest sample of blocks
	for _, p := range parts {
		zeroBits = max(zeroBits, p.answer.Bits)
	}
	out.BlockSample = 1 << zeroBits
	for _, p := range parts {
		part := p.answer
		out.BlockSize = max(out.BlockSize, part.BlockSize)
		out.Missing, out.RequestsPerHour = append(out.Missing, part.Missing...), out.RequestsPerHour+part.PerHour
		for _, h := range part.Holders {
			for _, block := range h.Blocks {
				if sole.Sampled(block, zeroBits) {
					found.Add(block, h.Worker)
				}
			}
		}
		for _, r := range part.Requests {
			depths := make([]removal.Depth, min(len(r.Workers), len(r.Blocks)))
			for i := range depths {
				depths[i] = removal.Depth{Worker: r.Workers[i], Blocks: r.Blocks[i]}
			}
			sample = append(sample, depths)
		}
	}
	slices.Sort(out.Missing)
	out.Complete = len(out.Missing)+len(out.Unheard) == 0
	return out, s.rank(ctx, out, &found, sample)
}

// sharePartitions assigns every partition to a node that serves it. Partitions without a node are missing.
func (s *Server) sharePartitions() (share map[string][]events.Partition, missing []events.Partition) {
	share = map[string][]events.Partition{}
	view := s.view()
	for i := range s.ns.Partitions() {
		p := events.Partition(i)
		list := []string{s.ID}
		if view != nil {
			if list = view.Serving(p); len(list) > 0 && slices.Contains(list[:max(view.Fit(p), 1)], s.ID) {
				list = []string{s.ID}
			}
		}
		if len(list) == 0 {
			missing = append(missing, p)
			continue
		}
		share[list[0]] = append(share[list[0]], p)
	}
	return share, missing
}

// rank fills the workers and the demand of an order.
func (s *Server) rank(ctx context.Context, out *api.RemovalOrder, found *sole.Blocks, sample [][]removal.Depth) error {
	unique := map[events.WorkerID]uint64{}
	for worker, blocks := range found.Holders() {
		unique[worker] = uint64(len(blocks)) * out.BlockSample
	}
	delete(unique, "")
	var workers []events.WorkerID
	for _, r := range s.registry.Pool(out.Model).Ranks {
		workers = append(workers, r.Instance)
		out.BlockSize = max(out.BlockSize, r.BlockSize)
	}
	slices.Sort(workers)
	if workers = slices.Compact(workers); len(workers) == 0 && len(out.Unheard) == 0 {
		return api.Errorf(api.CodeUnknownModel, "no worker has registered for the model %q", out.Model)
	}
	out.Sample, out.MSPerBlock = len(sample), float64(out.BlockSize)/s.prefillRate(ctx, out.Model)
	each := out.RequestsPerHour / math.Max(float64(len(sample)), 1)
	for _, c := range removal.Rank(workers, unique, sample) {
		blocks := float64(c.Blocks) * each
		out.Workers = append(out.Workers, api.RemovalCost{Worker: c.Worker, Unique: unique[c.Worker],
			RequestsPerHour: float64(c.Requests) * each, BlocksPerHour: blocks, MSPerHour: blocks * out.MSPerBlock})
	}
	return nil
}

// prefillRate returns the mean measured speed of a model's ranks, in tokens per millisecond. Without measurements it
// returns the rate that choices assume.
func (s *Server) prefillRate(ctx context.Context, model string) float64 {
	list, err := s.selection.Loads(ctx, &api.LoadsRequest{Model: model})
	if err != nil || len(list.Models) == 0 || len(list.Models[0].Paces) == 0 {
		var unmeasured routing.Pace
		return unmeasured.Rate(0)
	}
	sum := 0.0
	for _, p := range list.Models[0].Paces {
		sum += p.PrefillTokensPerS
	}
	return sum / 1000 / float64(len(list.Models[0].Paces))
}

// addQueued adds the requests in this node's queue.
func (s *Server) addQueued(out *api.Scaling) {
	requests, uncached := s.selection.Queued(out.Model)
	out.QueuedRequests, out.QueuedUncachedTokens = out.QueuedRequests+requests, out.QueuedUncachedTokens+uncached
}

// Scaling sums up the waiting work of all nodes. All nodes have the same bookings, but each has a queue.
func (s *Server) Scaling(ctx context.Context, q *api.ScalingRequest) (*api.Scaling, error) {
	named := *q
	if err := s.named(&named.Model); err != nil {
		return nil, err
	}
	return admitted(ctx, s, &named, func(ctx context.Context, q *api.ScalingRequest) (*api.Scaling, error) {
		out := &api.Scaling{Model: q.Model}
		list, err := s.selection.Loads(ctx, &api.LoadsRequest{Model: q.Model})
		if err != nil {
			return nil, err
		}
		for _, m := range list.Models {
			for _, r := range m.Ranks {
				out.WaitingUncachedTokens += r.ActivePrefillTokens
			}
		}
		s.addQueued(out)
		parts, missing, err := fromNodes(ctx, s, s.otherNodes(),
			func(ctx context.Context, n oneNode, _ string) (*api.Scaling, error) { return n.Scaling(ctx, q) })
		if err != nil {
			return nil, err
		}
		for _, part := range parts {
			out.QueuedRequests += part.answer.QueuedRequests
			out.QueuedUncachedTokens += part.answer.QueuedUncachedTokens
		}
		out.Missing = missing
		out.WaitingUncachedTokens += out.QueuedUncachedTokens
		schedulable := map[events.WorkerID]bool{}
		for _, r := range s.registry.Pool(q.Model).Ranks {
			if r.Record.State == api.WorkerSchedulable {
				schedulable[r.Instance] = true
			}
		}
		out.Workers = len(schedulable)
		out.WaitingPerWorker = float64(out.WaitingUncachedTokens) / float64(max(out.Workers, 1))
		return out, nil
	})
}
