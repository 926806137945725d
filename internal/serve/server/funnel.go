package server

import (
	"context"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// newFunnel returns the tracker of lost reuse.
func (s *Server) newFunnel() *funnel.Tracker {
	return funnel.New(funnel.Config{
		Node: s.ID, Blocks: s.FunnelBlocks, Reused: s.queries.Reused,
		Indexed: func() uint64 { return s.node.DistinctBlocks() },
		Counted: func(model string, asked, seen uint64, held, selected funnel.Tiers, outcome string) {
			s.queries.Routed(model, asked, seen, held, selected, outcome)
		},
		Requested: s.requestedHook(),
		Tenants:   s.tenantLimit(), TenantRoots: s.tenants.Spaces(), Attributed: s.attributedHook(),
		Claimed:    s.registry.Claimed,
		BlockSizes: func(model string) []uint32 { return s.node.BlockSizes(model) },
		Peers:      s.blockHistories,
	})
}

// blockHistories returns the histories of the other nodes, and the number of nodes without an answer. It waits until
// ctx ends.
func (s *Server) blockHistories(ctx context.Context, q *peerapi.BlockHistoryRequest) (list []*peerapi.BlockHistory,
	unheard int) {
	names := s.otherNodes()
	replies, missing, err := collectPartial(names, func(name string) (*peerapi.BlockHistory, error) {
		return onNode(s, name, func(n oneNode) (*peerapi.BlockHistory, error) { return n.BlockHistory(ctx, q) })
	})
	if err != nil {
		return nil, len(names)
	}
	for _, r := range replies {
		list = append(list, r.answer)
	}
	return list, len(missing)
}

func (s *Server) otherNodes() []string {
	return slices.DeleteFunc(s.nodes(), func(name string) bool { return name == s.ID })
}

// holders are the workers with the longest prefixes of a prompt, the longest first.
type holders struct {
	list [8]holder
	n    int

	asked      bool // the index has answered
	shared     uint32
	incomplete bool
}

type holder struct {
	key   events.RankKey
	depth uint32
	in    funnel.Tiers
}

// readAnswer reads the holders from an answer.
func (h *holders) readAnswer(a *api.Answer) {
	h.n, h.asked, h.shared, h.incomplete = 0, true, a.L3.FromStart, !a.Complete
	for i := range a.Workers {
		o := &a.Workers[i]
		in := tiers(o)
		depth := in.Blocks()
		if depth == 0 || h.n == len(h.list) && depth <= h.list[h.n-1].depth {
			continue
		}
		h.n = min(h.n+1, len(h.list))
		at := h.n - 1
		for ; at > 0 && h.list[at-1].depth < depth; at-- {
			h.list[at] = h.list[at-1]
		}
		h.list[at] = holder{events.RankKey{Instance: o.Instance, Rank: o.Rank}, depth, in}
	}
}

// most returns the longest prefix of the holders with is true.
func (h *holders) most(is func(events.RankKey) bool) uint32 {
	for i := range h.list[:h.n] {
		if is(h.list[i].key) {
			return h.list[i].depth
		}
	}
	return 0
}

// fill writes the holders into a funnel request.
func (h *holders) fill(r *funnel.Request) {
	if h.n > 0 {
		r.Held, r.HeldIn = h.list[0].depth, h.list[0].in
	}
	r.Shared, r.Incomplete = h.shared, h.incomplete
}

// recorded returns the funnel request of a query, without the answer, or nil if the query is not recorded.
func (s *Server) recorded(ctx context.Context, q *api.Query, blockSize uint32) *funnel.Request {
	if q.EngineHashes != nil || q.Hashed != nil || q.Partitions != nil || blockSize == 0 {
		return nil
	}
	now := time.Now()
	if !s.funnel.Admit(max(len(q.Tokens)/int(blockSize), len(q.Hashes)), now) {
		return nil
	}
	return &funnel.Request{At: now, Model: q.Model, Tenant: s.tenantOf(ctx, q), BlockSize: blockSize, Tokens: q.Tokens,
		Space: events.Space{LoRA: q.LoRA, Salt: q.CacheSalt}, Media: q.Media, Hashes: q.Hashes,
		Restricted: q.Workers != nil || q.Ranks != nil || q.Endpoints != nil}
}

// recordAnswered records an answered query. Queries with explain are not recorded, because people send them.
func (s *Server) recordAnswered(ctx context.Context, q *api.Query, a *api.Answer) {
	if q.Explain || q.Diagnostic {
		return
	}
	r := s.recorded(ctx, q, a.BlockSize)
	if r == nil {
		return
	}
	var h holders
	h.readAnswer(a)
	h.fill(r)
	s.funnel.Record(r)
}

// routed records a request with or without a chosen worker. An advisory choice is not recorded.
func (s *Server) routed(ctx context.Context, q *api.SelectRequest, h *holders, out *api.Selection, err error) {
	if q.Advisory || q.Diagnostic {
		return
	}
	size := uint32(0)
	pool := s.registry.Pool(q.Model)
	switch {
	case out != nil:
		size = out.BlockSize
	case api.AsError(err).Code != api.CodeNoWorkers && api.AsError(err).Code != api.CodeOverloaded:
		return
	case len(pool.Ranks) > 0:
		size = pool.Ranks[0].BlockSize
	}
	r := s.recorded(ctx, &q.Query, size)
	if r == nil {
		return
	}
	r.ISL, r.Routed, r.ID = q.ISLTokens, true, q.RequestID
	h.fill(r)
	r.Pinned = q.Pinned != nil
	r.Unsupported = q.Unsupported || out != nil && out.Tokenization != nil && len(out.Tokenization.UnsupportedFields) > 0
	r.Registered = h.most(func(k events.RankKey) bool { return pool.Rank(k) != nil })
	if r.Registered < r.Held {
		r.Known = h.most(func(k events.RankKey) bool { return pool.Rank(k) != nil || s.registry.Ended(k.Instance) })
	}
	role := q.Role
	if q.Disaggregated {
		role = routing.Prefill
	}
	if out != nil && out.Disaggregation != nil {
		switch out.Disaggregation.Outcome {
		case api.ShortPrompt, api.PrefillBusy:
			r.Bypass = true
		case api.NoPrefillWorker, api.NoDecodeWorker:
			role = ""
		}
	}
	r.Eligible = h.most(func(k events.RankKey) bool { return eligible(q, role, pool.Rank(k)) })
	if out != nil {
		r.Lowered = out.Quota != nil
		if out.Prefill != nil { // the prefill worker computes the prompt
			out = out.Prefill
		}
		r.ISL, r.Incomplete = max(r.ISL, out.ISLTokens), r.Incomplete || !out.Complete
		r.Worker = out.Worker
		r.SelectedIn = funnel.NewTiers(max(out.Device, out.Guessed), out.Host, out.Disk, out.External)
		if r.Selected = r.SelectedIn.Blocks(); r.Selected > r.Held {
			r.Held, r.HeldIn = r.Selected, r.SelectedIn
		}
		r.Registered = max(r.Registered, r.Selected)
		r.Eligible = max(r.Eligible, r.Selected)
	}
	s.funnel.Record(r)
}

// eligible reports whether a rank of a pool could be chosen with less load.
func eligible(q *api.SelectRequest, pool routing.Role, r *registry.PoolRank) bool {
	if r == nil || r.Record.State != api.WorkerSchedulable {
		return false
	}
	return (q.Workers == nil || slices.Contains(q.Workers, r.Instance)) &&
		(q.Ranks == nil || slices.Contains(q.Ranks, api.RankPlace{Instance: r.Instance, Rank: r.Rank})) &&
		(q.Endpoints == nil || slices.Contains(q.Endpoints, r.Record.Endpoint)) &&
		routing.Role(r.Record.Role).In(pool) &&
		!slices.ContainsFunc(q.RequiredTaints, func(t string) bool { return !slices.Contains(r.Record.Taints, t) })
}

// ReportReused records the reused tokens of a prompt, as an engine reported them to the gateway. alone means that the
// chosen prefill worker did not compute the prompt.
func (m measured) ReportReused(id string, cached uint64, alone bool) {
	r := api.Report{RequestID: id, CachedTokens: cached}
	m.s.recordReport(&r)
	m.s.funnel.ReportLater(r, alone)
}

// ReportAnswer records the tokens of an answer, as an engine reported them to the gateway.
func (m measured) ReportAnswer(id string, tokens uint64) { m.s.recordAnswer(id, tokens) }

// Funnel returns the sum of all nodes' funnels.
func (s *Server) Funnel(ctx context.Context, r *api.FunnelRequest) (*api.Funnel, error) {
	if err := s.named(&r.Model); err != nil {
		return nil, err
	}
	if err := s.admit(); err != nil {
		return nil, err
	}
	window, err := r.Window()
	if err != nil {
		return nil, err
	}
	sum, err := s.funnel.Funnel(ctx, r.Model, window)
	if err != nil {
		return nil, api.AsError(err)
	}
	parts, missing, err := fromNodes(ctx, s, s.otherNodes(),
		func(ctx context.Context, n oneNode, _ string) (*api.Funnel, error) { return n.Funnel(ctx, r) })
	if err != nil {
		return nil, err
	}
	for _, part := range parts {
		funnel.Merge(sum, part.answer)
	}
	sum.Missing = append(sum.Missing, missing...)
	if sum.Requests == 0 && len(sum.Missing) == 0 && len(s.registry.Pool(r.Model).Ranks) == 0 &&
		len(s.node.BlockSizes(r.Model)) == 0 {
		return nil, unknownModel(r.Model)
	}
	return sum, nil
}

func unknownModel(model string) error {
	return api.Errorf(api.CodeUnknownModel, "no worker has announced the model %q, and no query has named it", model)
}

// Recorded lists the newest records of all nodes, or queries the node of a single record.
func (s *Server) Recorded(ctx context.Context, q *api.RecordedRequest) (*api.RecordedList, error) {
	if err := s.named(&q.Model); err != nil {
		return nil, err
	}
	if err := s.admit(); err != nil {
		return nil, err
	}
	names := s.otherNodes()
	if q.ID != "" {
		node, err := funnel.RecordedNode(q.ID)
		if err != nil {
			return nil, err
		}
		names = slices.DeleteFunc(names, func(name string) bool { return name != node })
	}
	all, err := s.funnel.Recorded(ctx, q)
	if err != nil {
		return nil, api.AsError(err)
	}
	parts, missing, err := fromNodes(ctx, s, names,
		func(ctx context.Context, n oneNode, _ string) (*api.RecordedList, error) { return n.Recorded(ctx, q) })
	if err != nil {
		return nil, err
	}
	for _, part := range parts {
		funnel.MergeRecorded(all, part.answer, q)
	}
	all.Missing = append(all.Missing, missing...)
	switch {
	case q.ID == "" || len(all.Requests) > 0:
		return all, nil
	case len(all.Missing) > 0:
		return nil, api.Errorf(api.CodeUnavailable, "node %s, which has recorded the request, does not answer",
			all.Missing[0])
	}
	return nil, api.Errorf(api.CodeUnknownRequest, "request %.100q of %q is not kept: "+
		"a node keeps only the newest %d of a model", q.ID, q.Model, api.MaxRecorded)
}

// Report sends a report to the node of the choice.
func (s *Server) Report(ctx context.Context, r *api.Report) error {
	if err := s.admit(); err != nil {
		return err
	}
	known, err := s.funnel.Report(ctx, r)
	if known {
		s.recordReport(r)
	}
	if err != nil || known {
		return err
	}
	replies, missing, err := fromNodes(ctx, s, s.otherNodes(),
		func(ctx context.Context, n oneNode, _ string) (known bool, err error) {
			err = n.Report(ctx, r)
			if err != nil && api.AsError(err).Code == api.CodeUnknownRequest {
				return false, nil
			}
			return err == nil, err
		})
	switch {
	case err != nil:
		return err
	case slices.ContainsFunc(replies, func(r reply[bool]) bool { return r.answer }):
		return nil
	case len(missing) > 0:
		return api.Errorf(api.CodeUnavailable, "nodes %q do not answer; the others have chosen no worker for request %.100q",
			missing, r.RequestID)
	}
	return unknownReport(r)
}

func unknownReport(r *api.Report) error {
	return api.Errorf(api.CodeUnknownRequest, "no worker was chosen for request %.100q recently, or the report "+
		"exists already; send the request_id with select", r.RequestID)
}

// BlockHistory returns this node's history of blocks.
func (s *Server) BlockHistory(_ context.Context, q *peerapi.BlockHistoryRequest) (*peerapi.BlockHistory, error) {
	return s.funnel.BlockHistory(q), nil
}
