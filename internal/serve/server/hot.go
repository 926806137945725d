package server

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/hot"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/choose/warm"
	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// HotPrefixes configures the search for hot prefixes, and copies of them.
type HotPrefixes struct {
	Entries     int // counted prefixes of a model; 0 disables the search, unless PerMinute is set
	PerMinute   int // copies in a minute without an operator; 0: none
	PromptBytes int // memory for tokens of hot prefixes; 0: none, or defaultPrompts with PerMinute
}

// Defaults of nodes that make copies.
const (
	defaultPrefixes = 1024
	defaultPrompts  = 64 << 20
)

// hots counts the demand for prefixes on this node.
type hots struct {
	cfg     HotPrefixes
	prompts *warm.Prompts
	engines *warm.Engines
	planner hot.Planner // of the goroutine that runs warmUp

	mu     sync.Mutex
	models map[string]*hotModel

	copies, failures, computed atomic.Uint64 // of this node: copies, failed copies, and their tokens
}

// hotModel is the demand for prefixes of a model.
type hotModel struct {
	mu      sync.Mutex
	tracker *hot.Tracker
	size    uint32 // of a block
}

// mostHotModels bounds the models with counted prefixes.
const mostHotModels = 256

func (s *Server) newHots() *hots {
	if s.Hot.PerMinute > 0 {
		s.Hot.Entries = cmp.Or(s.Hot.Entries, defaultPrefixes)
		s.Hot.PromptBytes = cmp.Or(s.Hot.PromptBytes, defaultPrompts)
	}
	if s.Hot.Entries == 0 {
		return nil
	}
	return &hots{cfg: s.Hot, prompts: warm.NewPrompts(s.Hot.PromptBytes), engines: warm.NewEngines(s.Screen.Rule),
		planner: hot.Planner{PerMinute: s.Hot.PerMinute}, models: map[string]*hotModel{}}
}

// model returns the demand of a model; nil if there are too many models.
func (h *hots) model(name string) *hotModel {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.models[name]
	if m == nil && len(h.models) < mostHotModels {
		m = &hotModel{tracker: hot.New(hot.Config{Entries: h.cfg.Entries})}
		h.models[name] = m
	}
	return m
}

// observeHook returns the function that receives requests with their choices; nil if no part needs them.
func (s *Server) observeHook() func(*selection.Observed) {
	record := s.recordHook()
	switch {
	case s.hots == nil:
		return record
	case record == nil:
		return s.countHot
	}
	return func(o *selection.Observed) {
		record(o)
		s.countHot(o)
	}
}

// countHot counts the prefixes of a request, and keeps the tokens of hot ones.
func (s *Server) countHot(o *selection.Observed) {
	q := o.Request
	at, ok := o.ChosenAt()
	if !ok || o.Out.Prefill != nil || q.Disaggregated || q.EngineHashes != nil || len(o.Sequence) == 0 {
		return
	}
	m := s.hots.model(o.Out.Model)
	if m == nil {
		return
	}
	r := o.Routed
	c := &hot.Choice{Request: r, Ranks: o.Ranks, Chosen: at, Sequence: o.Sequence, Locals: o.Locals,
		Bound: r.Pin != nil || r.Affinity != nil || r.Allowed != nil || r.Endpoints != nil || r.LoRA != "" ||
			r.RequiredTaints != nil}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.size = o.BlockSize
	var unmeasured routing.Pace
	for _, b := range m.tracker.Chose(s.loads.Now(), c) {
		tokens := int(b.Depth) * int(o.BlockSize)
		if tokens <= len(q.Tokens) && q.Media == nil && b.MS > keptShare*float64(tokens)/unmeasured.Rate(0) {
			s.hots.prompts.Offer(warm.Key{Model: o.Out.Model, Hash: b.Hash},
				&warm.Prompt{Tokens: q.Tokens[:tokens], Salt: q.CacheSalt}, b.MS)
		}
	}
}

// keptShare is the least benefit of a prefix whose tokens are kept, as a share of the time to compute the prefix.
const keptShare = 0.25

// HotPart returns the counts of this node.
func (s *Server) HotPart(_ context.Context, r *api.HotRequest) (*peerapi.HotPart, error) {
	out := &peerapi.HotPart{Disabled: s.hots == nil, Prefixes: []peerapi.HotCounts{}, Copies: []api.PrefixCopy{}}
	if out.Disabled {
		return out, nil
	}
	m := s.hots.model(r.Model)
	if m == nil {
		return out, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	out.BlockSize = m.size
	blocks := 0
	for _, p := range m.tracker.Prefixes(s.loads.Now(), hot.Listed) {
		c := peerapi.HotCounts{Hash: p.Hash, Above: p.Above, Blocks: p.Depth, Requests: p.PerSecond,
			Recomputed: p.Recomputed, Waited: p.Waited, Saves: p.Saves, Helped: p.Helped}
		_, c.Kept = s.hots.prompts.Get(warm.Key{Model: r.Model, Hash: p.Hash})
		if blocks+len(p.Locals) <= peerapi.HotPartBlocks {
			c.Locals, blocks = raw(p.Locals), blocks+len(p.Locals)
		}
		out.Prefixes = append(out.Prefixes, c)
	}
	for _, c := range m.tracker.Copies() {
		out.Copies = append(out.Copies, api.PrefixCopy{Hash: api.PrefixHash(c.Hash), Blocks: c.Depth,
			Worker: c.Rank.Instance, Rank: c.Rank.Rank, At: time.UnixMilli(int64(c.AtMS)).UTC(), Automatic: c.Automatic,
			Computed: uint64(c.Depth-c.Before) * uint64(m.size), TookMS: c.TookMS, Requests: c.Requests, Reused: c.Tokens,
			SavedMS: c.SavedMS})
	}
	return out, nil
}

// HotPrefixes joins the counts of all nodes, and adds the holders and the best worker for a copy.
func (s *Server) HotPrefixes(ctx context.Context, r *api.HotRequest) (*api.HotList, error) {
	named := *r
	if err := s.named(&named.Model); err != nil {
		return nil, err
	}
	if err := s.admitChoice(); err != nil {
		return nil, err
	}
	if len(s.registry.Pool(named.Model).Ranks) == 0 {
		return nil, unknownModel(named.Model)
	}
	out := &api.HotList{Model: named.Model, Prefixes: []api.HotPrefix{}, Copies: []api.PrefixCopy{},
		Automatic: s.Hot.PerMinute}
	list, err := s.gatherHot(ctx, &named, out)
	if err != nil {
		return nil, err
	}
	for _, p := range list {
		x := api.HotPrefix{Hash: api.PrefixHash(p.Hash), Blocks: p.Depth, Tokens: uint64(p.Depth) * uint64(out.BlockSize),
			RequestsPerS: p.PerSecond, RecomputedPerS: p.Recomputed, Holders: []events.WorkerID{},
			SavesMSPerHour: p.Saves * time.Hour.Seconds(), HelpedRequests: p.Helped, TokensKept: p.kept}
		if p.PerSecond > 0 {
			x.WaitMS = p.Waited / p.PerSecond
		}
		if err := s.addTarget(ctx, out, &p.Prefix, &x); err != nil {
			return nil, err
		}
		x.BenefitMSPerHour = x.SavesMSPerHour - x.CostMS
		out.Prefixes = append(out.Prefixes, x)
	}
	slices.SortStableFunc(out.Prefixes, func(a, b api.HotPrefix) int {
		return cmp.Compare(b.BenefitMSPerHour, a.BenefitMSPerHour)
	})
	return out, nil
}

// hotPrefix is a prefix of all nodes.
type hotPrefix struct {
	hot.Prefix
	kept bool // a node has the tokens
}

// gatherHot returns the prefixes of all nodes, and writes the copies and the nodes' names into out.
func (s *Server) gatherHot(ctx context.Context, r *api.HotRequest, out *api.HotList) (list []hotPrefix, err error) {
	parts, missing, err := fromNodes(ctx, s, s.nodes(),
		func(ctx context.Context, n oneNode, _ string) (*peerapi.HotPart, error) { return n.HotPart(ctx, r) })
	if err != nil {
		return nil, err
	}
	out.Missing = missing
	var lists [][]hot.Prefix
	kept := map[events.SeqHash]bool{}
	for _, p := range parts {
		part := p.answer
		if part.Disabled {
			out.Disabled = append(out.Disabled, p.node)
		}
		out.BlockSize = max(out.BlockSize, part.BlockSize)
		var one []hot.Prefix
		for _, c := range part.Prefixes {
			kept[c.Hash] = kept[c.Hash] || c.Kept
			one = append(one, hot.Prefix{Hash: c.Hash, Above: c.Above, Depth: c.Blocks, Locals: locals(c.Locals),
				PerSecond: c.Requests, Recomputed: c.Recomputed, Waited: c.Waited, Saves: c.Saves, Helped: c.Helped})
		}
		lists = append(lists, one)
		out.Copies = addCopies(out.Copies, part.Copies)
	}
	slices.SortStableFunc(out.Copies, func(a, b api.PrefixCopy) int { return b.At.Compare(a.At) })
	for _, p := range hot.Merge(int(cmp.Or(r.Limit, api.UsualHot)), lists...) {
		list = append(list, hotPrefix{p, kept[p.Hash]})
	}
	return list, nil
}

// addCopies adds a node's copies. Each node counts the requests that it has routed.
func addCopies(all, more []api.PrefixCopy) []api.PrefixCopy {
	for _, c := range more {
		i := slices.IndexFunc(all, func(o api.PrefixCopy) bool {
			return o.Hash == c.Hash && o.Worker == c.Worker && o.Rank == c.Rank && o.At.Equal(c.At)
		})
		if i < 0 {
			all = append(all, c)
			continue
		}
		to := &all[i]
		to.Requests, to.Reused, to.SavedMS = to.Requests+c.Requests, to.Reused+c.Reused, to.SavedMS+c.SavedMS
	}
	return all
}

// locals converts the hashes of another node.
func locals(list api.Hashes) []events.LocalHash {
	if len(list) == 0 {
		return nil
	}
	out := make([]events.LocalHash, len(list))
	for i, h := range list {
		out[i] = events.LocalHash(h)
	}
	return out
}

// addTarget adds the holders, the best worker for a copy, and the cost there.
func (s *Server) addTarget(ctx context.Context, list *api.HotList, p *hot.Prefix, x *api.HotPrefix) error {
	if p.Locals == nil {
		return nil
	}
	q := &api.SelectRequest{Query: api.Query{Model: list.Model, BlockSize: list.BlockSize,
		Hashes: raw(p.Locals), Diagnostic: true}}
	return s.selection.Prospect(ctx, q, func(of *selection.Prospect) {
		best, cost, holders := hot.Target(of.Request, of.Ranks)
		for _, i := range holders {
			x.Holders = append(x.Holders, of.Ranks[i].Worker.ID)
		}
		slices.Sort(x.Holders)
		x.Holders = slices.Compact(x.Holders)
		if best >= 0 {
			x.Target, x.TargetRank, x.CostMS = of.Ranks[best].Worker.ID, of.Ranks[best].Rank, cost
		}
	})
}

// hotStatus returns the counts of copies of this node; nil if prefixes are not counted.
func (s *Server) hotStatus() *api.HotStatus {
	h := s.hots
	if h == nil {
		return nil
	}
	out := &api.HotStatus{Copies: h.copies.Load(), Failed: h.failures.Load(), Computed: h.computed.Load(),
		PromptBytes: uint64(h.prompts.Bytes())}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range h.models {
		m.mu.Lock()
		total := m.tracker.Total()
		m.mu.Unlock()
		out.Requests, out.Reused, out.SavedMS = out.Requests+total.Requests, out.Reused+total.Tokens,
			out.SavedMS+total.SavedMS
	}
	return out
}
