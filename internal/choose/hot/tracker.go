package hot

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Config configures a Tracker. The zero value is a good choice.
type Config struct {
	Entries   int           // prefixes of a model; default 1,024
	HalfLife  time.Duration // of the demand; default 2 minutes
	MinTokens int           // of a prefix; default 512
	Seed      uint64        // of the samples of workers
}

const (
	defaultEntries  = 1024
	defaultHalfLife = 2 * time.Minute
	defaultTokens   = 512

	// sampledRanks is the number of workers for which a request is forecast.
	sampledRanks = 8

	// mostCopies bounds the remembered copies of a model. The oldest copy is dropped.
	mostCopies = 256

	// keptHashes bounds the blocks of all prefixes with kept hashes, and the blocks of one of them.
	keptHashes = 1 << 17
	mostDepth  = 1 << 14

	// A saving below noiseMS plus noiseShare of the forecast is an error of the estimate: the policy kvatlas chooses at
	// random among candidates that are so near.
	noiseMS    = 1.0
	noiseShare = 0.02
)

// Tracker finds the hot prefixes of a model. See the package comment.
type Tracker struct {
	cfg    Config
	sketch *sketch
	rng    *rand.Rand
	size   uint32 // of a block in tokens
	hashes int    // kept blocks
	copies []*Copy
	total  Use // of all copies

	ranks     []int // these six are scratch
	depths    []uint32
	trial     routing.Candidate
	forecasts [sampledRanks]routing.Forecast // of ranks
	savings   []float64                      // of depths
	found     []Benefit
}

// New returns an empty tracker.
func New(cfg Config) *Tracker {
	if cfg.Entries == 0 {
		cfg.Entries = defaultEntries
	}
	if cfg.HalfLife == 0 {
		cfg.HalfLife = defaultHalfLife
	}
	if cfg.MinTokens == 0 {
		cfg.MinTokens = defaultTokens
	}
	return &Tracker{cfg: cfg, sketch: newSketch(cfg.Entries, cfg.HalfLife), rng: rand.New(rand.NewPCG(cfg.Seed, 0x686f74))}
}

// Choice is a request with the chosen worker. It is valid during the call of [Tracker.Chose].
type Choice struct {
	Request  *routing.Request
	Ranks    []routing.Candidate // before the booking of the request
	Chosen   int                 // in Ranks
	Sequence []events.SeqHash    // of the prompt's whole blocks
	Locals   []events.LocalHash  // of the same blocks; empty: unknown

	// Bound: the request could not go to another worker.
	Bound bool
}

// Chose records a choice. now is of a monotonic clock. It returns the prefixes of the prompt with a benefit, the
// shortest first; the list is valid until the next call.
func (t *Tracker) Chose(now time.Duration, c *Choice) []Benefit {
	if t.size != c.Request.BlockSize { // of a model with new workers
		*t = *New(t.cfg)
		t.size = c.Request.BlockSize
	}
	t.sketch.tick(now)
	chosen := &c.Ranks[c.Chosen]
	own := routing.FirstToken(c.Request, chosen)
	t.use(c, own)
	longest := uint32(0)
	for i := range c.Ranks {
		longest = max(longest, held(&c.Ranks[i]))
	}
	longest = min(longest, uint32(len(c.Sequence)), mostDepth)
	t.sampleDepths(longest)
	if len(t.depths) == 0 {
		return nil
	}
	t.sampleRanks(c)
	wait := t.extraWait(c, chosen)
	t.computeSavings(c, own)
	var above events.SeqHash
	t.found = t.found[:0]
	for i, depth := range t.depths {
		hash := c.Sequence[depth-1]
		e, ms := t.sketch.byHash[hash], t.savings[i]
		if ms > 0 {
			e = t.sketch.add(now, hash, above, depth, ms)
			t.keep(e, c.Locals)
			t.found = append(t.found, Benefit{hash, depth, (e.weight - e.excess) / t.sketch.unit})
		}
		if e != nil {
			more := sums{requests: 1}
			if ms > 0 {
				more.helped = 1
			}
			if lacks := depth - min(depth, held(chosen)); lacks > 0 {
				more.recomputed = float64(lacks) * float64(t.size)
			} else {
				more.waited = wait
			}
			t.sketch.count(e, more)
		}
		above = hash
	}
	return t.found
}

// Benefit is the benefit of a further copy of a prefix, in milliseconds, by the recent requests. It decays.
type Benefit struct {
	Hash  events.SeqHash
	Depth uint32
	MS    float64
}

// held returns the blocks of the prompt that a rank holds in any tier of its own.
func held(c *routing.Candidate) uint32 { return c.Device + c.Host + c.Disk }

// sampleDepths sets the depths of the prefixes that are counted: two per octave, and the longest held prefix.
func (t *Tracker) sampleDepths(longest uint32) {
	t.depths = t.depths[:0]
	least := max(uint32(t.cfg.MinTokens)/t.size, 1)
	for power := uint32(2); power < longest; power *= 2 {
		for _, depth := range [...]uint32{power, power + power/2} {
			if depth >= least && depth < longest {
				t.depths = append(t.depths, depth)
			}
		}
	}
	if longest >= least {
		t.depths = append(t.depths, longest)
	}
}

// sampleRanks sets the workers for which the request is forecast: at most sampledRanks that may serve it, at random.
func (t *Tracker) sampleRanks(c *Choice) {
	t.ranks = t.ranks[:0]
	seen := 0
	for i := range c.Ranks {
		if i == c.Chosen || !alike(&c.Ranks[i], &c.Ranks[c.Chosen]) {
			continue
		}
		if seen++; len(t.ranks) < sampledRanks {
			t.ranks = append(t.ranks, i)
		} else if at := t.rng.IntN(seen); at < sampledRanks {
			t.ranks[at] = i
		}
	}
}

// alike reports whether a rank may serve the requests of another one.
func alike(c, as *routing.Candidate) bool {
	return c.Worker.State == as.Worker.State && c.Worker.Role == as.Worker.Role && c.Penalty == nil
}

// computeSavings sets the milliseconds that a copy of the prefix at each depth saves the request. All are 0 if a copy
// of the longest prefix saves nothing, or if the request could not go to another worker.
func (t *Tracker) computeSavings(c *Choice, own float64) {
	t.savings = append(t.savings[:0], make([]float64, len(t.depths))...)
	if c.Bound {
		return
	}
	for i, rank := range t.ranks {
		t.forecasts[i].Set(c.Request, &c.Ranks[rank])
	}
	last := len(t.depths) - 1
	if t.savings[last] = t.saving(c, own, t.depths[last]); t.savings[last] > 0 {
		for i, depth := range t.depths[:last] {
			t.savings[i] = t.saving(c, own, depth)
		}
	}
}

// saving returns the milliseconds saved by a copy of a prefix for the request: the mean over the workers without the
// prefix.
func (t *Tracker) saving(c *Choice, own float64, depth uint32) float64 {
	sum, n := 0.0, 0
	for i, rank := range t.ranks {
		if held(&c.Ranks[rank]) >= depth {
			continue
		}
		n++
		if ms := own - t.forecasts[i].Guess(depth); ms > noiseMS+noiseShare*own {
			sum += ms
		}
	}
	if n == 0 {
		return 0
	}
	return sum / float64(n)
}

// extraWait returns how much longer the request waits than at the sampled worker with the shortest wait.
func (t *Tracker) extraWait(c *Choice, chosen *routing.Candidate) float64 {
	wait := routing.Waiting(chosen)
	least := wait
	for _, i := range t.ranks {
		least = min(least, routing.Waiting(&c.Ranks[i]))
	}
	return wait - least
}

// keep stores the local hashes of a prefix, with which the index finds the holders.
func (t *Tracker) keep(e *entry, locals []events.LocalHash) {
	if e.locals != nil || len(locals) < int(e.depth) {
		return
	}
	if t.hashes += int(e.depth); t.hashes > keptHashes {
		t.recount()
		if t.hashes+int(e.depth) > keptHashes {
			return
		}
		t.hashes += int(e.depth)
	}
	e.locals = slices.Clone(locals[:e.depth])
}

// recount drops the hashes of the lighter half of the entries if the bound is reached, and counts the rest.
func (t *Tracker) recount() {
	weights := make([]float64, 0, len(t.sketch.heap))
	for _, e := range t.sketch.heap {
		if e.locals != nil {
			weights = append(weights, e.weight-e.excess)
		}
	}
	slices.Sort(weights)
	t.hashes = 0
	for _, e := range t.sketch.heap {
		if len(weights) > 0 && e.locals != nil && e.weight-e.excess <= weights[len(weights)/2] {
			e.locals = nil
		}
		t.hashes += len(e.locals)
	}
}
