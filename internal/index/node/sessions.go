package node

import (
	"cmp"
	"slices"
	"sync"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

const (
	// maxChainHashes bounds the hashes in a generation of a shard's chains: 8 MiB.
	maxChainHashes = 1 << 20

	// chainOverhead is the size of a chain beside its hashes, in hashes.
	chainOverhead = 16

	// maxSavedSessions bounds the sessions of a rank in a snapshot, of 50 bytes each.
	maxSavedSessions = 256

	// maxSavedHashes bounds the hashes of a rank's sessions in a snapshot, of 11 bytes each.
	maxSavedHashes = 4096
)

// sessionChains has the blocks of sessions by rank: the blocks of a session are the block that the engine stored last
// for the session, and all blocks before it. Only events with a session change a chain.
//
// There are two generations. A used chain moves to the younger generation. A full younger generation replaces the older
// one, so the chains without use for the longest time are forgotten. A forgotten session is not known, until the engine
// stores another block for it. A snapshot has the name of each session's last block, from which a restored index makes
// the chains again. The index does not keep the name of a block long after its removal. Of a session with such a last
// block, the snapshot has the name of the last held block and the hashes of the blocks after it.
//
// The writer of the shard calls all methods, and any goroutine calls get.
type sessionChains struct {
	mu         sync.Mutex
	young, old map[sessionOfRank]*chain
	size       int // of the chains in young, in hashes
	most       int // of size
	uses       uint64
	ranks      map[radix.RankID]bool // of the index; true: sessions of the rank are forgotten

	forgotten uint64 // since the last call of stored
	scratch   []events.LocalHash
}

type sessionOfRank struct {
	rank    radix.RankID
	session events.SessionHash
}

// chain has the local hashes of a session's blocks, from the start of the prompt.
type chain struct {
	locals []events.LocalHash
	last   events.BlockHash // the name of the last block
	used   uint64           // sessionChains.uses at the last use
}

func newSessionChains(most int) *sessionChains {
	return &sessionChains{young: map[sessionOfRank]*chain{}, most: most, ranks: map[radix.RankID]bool{}}
}

func (c *chain) size() int { return chainOverhead + cap(c.locals) }

// stored follows a rank's events, which the index has applied. It returns the number of forgotten sessions since the
// last call.
func (s *sessionChains) stored(x *radix.Index, rank radix.RankID, evs []events.Event) (forgotten uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range evs {
		// A copy below the device may end before the session's last block.
		if e := &evs[i]; e.Session != 0 && e.Places() && e.Tier == events.Device && e.Attention.Main() {
			s.extend(x, sessionOfRank{rank, e.Session}, e)
		}
	}
	forgotten, s.forgotten = s.forgotten, 0
	return forgotten
}

// extend moves the end of a session to the last block of an event. Mu is held.
func (s *sessionChains) extend(x *radix.Index, key sessionOfRank, e *events.Event) {
	c := s.use(key)
	known := c != nil
	if !known {
		c = &chain{}
	}
	s.uses++
	c.used = s.uses
	before := c.size()
	if known && e.HasParent && c.last == e.Parent {
		c.locals = append(c.locals, e.Locals...)
	} else {
		s.scratch = s.scratch[:0]
		if e.HasParent {
			var placed bool
			if s.scratch, placed = x.Path(key.rank, e.Parent, s.scratch); !placed {
				s.forget(key)
				return
			}
		}
		s.scratch = append(s.scratch, e.Locals...)
		if n := len(s.scratch); n <= len(c.locals) && slices.Equal(s.scratch, c.locals[:n]) {
			return // the engine stored earlier blocks again
		}
		c.locals = append(c.locals[:0], s.scratch...)
	}
	c.last = e.Blocks[len(e.Blocks)-1]
	if c.size() > s.most/4 {
		s.forget(key)
		return
	}
	if !known {
		s.young[key], before = c, 0
	}
	s.grow(c.size() - before)
}

// grow adds to the size of the younger generation, which replaces the older one if it is full. Mu is held.
func (s *sessionChains) grow(by int) {
	if s.size += by; s.size <= s.most {
		return
	}
	s.forgotten += uint64(len(s.old))
	for key := range s.old {
		s.mark(key.rank)
	}
	s.young, s.old, s.size = map[sessionOfRank]*chain{}, s.young, 0
}

// use returns the chain of a session and moves it to the younger generation; nil if there is none.
func (s *sessionChains) use(key sessionOfRank) *chain {
	if c := s.young[key]; c != nil {
		return c
	}
	c := s.old[key]
	if c != nil {
		delete(s.old, key)
		s.young[key] = c
		s.size += c.size()
	}
	return c
}

// forget removes the chain of a session.
func (s *sessionChains) forget(key sessionOfRank) {
	s.forgotten++
	s.mark(key.rank)
	if c := s.young[key]; c != nil {
		s.size -= c.size()
		delete(s.young, key)
	}
}

// get returns a copy of a session's chain; nil: not known. lost means that the rank may have a forgotten chain of the
// session.
func (s *sessionChains) get(key sessionOfRank) (locals []events.LocalHash, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := cmp.Or(s.young[key], s.old[key]); c != nil {
		return slices.Clone(c.locals), false
	}
	return nil, s.ranks[key.rank]
}

// save writes the sessions of ranks into their states, for a snapshot of the index.
func (s *sessionChains) save(x *radix.Index, ids []radix.RankID, states []snapshot.RankState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	type session struct {
		key sessionOfRank
		*chain
	}
	of := make(map[radix.RankID][]session, len(ids))
	for _, chains := range []map[sessionOfRank]*chain{s.young, s.old} {
		for key, c := range chains {
			of[key.rank] = append(of[key.rank], session{key, c})
		}
	}
	for i, id := range ids {
		list, r, room := of[id], &states[i], maxSavedHashes
		slices.SortFunc(list, func(a, b session) int { return cmp.Compare(b.used, a.used) })
		r.Sessions, r.SessionsCut = []snapshot.SessionEnd{}, s.ranks[id] || len(list) > maxSavedSessions
		var lastHeld func([]events.LocalHash, int) (events.BlockHash, int, bool)
		for _, c := range list[:min(len(list), maxSavedSessions)] {
			e := snapshot.SessionEnd{Session: snapshot.Hex64(c.key.session), Last: snapshot.Hex64(c.last)}
			if !x.Knows(id, c.last) {
				if lastHeld == nil {
					lastHeld = x.LastHeld(id)
				}
				held, n, ok := lastHeld(c.locals, room)
				if !ok {
					r.SessionsCut, room = true, 0 // later sessions have been used less
					continue
				}
				e.After, e.Held, e.Blocks = slices.Clone(c.locals[n:]), snapshot.Hex64(held), uint32(n)
				room -= len(e.After)
			}
			r.Sessions = append(r.Sessions, e)
		}
	}
}

// restore makes the chains of a rank from the sessions in its snapshot, after the blocks are in the index.
func (s *sessionChains) restore(x *radix.Index, id radix.RankID, r *snapshot.RankState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Sessions == nil || r.SessionsCut || len(r.Sessions) > maxSavedSessions {
		s.mark(id)
	}
	for _, e := range slices.Backward(r.Sessions[:min(len(r.Sessions), maxSavedSessions)]) {
		key := sessionOfRank{id, events.SessionHash(e.Session)}
		locals, placed := savedPath(x, id, &e)
		s.uses++
		c := &chain{locals: locals, last: events.BlockHash(e.Last), used: s.uses}
		if !placed || c.size() > s.most/4 || s.use(key) != nil {
			s.forget(key)
			continue
		}
		s.young[key] = c
		s.grow(c.size())
	}
}

// savedPath returns the local hashes of a session's blocks; false for an unknown block.
func savedPath(x *radix.Index, id radix.RankID, e *snapshot.SessionEnd) ([]events.LocalHash, bool) {
	switch {
	case e.Blocks > 0:
		locals, placed := x.Path(id, events.BlockHash(e.Held), nil)
		return append(locals, e.After...), placed && len(locals) == int(e.Blocks)
	case len(e.After) > 0:
		return e.After, true
	}
	return x.Path(id, events.BlockHash(e.Last), nil)
}

// mark records that sessions of a rank are forgotten. Mu is held.
func (s *sessionChains) mark(id radix.RankID) {
	if _, found := s.ranks[id]; found {
		s.ranks[id] = true
	}
}

// add adds a rank without forgotten sessions.
func (s *sessionChains) add(id radix.RankID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ranks[id] = false
}

// drop removes a rank that is no longer in the index. Its chains are forgotten by age.
func (s *sessionChains) drop(id radix.RankID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ranks, id)
}

// SessionBlocks returns the blocks of a session on the ranks of some partitions. Any goroutine may call SessionBlocks.
func (n *Node) SessionBlocks(q *peerapi.SessionBlocksRequest) *peerapi.SessionBlocks {
	out := &peerapi.SessionBlocks{Held: []api.SessionHolding{},
		Missing: (&scratch{reflected: n.progress(nil)}).recordServing(q.Partitions)}
	session := events.HashSession(q.SessionID)
	for model, list := range n.view().Models {
		if q.Model != "" && q.Model != model {
			continue
		}
		for _, served := range list {
			for _, r := range served.Ranks {
				if !slices.Contains(q.Partitions, r.Partition) || slices.Contains(out.Missing, r.Partition) {
					continue
				}
				s := n.shards[r.Shard]
				locals, lost := s.machine.sessions.get(sessionOfRank{r.ID, session})
				if lost {
					out.Unknown++
				}
				if locals != nil {
					h := api.SessionHolding{Model: model, Worker: r.Key.Instance, Rank: r.Key.Rank,
						Blocks: uint32(len(locals))}
					countHeld(&h, s.index, served.Space, r.ID, locals)
					out.Held = append(out.Held, h)
				}
			}
		}
	}
	return out
}

// countHeld counts the blocks of a chain that a rank holds in each tier.
func countHeld(h *api.SessionHolding, x *radix.Index, space uint32, rank radix.RankID, locals []events.LocalHash) {
	var only radix.RankSet
	only.Add(rank)
	for _, r := range x.Explain(space, locals, &only).Ranks {
		for _, tiers := range r.Blocks {
			for i, count := range [events.NumTiers]*uint32{&h.Device, &h.Host, &h.Disk, &h.External} {
				if tiers.Has(events.Tier(i + 1)) {
					*count++
				}
			}
		}
	}
}
