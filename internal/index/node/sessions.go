package node

import (
	"slices"
	"sync"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

const (
	// maxChainHashes bounds the hashes in a generation of a shard's chains: 8 MiB.
	maxChainHashes = 1 << 20

	// chainOverhead is the size of a chain beside its hashes, in hashes.
	chainOverhead = 16
)

// sessionChains has the blocks of sessions by rank: the blocks of a session are the block that the engine stored last
// for the session, and all blocks before it. Only events with a session change a chain.
//
// There are two generations. A used chain moves to the younger generation. A full younger generation replaces the older
// one, so the chains without use for the longest time are forgotten. A forgotten session is not known, until the engine
// stores another block for it. Snapshots have no chains.
//
// The writer of the shard calls stored, and any goroutine calls get.
type sessionChains struct {
	mu         sync.Mutex
	young, old map[sessionOfRank]*chain
	size       int // of the chains in young, in hashes
	most       int // of size

	// Of stored.
	forgotten uint64
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
}

func newSessionChains(most int) *sessionChains {
	return &sessionChains{young: map[sessionOfRank]*chain{}, most: most}
}

func (c *chain) size() int { return chainOverhead + cap(c.locals) }

// stored follows a rank's events, which the index has applied. It returns the number of forgotten sessions.
func (s *sessionChains) stored(x *radix.Index, rank radix.RankID, evs []events.Event) (forgotten uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgotten = 0
	for i := range evs {
		// A copy below the device may end before the session's last block.
		if e := &evs[i]; e.Session != 0 && e.Places() && e.Tier == events.Device && e.Attention.Main() {
			s.extend(x, sessionOfRank{rank, e.Session}, e)
		}
	}
	return s.forgotten
}

// extend moves the end of a session to the last block of an event. Mu is held.
func (s *sessionChains) extend(x *radix.Index, key sessionOfRank, e *events.Event) {
	c := s.use(key)
	known := c != nil
	if !known {
		c = &chain{}
	}
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
	s.size += c.size() - before
	if s.size > s.most {
		s.forgotten += uint64(len(s.old))
		s.young, s.old, s.size = map[sessionOfRank]*chain{}, s.young, 0
	}
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
	if c := s.young[key]; c != nil {
		s.size -= c.size()
		delete(s.young, key)
	}
}

// get returns a copy of a session's chain; nil: not known.
func (s *sessionChains) get(key sessionOfRank) []events.LocalHash {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.young[key]; c != nil {
		return slices.Clone(c.locals)
	}
	if c := s.old[key]; c != nil {
		return slices.Clone(c.locals)
	}
	return nil
}

// SessionBlocks returns the blocks of a session on the ranks of some partitions. Any goroutine may call SessionBlocks.
func (n *Node) SessionBlocks(q *api.SessionBlocksRequest) *api.SessionBlocks {
	out := &api.SessionBlocks{Held: []api.SessionHolding{},
		Missing: (&scratch{reflected: n.progress(nil)}).look(q.Partitions)}
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
				if locals := s.machine.sessions.get(sessionOfRank{r.ID, session}); locals != nil {
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
