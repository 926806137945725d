package routesim

import (
	"math"
	"math/bits"
	"slices"
)

// leastRequests chooses the worker with the fewest running requests, then the fewest tokens of their prompts, then at
// random.
type leastRequests struct{ f *fleet }

func newLeastRequests(f *fleet) rule { return leastRequests{f} }

func (leastRequests) left(int) {}

func (x leastRequests) choose(router *router, _ *request, live []int, _ micros) int {
	return x.f.least(live, func(w int) float64 {
		l := &router.loads[w]
		return float64(l.requests)*1e9 + float64(l.tokens)
	})
}

// least returns a worker with the least cost. Ties are broken at random.
func (f *fleet) least(live []int, cost func(w int) float64) int {
	best, ties := live[0], 0
	low := math.Inf(1)
	for _, w := range live {
		c := cost(w)
		if c < low {
			low, ties = c, 0
		}
		if c == low {
			if ties++; ties == 1 || f.rng.IntN(ties) == 0 {
				best = w
			}
		}
	}
	return best
}

// powerOfTwo chooses the worker with fewer requests of two random workers. With poll, a router adds the engines'
// numbers of requests from the latest poll, as vLLM's router does.
type powerOfTwo struct {
	f        *fleet
	poll     micros // 0: no polls
	next     micros
	reported []int
}

func newPowerOfTwo(f *fleet) rule { return &powerOfTwo{f: f} }

func newPolledPowerOfTwo(f *fleet) rule {
	return &powerOfTwo{f: f, poll: after(5), reported: make([]int, len(f.engines))}
}

func (*powerOfTwo) left(int) {}

func (x *powerOfTwo) choose(router *router, _ *request, live []int, now micros) int {
	if x.poll > 0 && now >= x.next {
		x.next = now + x.poll
		for w, e := range x.f.engines {
			x.reported[w] = e.requests
		}
	}
	if len(live) == 1 {
		return live[0]
	}
	i := x.f.rng.IntN(len(live))
	j := x.f.rng.IntN(len(live) - 1)
	if j >= i {
		j++
	}
	load := func(w int) int {
		n := router.loads[w].requests
		if x.reported != nil {
			n += x.reported[w]
		}
		return n
	}
	if load(live[i]) <= load(live[j]) {
		return live[i]
	}
	return live[j]
}

// headTokens is the length of the prompt's head that identifies a session.
const headTokens = 1024

// head returns a key of the first tokens of a prompt.
func (f *fleet) head(r *request) uint64 {
	n := min(len(r.prompt.Names), headTokens/f.cfg.BlockSize)
	if n == 0 {
		return mix(uint64(r.number)) // a prompt of less than a block
	}
	return uint64(r.prompt.Names[n-1])
}

// session returns a key of the request's session; without a session id, of the prompt's head.
func (f *fleet) session(r *request) uint64 {
	if r.session != 0 {
		return mix(r.session)
	}
	return f.head(r)
}

// rendezvous returns the workers in the order of rendezvous hashing (highest random weight) for a key.
func rendezvous(key uint64, live []int) []int {
	order := slices.Clone(live)
	weight := func(w int) uint64 { return mix(key ^ mix(uint64(w)+1)) }
	slices.SortFunc(order, func(a, b int) int {
		if weight(a) > weight(b) {
			return -1
		}
		return 1
	})
	return order
}

// sticky chooses by a key, regardless of the load.
type sticky struct{ key func(*request) uint64 }

func newSticky(f *fleet) rule     { return sticky{f.session} }
func newStickyHead(f *fleet) rule { return sticky{f.head} }

func (sticky) left(int) {}

func (x sticky) choose(_ *router, r *request, live []int, _ micros) int {
	return rendezvous(x.key(r), live)[0]
}

// boundedHash is consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): a worker has at most
// 1.25 times its share of the running requests, including the new request. A request goes to the first worker with less
// in the order of the session.
type boundedHash struct{ f *fleet }

const loadBound = 1.25

func newBoundedHash(f *fleet) rule { return boundedHash{f} }

func (boundedHash) left(int) {}

func (x boundedHash) choose(router *router, r *request, live []int, _ micros) int {
	total := 1
	for _, w := range live {
		total += router.loads[w].requests
	}
	bound := int(math.Ceil(loadBound * float64(total) / float64(len(live))))
	order := rendezvous(x.f.session(r), live)
	for _, w := range order {
		if router.loads[w].requests < bound {
			return w
		}
	}
	return order[0]
}

// ring is the policy consistent_hash of vLLM's router: 160 virtual nodes for every worker, with the session id as the
// key, or the prompt without a session id. If the worker is absent, the first live worker gets the request.
type ring struct {
	f     *fleet
	nodes []ringNode // by place
}

type ringNode struct {
	place  uint64
	worker int
}

const virtualNodes = 160

func newRing(f *fleet) rule {
	x := &ring{f: f}
	for w := range f.engines {
		for i := range uint64(virtualNodes) {
			x.nodes = append(x.nodes, ringNode{mix(mix(uint64(w)+1) + i), w})
		}
	}
	slices.SortFunc(x.nodes, func(a, b ringNode) int {
		if a.place < b.place {
			return -1
		}
		return 1
	})
	return x
}

func (*ring) left(int) {}

func (x *ring) choose(_ *router, r *request, live []int, _ micros) int {
	key := mix(r.session)
	if r.session == 0 {
		key = x.f.prompt(r)
	}
	i, _ := slices.BinarySearchFunc(x.nodes, key, func(n ringNode, key uint64) int {
		if n.place < key {
			return -1
		}
		return 1
	})
	if w := x.nodes[i%len(x.nodes)].worker; slices.Contains(live, w) {
		return w
	}
	return live[0]
}

// prompt returns a key of the whole prompt.
func (f *fleet) prompt(r *request) uint64 {
	key := uint64(r.prompt.Tokens)
	if n := len(r.prompt.Names); n > 0 {
		key ^= uint64(r.prompt.Names[n-1])
	}
	return mix(key)
}

// cacheAware is the policy cache_aware of the routers of SGLang (sglang-router 0.3.2, src/policies/cache_aware.rs) and
// vLLM (vllm-router 0.1.17), with their defaults. A tree of the routed prompts maps a prefix to its last worker. The
// tree has whole blocks in place of characters, and evicts no entries.
type cacheAware struct {
	f    *fleet
	last sparse[int32]  // the last worker of the block, plus 1
	who  sparse[uint64] // the workers of the block, as bits; a block without bits is not in the tree
}

const (
	cacheThreshold      = 0.3
	balanceAbsThreshold = 64
	balanceRelThreshold = 1.5

	// treeWorkers is the maximum number of workers of a tree: a worker is a bit of a word.
	treeWorkers = 64
)

func newCacheAware(f *fleet) rule {
	return &cacheAware{f: f, last: newSparse[int32](f.blocks), who: newSparse[uint64](f.blocks)}
}

func (x *cacheAware) left(worker int) {
	for b := range block(x.f.blocks) {
		if who := x.who.get(b); who&(1<<worker) != 0 {
			x.who.set(b, who&^(1<<worker))
		}
	}
}

// match returns the number of leading blocks in the tree, and the worker of the last.
func (x *cacheAware) match(blocks []block) (n, worker int) {
	n = prefix(blocks, func(b block) bool { return x.who.get(b) != 0 })
	if n == 0 {
		return 0, 0
	}
	who := x.who.get(blocks[n-1])
	if worker = int(x.last.get(blocks[n-1])) - 1; who&(1<<worker) == 0 {
		worker = bits.TrailingZeros64(who)
	}
	return n, worker
}

func (x *cacheAware) choose(router *router, r *request, live []int, _ micros) int {
	least, fewest, most := live[0], math.MaxInt, 0
	for _, w := range live {
		n := router.loads[w].requests
		if most = max(most, n); n < fewest {
			least, fewest = w, n
		}
	}
	chosen := least
	if most-fewest <= balanceAbsThreshold || float64(most) <= balanceRelThreshold*float64(fewest) {
		n, worker := x.match(r.prompt.blocks)
		if float64(n*x.f.cfg.BlockSize) > cacheThreshold*float64(r.prompt.Tokens) {
			if chosen = worker; !slices.Contains(live, worker) {
				chosen = live[0]
			}
		}
	}
	for _, b := range r.prompt.blocks {
		x.last.set(b, int32(chosen)+1)
		x.who.set(b, x.who.get(b)|1<<chosen)
	}
	return chosen
}
