package regions

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Question is a prompt to look up in the digests of other regions.
type Question struct {
	Model     string
	BlockSize uint32 // of the hashes; 0: any, because the hashes are computed from tokens

	// Locals returns the prompt's local hashes for blocks of a size and a lookahead.
	Locals func(blockSize, lookahead uint32) ([]events.LocalHash, error)

	// Unknown is the reason against a lookup; empty: there is none.
	Unknown string
}

// hashed has the sequence hashes of a prompt by size of blocks and lookahead.
type hashed map[[2]uint32][]events.SeqHash

// maxHashings is the largest number of sizes and lookaheads for which a prompt is hashed. Regions choose both.
const maxHashings = 8

// sequence returns the hashes for blocks of a size and a lookahead; false if the prompt was hashed too often.
func (h hashed) sequence(q *Question, size, lookahead uint32) (list []events.SeqHash, ok bool, err error) {
	key := [2]uint32{size, lookahead}
	if list, ok := h[key]; ok || len(h) == maxHashings {
		return list, ok, nil
	}
	locals, err := q.Locals(size, lookahead)
	if err != nil {
		return nil, false, err
	}
	h[key] = events.SeqHashes([]events.SeqHash{}, locals)
	return h[key], true, nil
}

// Prefixes returns the longest prefix of a prompt in each region, by name.
func (v *View) Prefixes(now time.Duration, q *Question) ([]api.RegionPrefix, error) {
	if v == nil {
		return nil, nil
	}
	hashes := hashed{}
	var list []api.RegionPrefix
	for i := range v.regions {
		p, err := v.regions[i].prefix(now, v.maxAge, q, hashes)
		if err != nil {
			return nil, err
		}
		list = append(list, p)
	}
	return list, nil
}

// prefix returns the longest prefix of the digests of single nodes. A prefix is of a single rank, so the digest of
// another node does not continue it.
func (r *regionView) prefix(now, maxAge time.Duration, q *Question, hashes hashed) (p api.RegionPrefix, err error) {
	digests, state := r.state(now, maxAge)
	p = api.RegionPrefix{Region: r.name, PriceMS: r.price, AgeMS: state.AgeMS, State: state.State, Reason: state.Reason}
	if p.State == api.RegionUnknown {
		return p, nil
	}
	if q.Unknown != "" {
		p.State, p.Reason = api.RegionUnknown, q.Unknown
		return p, nil
	}
	walk := walk{q: q, hashes: hashes, right: 1}
	for _, d := range digests {
		for i := range d.Sets {
			if s := &d.Sets[i]; s.Model == q.Model {
				if err := walk.add(&p, s); err != nil {
					return p, err
				}
			}
		}
	}
	p.FalsePositiveRate = 1 - walk.right
	switch {
	case walk.other != 0 && !walk.found:
		p.State, p.Reason = api.RegionUnknown, fmt.Sprintf("the region has blocks of %d tokens", walk.other)
	case walk.skipped:
		p.State, p.Reason = api.RegionPartial, "regions have too many sizes of blocks"
	case p.HeldBlocks > p.DigestBlocks:
		p.State = api.RegionPartial
		p.Reason = cmp.Or(p.Reason, fmt.Sprintf("the digests have %d of %d blocks", p.DigestBlocks, p.HeldBlocks))
	case walk.bounded:
		p.Reason = cmp.Or(p.Reason, "the engines may load fewer blocks: "+string(api.BoundFullAttentionOnly))
	}
	return p, nil
}

// walk is a lookup in the sets of a region.
type walk struct {
	q      *Question
	hashes hashed

	found, bounded bool
	skipped        bool    // a set, for lack of hashes
	other          uint32  // a size of blocks that the question excludes
	right          float64 // probability that no lookup had a false positive, at least
}

// add looks up the prompt in a set, and adds the result to p.
func (w *walk) add(p *api.RegionPrefix, s *Set) error {
	if w.q.BlockSize != 0 && s.BlockSize != w.q.BlockSize {
		w.other = s.BlockSize
		return nil
	}
	w.found, w.bounded = true, w.bounded || s.Bounded
	p.DigestBlocks, p.HeldBlocks = p.DigestBlocks+s.Filter.n, p.HeldBlocks+s.Held
	for _, lookahead := range s.Lookaheads {
		list, ok, err := w.hashes.sequence(w.q, s.BlockSize, lookahead)
		if err != nil {
			return err
		}
		w.skipped = w.skipped || !ok
		if s.Filter.n > 0 && len(list) > 0 {
			w.right *= 1 - FalsePositives
		}
		n := s.Filter.Prefix(list)
		if tokens := uint64(n) * uint64(s.BlockSize); tokens > p.Tokens {
			p.Blocks, p.Tokens = uint32(n), tokens
		}
	}
	return nil
}

// state returns the digests within the maximum age, with the state of the region without regard to a model.
func (r *regionView) state(now, maxAge time.Duration) (digests []nodeDigest, s api.RegionStatus) {
	digests, age, lacking := r.live(now, maxAge)
	s = api.RegionStatus{Region: r.name, State: api.RegionComplete, PriceMS: r.price,
		AgeMS: uint64(age.Milliseconds()), Nodes: len(digests)}
	switch {
	case lacking < 0 && !r.once:
		s.State, s.Reason = api.RegionUnknown, "no digest has arrived"
	case lacking < 0:
		s.AgeMS = uint64((now - r.heard).Milliseconds())
		s.State, s.Reason = api.RegionUnknown, fmt.Sprintf("the last digest is older than %v", maxAge)
	case lacking > 0:
		s.State, s.Reason = api.RegionPartial, fmt.Sprintf("no digest has %d of the partitions", lacking)
	}
	return digests, s
}

// Status describes the digests of each region, by name.
func (v *View) Status(now time.Duration) (list []api.RegionStatus) {
	if v == nil {
		return nil
	}
	for i := range v.regions {
		digests, s := v.regions[i].state(now, v.maxAge)
		for _, d := range digests {
			s.Bytes += uint64(d.bytes)
			for k := range d.Sets {
				s.DigestBlocks, s.HeldBlocks = s.DigestBlocks+d.Sets[k].Filter.n, s.HeldBlocks+d.Sets[k].Held
			}
		}
		if s.State == api.RegionComplete && s.HeldBlocks > s.DigestBlocks {
			s.State = api.RegionPartial
			s.Reason = fmt.Sprintf("the digests have %d of %d blocks", s.DigestBlocks, s.HeldBlocks)
		}
		list = append(list, s)
	}
	return list
}
