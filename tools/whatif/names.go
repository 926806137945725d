package whatif

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/routesim"
)

// spanOf is a recorded span on a worker.
type spanOf struct {
	name, session uint64
	worker        string
	blocks        int
	held          int // leading blocks on the worker before the request
}

// equality is the evidence that two spans after the same prefix begin with the same blocks.
type equality struct {
	a, b   uint64 // names
	blocks int
}

// link leads from a span to another one with the same leading blocks.
type link struct {
	to     uint64
	blocks int
}

// maxSiblings bounds the remembered continuations of a prefix.
const maxSiblings = 64

// namer makes the names of blocks from the names of spans. Blocks of equal spans are equal. Two different spans after
// the same prefix are equal at the beginning as far as there is evidence:
//
//   - The depth of a prompt on its worker ends in the span: an earlier span has these blocks.
//   - An earlier, shorter span belongs to the same session: the conversation continues.
//
// The links form a forest. On the way from a span to its root, the blocks of the links decrease.
type namer struct {
	after map[uint64][]spanOf // by the name before, the latest spans
	equal []equality
	links map[uint64]link
	size  map[uint64]int // of the trees, by root
}

// newNamer returns a namer of requests in order of arrival.
func newNamer(list []*request) *namer {
	n := &namer{after: map[uint64][]spanOf{}, links: map[uint64]link{}, size: map[uint64]int{}}
	for _, x := range list {
		before := uint64(0)
		per := x.span / x.blockSize
		for i, s := range x.spans() {
			n.meet(before, s, min(x.depth-i*per, s.blocks), per)
			before = s.name
		}
	}
	n.after = nil
	slices.SortStableFunc(n.equal, func(a, b equality) int { return cmp.Compare(b.blocks, a.blocks) })
	for _, e := range n.equal {
		n.join(e)
	}
	n.equal, n.size = nil, nil
	return n
}

// spans returns the spans with whole blocks.
func (x *request) spans() (list []spanOf) {
	per, left := x.span/x.blockSize, x.tokens/x.blockSize
	for _, name := range x.names[:min(len(x.names), (left+per-1)/per)] {
		list = append(list, spanOf{name, x.session, x.worker, min(per, left), 0})
		left -= per
	}
	return list
}

// meet collects the evidence of a span after a prefix. held is the number of leading blocks of the span on the chosen
// worker, and per the number of blocks of a whole span.
func (n *namer) meet(before uint64, s spanOf, held, per int) {
	list := n.after[before]
	s.held = max(0, held)
	if with, ok := turnBefore(list, s); ok {
		n.equal = append(n.equal, equality{s.name, with.name, with.blocks})
		if held <= with.blocks {
			held = 0 // the session is the better evidence
		}
	}
	if held > 0 && held < per {
		if with, ok := sibling(list, s, held); ok {
			n.equal = append(n.equal, equality{s.name, with.name, held})
		}
	}
	for i, other := range list {
		if other.name == s.name && other.worker == s.worker { // to the end, as the latest
			copy(list[i:], list[i+1:])
			list[len(list)-1] = s
			return
		}
	}
	if len(list) == maxSiblings {
		list = append(list[:0], list[1:]...)
	}
	n.after[before] = append(list, s)
}

// turnBefore returns the latest, shorter span of the session.
func turnBefore(list []spanOf, s spanOf) (before spanOf, ok bool) {
	for _, other := range slices.Backward(list) {
		if s.session != 0 && other.session == s.session && other.blocks < s.blocks {
			return other, true
		}
	}
	return spanOf{}, false
}

// sibling returns a span of which the first held blocks are those of s: of the same session, with exactly these blocks,
// or with as many blocks on the worker before, as other continuations of a system prompt have. A span of the same
// worker is more likely, because the blocks are there.
func sibling(list []spanOf, s spanOf, held int) (with spanOf, ok bool) {
	best := 0
	for _, other := range slices.Backward(list) {
		if other.name == s.name || other.blocks < held {
			continue
		}
		rank := 0
		if s.session != 0 && other.session == s.session {
			rank += 4
		}
		if other.held == held {
			rank += 2
		}
		if other.blocks == held {
			rank++
		}
		if rank > 0 && other.worker == s.worker {
			rank += 8
		}
		if rank > best {
			best, with, ok = rank, other, true
		}
	}
	return with, ok
}

// join links the trees of two spans. Calls must have descending numbers of blocks. The smaller tree joins the larger,
// so a path has at most log2(spans) links.
func (n *namer) join(e equality) {
	a, b := n.root(e.a, e.blocks-1), n.root(e.b, e.blocks-1)
	if a == b {
		return
	}
	sa, sb := max(1, n.size[a]), max(1, n.size[b])
	if sa < sb {
		a, b = b, a
	}
	n.links[b] = link{a, e.blocks}
	n.size[a] = sa + sb
}

// root returns the span that gives a block of a span its name.
func (n *namer) root(span uint64, block int) uint64 {
	for {
		l, ok := n.links[span]
		if !ok || block >= l.blocks {
			return span
		}
		span = l.to
	}
}

// prompt returns the prompt of a request.
func (n *namer) prompt(x *request) *routesim.Prompt {
	p := &routesim.Prompt{Tokens: max(1, x.tokens), Names: make([]events.BlockHash, 0, x.tokens/x.blockSize)}
	for _, s := range x.spans() {
		for b := range s.blocks {
			p.Names = append(p.Names, events.BlockHash(mix(mix(n.root(s.name, b))+uint64(b))|1))
		}
	}
	return p
}

// mix is SplitMix64's step for a state of x.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}
