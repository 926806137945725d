package hot

import (
	"math"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// entry is a prefix in a sketch. Sums decay and are in units of the sketch.
type entry struct {
	hash  events.SeqHash // of the last block
	above events.SeqHash // of the next shorter sampled prefix of the prompt; 0: none
	depth uint32         // in blocks

	weight float64 // milliseconds that a copy would have saved, with the excess
	excess float64 // of the weight, from entries that had the place before

	sums  sums
	since time.Duration // of the sums

	locals []events.LocalHash // of the blocks; nil: not kept
	at     int                // in the heap
}

// sums are measured since the entry began.
type sums struct {
	requests   float64 // with the prefix
	recomputed float64 // tokens of the prefix that workers without it computed
	waited     float64 // milliseconds that requests waited longer at holders than elsewhere
	helped     float64 // requests that a copy would have helped
}

func (s *sums) add(more sums) {
	s.requests, s.recomputed = s.requests+more.requests, s.recomputed+more.recomputed
	s.waited, s.helped = s.waited+more.waited, s.helped+more.helped
}

func (s *sums) scale(x float64) {
	s.requests, s.recomputed, s.waited, s.helped = s.requests*x, s.recomputed*x, s.waited*x, s.helped*x
}

// sketch keeps the prefixes with the largest weights in bounded memory, by the algorithm space-saving (Metwally et
// al.): a new prefix replaces the entry with the smallest weight, and inherits this weight as excess. So the true
// weight of an entry is between weight-excess and weight, and no prefix outside the sketch has more than the smallest
// weight. All weights halve in each half-life.
type sketch struct {
	size     int
	halfLife time.Duration
	byHash   map[events.SeqHash]*entry
	heap     []*entry // the smallest weight first

	epoch time.Duration // at this time, a unit was 1
	unit  float64       // of an addition at the last time
}

// mostUnit bounds the units before all weights are converted.
const mostUnit = 1 << 40

func newSketch(size int, halfLife time.Duration) *sketch {
	return &sketch{size: size, halfLife: halfLife, byHash: map[events.SeqHash]*entry{}, unit: 1}
}

// tick sets the time. Times may arrive in a different order.
func (s *sketch) tick(now time.Duration) {
	s.unit = math.Exp2(float64(now-s.epoch) / float64(s.halfLife))
	if s.unit < mostUnit {
		return
	}
	for _, e := range s.heap {
		e.weight, e.excess = e.weight/s.unit, e.excess/s.unit
		e.sums.scale(1 / s.unit)
	}
	s.epoch, s.unit = now, 1
}

// add adds milliseconds to a prefix, and returns the entry. A prefix without an entry gets one.
func (s *sketch) add(now time.Duration, hash, above events.SeqHash, depth uint32, ms float64) *entry {
	e := s.byHash[hash]
	if e == nil {
		if len(s.heap) < s.size {
			e = &entry{hash: hash, depth: depth, since: now, at: len(s.heap)}
			s.heap = append(s.heap, e)
			s.up(e)
		} else {
			e = s.heap[0]
			delete(s.byHash, e.hash)
			*e = entry{hash: hash, depth: depth, since: now, weight: e.weight, excess: e.weight}
		}
		s.byHash[hash] = e
	}
	e.above = above
	e.weight += ms * s.unit
	s.down(e)
	return e
}

// count adds to the sums of a prefix with an entry.
func (s *sketch) count(e *entry, more sums) {
	more.scale(s.unit)
	e.sums.add(more)
}

// forget restarts an entry: the demand so far no longer counts.
func (s *sketch) forget(now time.Duration, e *entry) {
	e.weight, e.excess, e.sums, e.since = 0, 0, sums{}, now
	s.up(e)
}

// rate converts a decayed sum of an entry to a mean per second.
func (s *sketch) rate(now time.Duration, e *entry, sum float64) float64 {
	life := s.halfLife.Seconds() / math.Ln2
	age := max(now-e.since, youngest)
	return sum / s.unit / (life * -math.Expm1(-age.Seconds()/life))
}

// youngest is the least time over which a rate is measured: the first requests of a burst are no rate.
const youngest = 10 * time.Second

func (s *sketch) up(e *entry) {
	for e.at > 0 {
		parent := s.heap[(e.at-1)/2]
		if parent.weight <= e.weight {
			return
		}
		s.swap(parent, e)
	}
}

func (s *sketch) down(e *entry) {
	for {
		least := e
		for child := 2*e.at + 1; child <= 2*e.at+2 && child < len(s.heap); child++ {
			if s.heap[child].weight < least.weight {
				least = s.heap[child]
			}
		}
		if least == e {
			return
		}
		s.swap(e, least)
	}
}

func (s *sketch) swap(a, b *entry) {
	s.heap[a.at], s.heap[b.at] = b, a
	a.at, b.at = b.at, a.at
}
