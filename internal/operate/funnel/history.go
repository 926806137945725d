package funnel

import (
	"slices"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/zeebo/xxh3"
)

// Name identifies a block with all blocks before it, for one model and block size.
type Name uint64

// space separates the names of a model and block size from others.
func space(model string, blockSize uint32) uint64 {
	return xxh3.HashStringSeed(model, uint64(blockSize))
}

// plain separates the names without the LoRA of prompts that have a LoRA.
const plain = 0x9e3779b97f4a7c15

// past is the history of a block. Times are microseconds since 1970; 0 means never.
type past struct {
	asked, stored, last, lost int64
	by                        [2]rankID // the rank of the last store, and the different rank before it; 0: none
	lostBy                    rankID
	tier                      events.Tier // the tier of the last loss
	held                      bool        // a worker held the block at the first request
}

// rankID numbers ranks in the order of their first events.
type rankID uint32

// maxRanks bounds the ranks in the history. A new rank replaces the oldest rank. A replaced rank gets a new id at its
// next event.
const maxRanks = 1 << 16

// rank is the history of one rank.
type rank struct {
	id          rankID
	key         events.RankKey
	incarnation events.Incarnation
	last        events.EventID
	lost        int64 // time at which all holdings were lost
	why         api.FunnelCause
	roots       []root // the last stored prompts, newest last
}

type root struct {
	name Name
	at   int64
}

// maxRoots bounds the stored beginnings of prompts of each rank.
const maxRoots = 32

type sent struct {
	to events.WorkerID
	at int64
}

// History stores the past of blocks. It reads no clock. Only one goroutine at a time may use it.
type History struct {
	blocks  generations[past]           // by name
	seqs    generations[events.SeqHash] // by engine hash and space
	sent    generations[sent]           // by name of the first block
	ranks   []rank                      // by id, modulo maxRanks; entry 0 is empty at first
	of      map[events.RankKey]rankID
	last    rankID
	from    int64 // the history is complete since this time
	ahead   int64 // start of the younger generation of blocks
	clock   int64 // time of the last event; times are unique, which orders the events
	adapted bool  // a prompt with a LoRA was requested

	// claimed reports whether a worker's events under a model are valid; nil accepts all.
	claimed func(instance events.WorkerID, model string) bool

	locals  []events.LocalHash
	seq     []events.SeqHash
	touched uint64 // has no meaning; without it the compiler could leave out touch
}

// NewHistory returns a history of at most the given blocks, complete since now.
func NewHistory(blocks int, now int64) *History {
	h := &History{ranks: make([]rank, 1), of: map[events.RankKey]rankID{}, from: now, ahead: now}
	h.Bound(blocks)
	return h
}

// Bound changes the bound on blocks. A smaller bound applies after the younger generation is full.
func (h *History) Bound(blocks int) {
	h.blocks.most, h.seqs.most, h.sent.most = max(1, blocks/2), max(1, blocks/2), max(1, blocks/32)
}

// block returns the history of a block. The pointer is valid until the next call.
func (h *History) block(n Name, now int64) *past {
	p, turned := h.blocks.put(uint64(n))
	if turned {
		h.from = h.ahead
	}
	if h.blocks.young.n == 1 {
		h.ahead = now
	}
	return p
}

// rank returns the history of a rank, and creates it if necessary.
func (h *History) rank(key events.RankKey) *rank {
	if r := h.rankOf(h.of[key]); r != nil {
		return r
	}
	h.last++
	at := int(h.last % maxRanks)
	if at == len(h.ranks) {
		h.ranks = append(h.ranks, rank{})
	}
	r := &h.ranks[at]
	delete(h.of, r.key)
	*r = rank{id: h.last, key: key}
	h.of[key] = h.last
	return r
}

// rankOf returns the history of the rank with an id; nil for a replaced rank.
func (h *History) rankOf(id rankID) *rank {
	if at := int(id % maxRanks); id != 0 && at < len(h.ranks) && h.ranks[at].id == id {
		return &h.ranks[at]
	}
	return nil
}

// Apply records a batch of a rank. now is when it was applied. It keeps nothing of the batch.
func (h *History) Apply(key events.RankKey, b *events.Batch, now int64) {
	if h.claimed != nil && !h.claimed(key.Instance, b.Model) {
		return
	}
	r := h.rank(key)
	tick := func() int64 {
		h.clock = max(now, h.clock+1)
		return h.clock
	}
	if b.Incarnation < r.incarnation {
		return
	}
	if b.Incarnation > r.incarnation {
		if r.incarnation != 0 {
			r.lost, r.why = tick(), api.CauseCleared
		}
		r.incarnation, r.last = b.Incarnation, 0
	}
	in := space(b.Model, b.BlockSize)
	for i := range b.Events {
		if id := b.FirstID + events.EventID(i); id > r.last {
			r.last = id
			h.event(r, in, &b.Events[i], tick())
		}
	}
	if b.Shutdown {
		r.lost, r.why = tick(), api.CauseWorkerGone
	}
}

func (h *History) event(r *rank, in uint64, e *events.Event, now int64) {
	switch e.Kind {
	case events.Stored:
		h.stored(r, in, e, now)
	case events.Removed:
		for _, b := range e.Blocks {
			if seq, ok := h.seqs.get(uint64(b) ^ in); ok {
				p := h.block(Name(uint64(seq)^in), now)
				p.lost, p.lostBy, p.tier = now, r.id, e.Tier
			}
		}
	case events.Cleared:
		r.lost, r.why = now, api.CauseCleared
		if e.Reason == events.ReasonLeaseExpiry || e.Reason == events.ReasonEngineGone {
			r.why = api.CauseWorkerGone
		}
	}
}

func (h *History) stored(r *rank, in uint64, e *events.Event, now int64) {
	if !e.Places() { // copies of a known block
		for _, b := range e.Blocks {
			if seq, ok := h.seqs.get(uint64(b) ^ in); ok {
				h.store(Name(uint64(seq)^in), r.id, now)
			}
		}
		return
	}
	h.locals, h.seq = h.locals[:0], h.seq[:0]
	if e.HasParent {
		parent, ok := h.seqs.get(uint64(e.Parent) ^ in)
		if !ok {
			return // the position is unknown
		}
		h.locals = append(h.locals, events.LocalHash(parent)) // the chain continues from there
	}
	h.locals = append(h.locals, e.Locals...)
	h.seq = events.SeqHashes(h.seq, h.locals)
	seqs := h.seq[len(h.seq)-len(e.Locals):]
	for i, seq := range seqs {
		h.touched ^= h.seqs.touch(uint64(e.Blocks[i])^in) ^ h.blocks.touch(uint64(seq)^in)
	}
	for i, seq := range seqs {
		known, _ := h.seqs.put(uint64(e.Blocks[i]) ^ in)
		*known = seq
		n := Name(uint64(seq) ^ in)
		h.store(n, r.id, now)
		if i == 0 && !e.HasParent {
			if len(r.roots) == maxRoots {
				r.roots = slices.Delete(r.roots, 0, 1)
			}
			r.roots = append(r.roots, root{n, now})
		}
	}
}

func (h *History) store(n Name, by rankID, now int64) {
	p := h.block(n, now)
	if p.stored == 0 {
		p.stored = now
	}
	if p.last = now; p.by[0] != by {
		p.by[0], p.by[1] = by, p.by[0]
	}
}

// Asked records a requested prompt. Workers held its first held blocks. to is the chosen worker, which may be empty.
func (h *History) Asked(names []Name, held int, to events.WorkerID, now int64) {
	for i := len(names) - 1; i >= 0; i-- { // a name includes all blocks before it: earlier blocks are recorded already
		p := h.block(names[i], now)
		if p.asked != 0 {
			break
		}
		p.asked, p.held = now, i < held
	}
	if to != "" && len(names) > 0 {
		last, _ := h.sent.put(uint64(names[0]))
		*last = sent{to, now}
	}
}

// Block returns the history of a block. ok is false for an unknown block.
func (h *History) Block(n Name) (out peerapi.BlockPast, ok bool) {
	p, ok := h.blocks.get(uint64(n))
	out = peerapi.BlockPast{Asked: p.asked, Stored: p.stored, Last: p.last, Held: p.held}
	if p.lost != 0 {
		out.Lost, out.Why, out.Tier = p.lost, api.CauseEvicted, p.tier
		if r := h.rankOf(p.lostBy); r != nil {
			out.Worker = r.key.Instance
		}
	}
	for _, by := range p.by {
		if r := h.rankOf(by); r != nil && r.lost >= p.last && r.lost > out.Lost {
			out.Lost, out.Why, out.Worker, out.Tier = r.lost, r.why, r.key.Instance, events.AllTiers
		}
	}
	if s, sent := h.sent.get(uint64(n)); sent {
		out.Sent, out.SentAt, ok = s.to, s.at, true
	}
	return out, ok
}

// Roots appends the beginnings of the last prompts that a worker stored.
func (h *History) Roots(list []peerapi.StoredRoot, worker events.WorkerID) []peerapi.StoredRoot {
	for i := range h.ranks {
		if r := &h.ranks[i]; r.id != 0 && r.key.Instance == worker {
			for _, x := range r.roots {
				list = append(list, peerapi.StoredRoot{Worker: worker, Block: uint64(x.name), At: x.at})
			}
		}
	}
	return list
}

// join combines the histories of a block on two nodes.
func join(a, b peerapi.BlockPast) peerapi.BlockPast {
	first := func(x, y int64) int64 {
		if x == 0 || y != 0 && y < x {
			return y
		}
		return x
	}
	a.Asked, a.Stored, a.Last = first(a.Asked, b.Asked), first(a.Stored, b.Stored), max(a.Last, b.Last)
	a.Held = a.Held || b.Held
	if b.Lost > a.Lost {
		a.Lost, a.Why, a.Worker, a.Tier = b.Lost, b.Why, b.Worker, b.Tier
	}
	if b.SentAt > a.SentAt {
		a.Sent, a.SentAt = b.Sent, b.SentAt
	}
	return a
}
