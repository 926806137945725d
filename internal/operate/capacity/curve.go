package capacity

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Curve is the hit rate of a model's requests for every size of the cache.
type Curve struct {
	BlockSize uint32
	From, To  time.Time // of the counted requests
	Blocks    uint64    // of the counted requests
	Rate      float64   // share of the sampled blocks
	Samples   int       // counted references
	Skipped   uint64    // blocks in other sizes than BlockSize

	// Limit is the largest size with an exact number of hits. The hit rate of a larger cache is at least the rate at
	// Limit.
	Limit uint64

	Workers int // of the fleet, or with counted requests if these are more

	// Shared is the hit rate of one cache for all requests. Routed is the hit rate with a cache for each worker. It is
	// not known if the workers of too many requests are unknown.
	Shared, Routed Rates
}

// Rates are hit rates by size.
type Rates struct {
	steps []step  // by distance, ascending
	total float64 // references
	limit float64

	// near is the number of hits without a sampled distance, as of hot blocks that are not sampled. It is negative if more
	// hot blocks are sampled than usual. Uses of hot blocks follow each other, so the smallest cache has these hits.
	near float64
}

// step is a distance at which the number of hits grows.
type step struct {
	distance float64 // blocks
	hits     float64 // of all steps up to this one
}

// Known reports whether the rates have references.
func (r *Rates) Known() bool { return r.total > 0 }

// At returns the share of the references that hit in a cache of the given blocks.
func (r *Rates) At(blocks uint64) float64 {
	if !r.Known() || blocks == 0 {
		return 0
	}
	size, hits := min(float64(blocks), r.limit), r.near
	n, _ := slices.BinarySearchFunc(r.steps, size, func(s step, size float64) int { return cmp.Compare(s.distance, size) })
	if n > 0 {
		hits += r.steps[n-1].hits
	}
	return min(1, max(0, hits/r.total))
}

// knownShare is the share of references with a known worker that Routed needs.
const knownShare = 0.9

// Compute returns the curve of the nodes' samples for a fleet of workers, of which some may have no requests. Nodes may
// be nil. Samples with another block size than most samples are skipped.
func Compute(nodes []*Samples, workers int) *Curve {
	c := &Curve{BlockSize: usualSize(nodes)}
	refs, below := merge(nodes, c)
	warm := len(refs) / 2
	for warm > 0 && warm < len(refs) && refs[warm].request(&refs[warm-1]) { // no request is in both halves
		warm++
	}
	if warm == len(refs) {
		return c
	}
	of := count(refs, warm, rate(below), different(refs[:warm], rate(below)), workers)
	of.BlockSize, of.Skipped = c.BlockSize, c.Skipped
	return of
}

// count returns the curve of the references after the first warm ones.
func count(refs []merged, warm int, rate float64, limit uint64, workers int) *Curve {
	c := &Curve{Rate: rate, Samples: len(refs) - warm, Limit: limit,
		From: time.UnixMicro(refs[warm].At).UTC(), To: time.UnixMicro(refs[len(refs)-1].At).UTC()}
	var known uint64
	active := map[int]bool{}
	for i := warm; i < len(refs); i++ {
		r := &refs[i]
		if i > warm && r.request(&refs[i-1]) {
			continue
		}
		c.Blocks += r.blocks() + uint64(r.Before)
		if r.worker >= 0 {
			known += r.blocks() + uint64(r.Before)
			active[r.worker] = true
		}
	}
	c.Workers = max(workers, len(active))
	c.Shared.add(refs, warm, c.Rate, 1)
	c.Shared.finish(c.Blocks, c.Limit)
	if float64(known) >= knownShare*float64(c.Blocks) {
		for w := range active {
			of, warmOf := ofWorker(refs, warm, w)
			c.Routed.add(of, warmOf, c.Rate, c.Workers)
		}
		c.Routed.finish(known, c.Limit)
	}
	return c
}

// add adds the requests of one of several caches of equal size.
//
// A sampled block at a place of a prompt is the first miss of the samples. The estimated number of misses is the number
// of blocks after the place, and 1/R for the block with the unsampled blocks before it. The estimate is unbiased: the
// misses end the prompt, and requests without a sampled miss count none. Two samples of a prompt have distances in the
// order of their places, so a larger cache moves the first miss from sample to sample.
func (r *Rates) add(refs []merged, warm int, rate float64, caches int) {
	stack(refs, warm, func(of []merged, distances []int) {
		r.near -= float64(of[0].Rest) + 1/rate
		for i, d := range distances {
			grows := float64(of[i].Rest) + 1/rate
			if i+1 < len(of) {
				grows = float64(of[i+1].Place - of[i].Place)
			}
			r.steps = append(r.steps, step{float64(d*caches) / rate, grows})
		}
	})
}

// finish completes the rates after the last add.
func (r *Rates) finish(blocks, limit uint64) {
	slices.SortFunc(r.steps, func(a, b step) int { return cmp.Compare(a.distance, b.distance) })
	for i := 1; i < len(r.steps); i++ {
		r.steps[i].hits += r.steps[i-1].hits
	}
	r.total, r.limit = float64(blocks), float64(limit)
	r.near += r.total
}

// merged is a reference with the numbers of its node and worker among all nodes.
type merged struct {
	Ref
	node, worker int
}

// request reports whether two references belong to the same request.
func (r *merged) request(of *merged) bool { return r.At == of.At && r.node == of.node }

// usualSize returns the block size of most references.
func usualSize(nodes []*Samples) (size uint32) {
	refs := map[uint32]int{}
	for _, n := range nodes {
		if n != nil {
			refs[n.BlockSize] += 1 + len(n.Refs)
		}
	}
	for of, n := range refs {
		if n > refs[size] || n == refs[size] && of < size {
			size = of
		}
	}
	return size
}

// merge returns the references of all nodes below the smallest threshold, in order of time.
func merge(nodes []*Samples, c *Curve) (refs []merged, below funnel.Name) {
	below = all
	for _, n := range nodes {
		if n != nil && n.BlockSize == c.BlockSize {
			below = min(below, n.Below)
		}
	}
	numbers := map[events.WorkerID]int{}
	for i, n := range nodes {
		if n == nil {
			continue
		}
		c.Skipped += n.Skipped
		if n.BlockSize != c.BlockSize {
			c.Skipped += blocksOf(n.Refs)
			continue
		}
		kept, _ := thin(slices.Clone(n.Refs), below)
		for _, r := range kept {
			m := merged{Ref: r, node: i, worker: -1}
			if r.Worker > 0 && int(r.Worker) <= len(n.Workers) {
				w := n.Workers[r.Worker-1]
				number, found := numbers[w]
				if !found {
					number = len(numbers)
					numbers[w] = number
				}
				m.worker = number
			}
			refs = append(refs, m)
		}
	}
	slices.SortStableFunc(refs, func(a, b merged) int {
		return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.node, b.node))
	})
	return refs, below
}

// ofWorker returns the references of a worker, and the number of them among the first warm.
func ofWorker(refs []merged, warm, worker int) (of []merged, warmOf int) {
	for i := range refs {
		if refs[i].worker != worker {
			continue
		}
		if of = append(of, refs[i]); i < warm {
			warmOf++
		}
	}
	return of, warmOf
}

// blocksOf returns the blocks of the requests with references.
func blocksOf(refs []Ref) (n uint64) {
	for i := range refs {
		if i == 0 || refs[i].At != refs[i-1].At {
			n += refs[i].blocks() + uint64(refs[i].Before)
		}
	}
	return n
}

// different estimates the number of different blocks.
func different(refs []merged, rate float64) uint64 {
	seen := map[funnel.Name]struct{}{}
	for i := range refs {
		seen[refs[i].Name] = struct{}{}
	}
	return saturated(math.Round(float64(len(seen)) / rate))
}

// stack calls each with the references of every request after the first warm references, and with their distances in
// sampled blocks. The references without an earlier use are the last ones of a request, and have no distance.
func stack(refs []merged, warm int, each func(of []merged, distances []int)) {
	uses := newFenwick(len(refs)) // a 1 at the last use of every block; places are in order of time
	last := make(map[funnel.Name]int, len(refs)/2)
	var distances []int
	place := 0
	for from := 0; from < len(refs); {
		to := from + 1
		for to < len(refs) && refs[to].request(&refs[from]) {
			to++
		}
		if from >= warm {
			distances = distances[:0]
			for i := from; i < to; i++ {
				at, found := last[refs[i].Name]
				if !found {
					break
				}
				distances = append(distances, len(last)-uses.sum(at))
			}
			each(refs[from:to], distances)
		}
		for i := to - 1; i >= from; i-- {
			if at, found := last[refs[i].Name]; found {
				uses.add(at, -1)
			}
			place++
			last[refs[i].Name] = place
			uses.add(place, 1)
		}
		from = to
	}
}

// fenwick is a binary indexed tree of counts at the places from 1 on.
type fenwick []int32

func newFenwick(places int) fenwick { return make(fenwick, places+1) }

func (f fenwick) add(at int, n int32) {
	for ; at < len(f); at += at & -at {
		f[at] += n
	}
}

// sum returns the counts at the places up to at.
func (f fenwick) sum(at int) (n int) {
	for ; at > 0; at -= at & -at {
		n += int(f[at])
	}
	return n
}
