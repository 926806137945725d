package hot

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Copy is a prefix that a worker has computed for later requests.
type Copy struct {
	Hash   events.SeqHash
	Depth  uint32 // in blocks
	Rank   events.RankKey
	Before uint32 // blocks that the rank held before

	AtMS      uint64  // of the engine's answer, in milliseconds since 1970; with the rank and the hash, the copy's name
	TookMS    float64 // of the request to the engine
	Automatic bool    // without an operator

	Use
}

// Use is the benefit of copies.
type Use struct {
	// The requests with a reused copy on the rank, with the tokens beyond Before.
	Requests, Tokens uint64

	// SavedMS are the milliseconds to the first token that the copy has saved: the difference to the best forecast of a
	// worker without the copy.
	SavedMS float64
}

// Copied records a copy. The demand for the prefix, and for its longer and shorter prefixes, counts anew, since the
// demand before came without the copy.
func (t *Tracker) Copied(now time.Duration, c Copy) {
	t.copies = append(t.copies, &c)
	if n := len(t.copies); n > mostCopies {
		t.copies = t.copies[n-mostCopies:]
	}
	t.sketch.tick(now)
	var related []*entry
	for _, e := range t.sketch.heap {
		if t.extends(e, c.Hash) {
			related = append(related, e)
		}
	}
	for e := t.sketch.byHash[c.Hash]; e != nil; e = t.shorter(e) {
		related = append(related, e)
	}
	for _, e := range related {
		t.sketch.forget(now, e)
	}
}

// shorter returns the entry of the next shorter counted prefix; nil: none.
func (t *Tracker) shorter(e *entry) *entry {
	if a := t.sketch.byHash[e.above]; a != nil && a.depth < e.depth {
		return a
	}
	return nil
}

// extends reports whether an entry is a longer prefix of the same prompts than hash.
func (t *Tracker) extends(e *entry, hash events.SeqHash) bool {
	for e != nil {
		if e.above == hash {
			return true
		}
		e = t.shorter(e)
	}
	return false
}

// Copies returns the copies, the oldest first.
func (t *Tracker) Copies() []Copy {
	list := make([]Copy, len(t.copies))
	for i, c := range t.copies {
		list[i] = *c
	}
	return list
}

// use counts a request with a reused copy, the longest copy on the chosen rank. own is the forecast of the choice.
func (t *Tracker) use(c *Choice, own float64) {
	chosen := &c.Ranks[c.Chosen]
	var used *Copy
	for _, copied := range t.copies {
		if copied.Rank.Instance == chosen.Worker.ID && copied.Rank.Rank == chosen.Rank &&
			int(copied.Depth) <= len(c.Sequence) && c.Sequence[copied.Depth-1] == copied.Hash &&
			held(chosen) >= copied.Depth && (used == nil || copied.Depth > used.Depth) {
			used = copied
		}
	}
	if used == nil {
		return
	}
	t.trial = *chosen
	t.trial.Device, t.trial.Host, t.trial.Disk = min(chosen.Device, used.Before), 0, 0
	t.trial.NewBlocks = max(t.trial.NewBlocks, c.Request.Blocks-min(uint64(used.Before), c.Request.Blocks))
	without := routing.FirstToken(c.Request, &t.trial)
	for i := range c.Ranks {
		if i != c.Chosen && alike(&c.Ranks[i], chosen) {
			without = min(without, routing.FirstToken(c.Request, &c.Ranks[i]))
		}
	}
	use := Use{1, uint64(used.Depth-used.Before) * uint64(t.size), max(0, without-own)}
	used.Use.add(use)
	t.total.add(use)
}

func (u *Use) add(more Use) {
	u.Requests, u.Tokens, u.SavedMS = u.Requests+more.Requests, u.Tokens+more.Tokens, u.SavedMS+more.SavedMS
}

// Total returns the use of all copies, also of dropped ones.
func (t *Tracker) Total() Use { return t.total }
