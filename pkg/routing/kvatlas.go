package routing

import (
	"math"
	"math/rand/v2"
	"slices"
)

// The policy kvatlas estimates the cost of each candidate in milliseconds: the time to the first token of the request
// there, and the delay of other requests. Each term is a scorer, so explanations have all of them. The comment of the
// package has the formula.
func init() {
	scorers := make([]Scorer, len(expectedTerms))
	for k := range expectedTerms {
		scorers[k] = expected(k)
	}
	Register("kvatlas", func(Config) (Policy, error) {
		return Policy{Filters: []Filter{affinity}, Picker: nearLowest{}, Prefill: prefillTokens, Scorers: scorers,
			Sum: expectedSum{}}, nil
	})
}

// expectedTerms names the terms of the policy kvatlas, in the order of the results of expectedOf.
var expectedTerms = [...]string{"queue", "room", "prefill", "load", "context", "decode", "later", "evict"}

const (
	// attentionTokens is the context length at which attention doubles the time of a token. The length is 19,000 for
	// Llama 3.2 3B, 31,000 for Llama 3.1 8B and 53,000 for 70B, by the shapes of the models.
	attentionTokens = 32_768

	// decodeWeight is the weight of a millisecond of delay of a request in its output phase.
	decodeWeight = 0.05

	// The time to load a token, as a share of the time of its prefill. A model of 32B parameters on two H100 prefills
	// about 16,000 tokens per second, and the KV of a token has 256 KiB. PCIe moves 50 GB/s of it, a network about 20,
	// and an NVMe disk 6.
	hostLoad   = 0.1
	sharedLoad = 0.2
	diskLoad   = 0.5

	// contextWeight is the weight of a token in memory for requests under way on the candidate, as a share of the time
	// of a token's prefill. Each step of the engine reads all these tokens. With the same model, the read of a token
	// needs 38 ns, 0.06 % of the 62 us of a token's prefill. A request decodes about 160 tokens, each in a separate
	// step.
	contextWeight = 0.1

	// mostCongestion bounds the delay of later requests if all ranks are busy all the time.
	mostCongestion = 3
)

// expected is the scorer of a term of the policy kvatlas: the index in expectedTerms.
type expected int

func (e expected) Name() string { return expectedTerms[e] }

func (e expected) Score(v *View, cost []float64) {
	copy(cost, v.expectedCosts()[int(e)*len(cost):])
}

// expectedCosts returns the costs of all terms, one term after the other. All terms of a candidate are calculated
// together, so the candidates pass through the processor's cache once.
func (v *View) expectedCosts() []float64 {
	if v.expected != nil {
		return v.expected
	}
	n := len(v.kept)
	v.scratch.expected = grown(v.scratch.expected, n*len(expectedTerms))
	v.expected = v.scratch.expected
	v.crowd = v.calculateCrowd()
	for i := range n {
		for k, cost := range v.expectedOf(v.At(i)) {
			v.expected[k*n+i] = cost
		}
	}
	return v.expected
}

// expectedSum is the sum of all terms of the policy kvatlas.
type expectedSum struct{}

func (expectedSum) Name() string { return "kvatlas" }

func (expectedSum) Score(v *View, cost []float64) {
	v.crowd = v.calculateCrowd()
	weighted := v.weighsTaints()
	for i := range cost {
		c := v.At(i)
		v.setOutlook(c)
		// the terms of expectedOf, in the same order, without the array: a third less time
		sum := v.queueTime(c) + roomTime(c) + v.outlook.prefill + v.loadTime() + v.contextTime(c) + v.decodeSlowdown(c) +
			v.laterDelay() + v.evictCost(c)
		if weighted {
			sum *= taintFactor(v.Request.PreferredTaints, c.Worker.Taints)
		}
		cost[i] = sum
	}
}

// expectedOf returns the terms of a candidate. v.crowd is set.
func (v *View) expectedOf(c *Candidate) (terms [len(expectedTerms)]float64) {
	v.setOutlook(c)
	terms = [...]float64{v.queueTime(c), roomTime(c), v.outlook.prefill, v.loadTime(), v.contextTime(c),
		v.decodeSlowdown(c), v.laterDelay(), v.evictCost(c)}
	if v.weighsTaints() {
		factor := taintFactor(v.Request.PreferredTaints, c.Worker.Taints)
		for k := range terms {
			terms[k] *= factor
		}
	}
	return terms
}

// weighsTaints reports whether the taints of a worker change its costs.
func (v *View) weighsTaints() bool { return len(v.Request.PreferredTaints) > 0 && v.Request.Pin == nil }

// outlook describes a candidate for the terms.
type outlook struct {
	device, lower float64 // tokens of the prompt: see View.held
	loaded        float64 // tokens: see View.loaded
	rate, perRate float64 // tokens that the candidate prefills in a millisecond, and the reciprocal
	prefill       float64 // milliseconds to compute the missing tokens
}

// setOutlook sets the outlook of a candidate.
func (v *View) setOutlook(c *Candidate) {
	v.setRate(c)
	v.reach(c)
}

func (v *View) setRate(c *Candidate) {
	v.outlook.rate = rate(c)
	v.outlook.perRate = 1 / v.outlook.rate
}

// reach sets the fields of the outlook that depend on the depths of the candidate. The rate is set.
func (v *View) reach(c *Candidate) {
	o := &v.outlook
	shared := v.SharedBlocks(c)
	o.device, o.lower = v.held(c, shared)
	o.loaded = v.loaded(c, shared, o.lower)
	o.prefill = v.prefillTime()
}

// rate returns the tokens that a candidate prefills in a millisecond.
func rate(c *Candidate) float64 {
	if c.PrefillRate > 0 {
		return c.PrefillRate
	}
	return priorPrefillRate
}

// queueTime is the time until the candidate has prefilled all earlier requests. The finished part of the first request
// is not reported. queueTime estimates the part from the time spent, with the mean of these requests as bound.
func (v *View) queueTime(c *Candidate) float64 {
	queue := float64(activePrefill(c)) * v.outlook.perRate
	if c.PrefillRequests > 0 {
		queue -= min(c.WorkingMS, queue/float64(c.PrefillRequests))
	}
	return queue
}

// roomTime is the time until enough requests end, if active and new blocks exceed the candidate's memory.
func roomTime(c *Candidate) float64 {
	room := c.capacity()
	if !c.HasLoad || room == 0 || c.ActiveBlocks+c.NewBlocks <= room {
		return 0
	}
	short := float64(c.ActiveBlocks + c.NewBlocks - room)
	return c.LifeMS * min(short/float64(max(c.ActiveBlocks, 1)), 1)
}

// held returns the tokens of the prompt that a candidate does not compute: tokens in device memory at the start of the
// request, and tokens in lower tiers. Earlier requests under way compute the blocks shared with the prompt. shared is
// the result of SharedBlocks.
func (v *View) held(c *Candidate, shared uint32) (device, lower float64) {
	size, isl := float64(v.Request.BlockSize), float64(v.Request.ISL)
	blocks := float64(c.Device)
	if v.untiered {
		blocks = c.Overlap
	}
	below := float64(c.Host + c.Disk + shared)
	if c.HasLoad {
		under := float64(v.Request.Blocks - min(c.NewBlocks, v.Request.Blocks))
		more := max(under-blocks, 0)
		blocks, below = blocks+more, max(below-more, 0)
	}
	device = min(blocks*size, isl)
	return device, min(below*size, isl-device)
}

// prefillTokens returns the tokens that a booking counts: the tokens that the candidate lacks, and the tokens that it
// prefills in the time of loading the rest.
func prefillTokens(v *View, c *Candidate) uint64 {
	shared := v.SharedBlocks(c)
	device, lower := v.held(c, shared)
	return uint64(math.Round(float64(v.Request.ISL) - device - lower + v.loaded(c, shared, lower)))
}

// prefillTime is the time to compute the tokens that the candidate lacks. A token attends to all tokens before it, so
// tokens at the end of a long prompt take longer.
func (v *View) prefillTime() float64 {
	if v.Request.Role == Decode {
		return 0 // another worker computes it
	}
	before := v.outlook.device + v.outlook.lower
	uncached := float64(v.Request.ISL) - before
	return uncached * v.outlook.perRate * (1 + (before+uncached/2)/attentionTokens)
}

// loaded returns the tokens that a candidate prefills in the time of copying blocks of lower tiers into device memory.
// shared and lower are the results of SharedBlocks and held.
func (v *View) loaded(c *Candidate, shared uint32, lower float64) float64 {
	if c.Host+c.Disk+shared == 0 {
		return 0
	}
	size := float64(v.Request.BlockSize)
	// requests under way may have loaded the first blocks before
	store := min(float64(shared)*size, lower)
	disk := min(float64(c.Disk)*size, lower-store)
	host := min(float64(c.Host)*size, lower-store-disk)
	return store*sharedLoad + disk*diskLoad + host*hostLoad
}

// loadTime is the time to copy blocks of lower tiers into device memory. A worker of the decode pool also copies the
// tokens that the prefill worker computes.
func (v *View) loadTime() float64 {
	tokens := v.outlook.loaded
	if v.Request.Role == Decode {
		tokens += (float64(v.Request.ISL) - v.outlook.device - v.outlook.lower) * sharedLoad
	}
	return tokens * v.outlook.perRate
}

// contextTime is the delay of this request's output by the requests under way on the candidate.
func (v *View) contextTime(c *Candidate) float64 {
	if !c.HasLoad {
		return 0
	}
	return contextWeight * float64(c.ActiveBlocks) * float64(v.Request.BlockSize) * v.outlook.perRate
}

// decodeSlowdown is the delay of requests in their output phase on the candidate by the prefill.
func (v *View) decodeSlowdown(c *Candidate) float64 {
	if !c.HasLoad || c.ActiveRequests <= c.PrefillRequests {
		return 0
	}
	return decodeWeight * float64(c.ActiveRequests-c.PrefillRequests) * v.outlook.prefill
}

// congestion returns the additional wait of all requests for one more unit of work: 1/(1−u)². It is the derivative by
// the utilisation u of u/(1−u), the mean number of requests in a queue with random arrivals.
func congestion(busy float64) float64 {
	free := 1 - busy
	if free*free*mostCongestion <= 1 {
		return mostCongestion
	}
	return 1 / (free * free)
}

// crowd has the values that are common to all candidates.
type crowd struct {
	rate    float64 // the mean of the candidates
	delay   float64 // of later requests, for each millisecond of work
	evicted float64 // milliseconds of later requests to compute an evicted block again
}

func (v *View) calculateCrowd() (of crowd) {
	busy, n := 0.0, float64(len(v.kept))
	for i := range v.kept {
		c := v.At(i)
		busy, of.rate = busy+c.Busy, of.rate+rate(c)
	}
	busy, of.rate = busy/n, of.rate/n
	of.delay = congestion(busy) - 1
	of.evicted = float64(v.Request.BlockSize) / of.rate * (1 + of.delay)
	if v.Request.Role == Decode {
		of.evicted *= sharedLoad
	}
	return of
}

// laterDelay is the delay of later requests by the prefill, beyond the time of the prefill. Later requests may go to
// any candidate, so the mean rate counts. Otherwise errors of a single rate would count several times.
func (v *View) laterDelay() float64 {
	return v.crowd.delay * v.outlook.prefill * v.outlook.rate / v.crowd.rate
}

// evictCost is the time of later requests for the blocks that this prompt evicts from the device memory of the
// candidate. The time is for a computation, or for a load if the candidate has lower tiers.
func (v *View) evictCost(c *Candidate) float64 {
	m := c.Memory
	if m == nil {
		return 0
	}
	size := uint64(v.Request.BlockSize)
	lacks := (v.Request.ISL - uint64(v.outlook.device) + size - 1) / size
	if lacks <= m.Free {
		return 0
	}
	cost := float64(lacks-m.Free) * m.Unique * m.Again * v.crowd.evicted
	if m.Tiered {
		cost *= hostLoad
	}
	return cost
}

// nearLowest is the picker of the policy kvatlas. It chooses at random among the candidates with a cost near the
// smallest. Estimates have errors. Without this rule, small errors of measured rates would send all requests without a
// cached prefix to a single rank. A temperature above 0 has the same effect as with [Lowest].
type nearLowest struct{}

const (
	nearShare = 0.02 // of the smallest cost
	nearMS    = 1.0
)

func (nearLowest) Pick(v *View, cost, probability []float64, rng *rand.Rand) int {
	if v.Config.RouterTemperature > 0 {
		return lowest{}.Pick(v, cost, probability, rng)
	}
	least := slices.Min(cost)
	bound := least + nearMS + nearShare*math.Abs(least)
	picked, n := -1, 0
	for i, c := range cost {
		if c <= bound {
			if n++; rng.IntN(n) == 0 {
				picked = i
			}
		}
	}
	for i, c := range cost {
		if c <= bound {
			probability[i] = 1 / float64(n)
		}
	}
	return picked
}
