package routing

import (
	"math"
	"math/bits"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Memory describes the effect of a prompt on the device memory of a rank, and the cost of evicted blocks for later
// requests.
type Memory struct {
	Free   uint64  `json:"free_blocks" msgpack:"free_blocks"` // blocks that fit before the rank evicts others
	Unique float64 `json:"unique" msgpack:"unique"`           // share of blocks without a copy on another rank
	Again  float64 `json:"again" msgpack:"again"`             // probability that a request needs an evicted block

	// Tiered: lower tiers of the rank have copies of evicted blocks.
	Tiered bool `json:"tiered,omitempty" msgpack:"tiered,omitempty"`
}

// EvictionAge returns the time from a block's last use to the eviction, in a device memory of full blocks. In this time
// the rank computes full new blocks. rate is in tokens per millisecond, busy is the share of time with prefill.
func EvictionAge(full uint64, blockSize uint32, rate, busy float64) time.Duration {
	age := float64(full) * float64(blockSize) / (rate * busy)
	if !(age < float64(mostAge/time.Millisecond)) {
		return mostAge
	}
	return time.Duration(age * float64(time.Millisecond))
}

// mostAge bounds the ages that Reuse measures.
const mostAge = time.Hour

// Unique measures the share of a rank's blocks without a copy on another rank. It counts prompts for which the rank
// held the longest part, and the share of these prompts for which the rank was alone. An engine evicts the end of the
// longest part first. The zero value has measured nothing. A Unique belongs to one goroutine at a time.
type Unique struct{ alone, longest float64 }

// uniqueKeep is the weight of an observation after the next one of the same rank.
const uniqueKeep = 0.99

// Longest adds a prompt for which the rank held the longest part. alone: no other rank held as much.
func (u *Unique) Longest(alone bool) {
	u.alone, u.longest = u.alone*uniqueKeep, u.longest*uniqueKeep+1
	if alone {
		u.alone++
	}
}

// Share returns the measured share. A prior of 1 counts as one observation.
func (u *Unique) Share() float64 { return (u.alone + 1) / (u.longest + 1) }

// Longest calls f with the index of each candidate that holds the longest part of the prompt in device memory. It does
// not call f if no candidate holds a block.
func Longest(candidates []Candidate, f func(i int, alone bool)) {
	longest, n := uint32(0), 0
	for i := range candidates {
		switch d := candidates[i].Device; {
		case d > longest:
			longest, n = d, 1
		case d == longest:
			n++
		}
	}
	for i := 0; longest > 0 && i < len(candidates); i++ {
		if candidates[i].Device == longest {
			f(i, n == 1)
		}
	}
}

// Reuse measures the time between two requests for a block of a model. It keeps a sample of at most 4,096 blocks,
// chosen by their hashes. The zero value has measured nothing. A Reuse belongs to one goroutine at a time.
type Reuse struct {
	last   map[events.SeqHash]time.Duration // of the sample: the time of the last request
	limit  uint64                           // the sample has the blocks with a mixed hash of at most limit
	uses   float64                          // of blocks of the sample
	within [reuseSpans]float64              // uses that were followed by a request at an age of this span
}

const (
	reuseBlocks = 4096
	reuseUses   = 16_384 // after so many uses, all counts are halved
	reuseSpans  = 23     // of ages: below 1 ms, then doubling; the last span ends above mostAge
)

// Requested adds a request at some time of a monotonic clock for a prompt with these blocks. Requests may arrive in a
// different order than their times.
func (r *Reuse) Requested(now time.Duration, prompt []events.SeqHash) {
	if r.last == nil {
		r.last, r.limit = map[events.SeqHash]time.Duration{}, math.MaxUint64
	}
	for _, h := range prompt {
		if mixed(h) > r.limit {
			continue
		}
		last, known := r.last[h]
		if known && now-last < mostAge {
			r.within[span(max(now-last, 0))]++
		}
		r.uses++
		r.last[h] = max(now, last)
	}
	if len(r.last) > reuseBlocks {
		r.shrink(now)
	}
	if r.uses > reuseUses {
		r.uses /= 2
		for i := range r.within {
			r.within[i] /= 2
		}
	}
}

// mixed distributes the hashes of clients evenly.
func mixed(h events.SeqHash) uint64 { return uint64(h) * 0x9e3779b97f4a7c15 }

// span returns the span of an age.
func span(age time.Duration) int { return bits.Len64(uint64(age / time.Millisecond)) }

// shrink drops old blocks of the sample, and chooses a smaller share of all blocks if too many are left.
func (r *Reuse) shrink(now time.Duration) {
	for h, last := range r.last {
		if now-last >= mostAge {
			delete(r.last, h)
		}
	}
	for len(r.last) > reuseBlocks*3/4 {
		r.limit /= 2
		for h := range r.last {
			if mixed(h) > r.limit {
				delete(r.last, h)
			}
		}
	}
}

// Again returns the probability that a block without a request for an age is requested within twice the age. This is
// the probability of a reuse that an eviction at the age prevents.
func (r *Reuse) Again(age time.Duration) float64 {
	once, twice := r.before(age), r.before(2*age)
	if r.uses-once <= 0 {
		return 0
	}
	return min((twice-once)/(r.uses-once), 1)
}

// before returns the number of uses with a following use within an age. Ages of a span count as evenly distributed.
func (r *Reuse) before(age time.Duration) (n float64) {
	age = min(age, 2*mostAge)
	k := span(age)
	for i := range min(k, reuseSpans) {
		n += r.within[i]
	}
	if k < reuseSpans {
		from := time.Duration(0)
		if k > 0 {
			from = time.Millisecond << (k - 1)
		}
		n += r.within[k] * float64(age-from) / float64(max(from, time.Millisecond))
	}
	return n
}
