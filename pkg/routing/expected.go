package routing

import (
	"math"
	"math/rand/v2"
	"slices"
)

// The policy kvatlas estimates what it costs to send a request to a candidate, in milliseconds: how long the request
// takes to its first token there, and how much it delays others. Each term is a scorer, so explanations have all of
// them. The package's comment has the formula.
func init() {
	scorers := make([]Scorer, len(expectedTerms))
	for k := range expectedTerms {
		scorers[k] = expected(k)
	}
	Register("kvatlas", func(Config) (Policy, error) {
		return Policy{Filters: []Filter{affinity}, Picker: nearLowest{}, Prefill: prefillTokens, Scorers: scorers}, nil
	})
}

// expectedTerms are the terms of the policy kvatlas. The last argument of a term is the prefill time at the candidate,
// which several terms need.
var expectedTerms = [...]struct {
	name string
	term func(*View, *Candidate, float64) float64
}{
	{"queue", queueTime}, {"room", roomTime}, {"prefill", ownPrefill}, {"load", loadTime}, {"context", contextTime},
	{"decode", decodeSlowdown}, {"later", laterDelay}, {"evict", evictCost},
}

const (
	// attentionTokens is the length of a context at which attention takes as long as everything else that a token
	// takes. It is 19,000 for Llama 3.2 3B, 31,000 for Llama 3.1 8B and 53,000 for 70B, by their shapes.
	attentionTokens = 32_768

	// decodeWeight is what a millisecond counts by which a request that decodes is delayed.
	decodeWeight = 0.05

	// Loading a token takes these shares of the time of its prefill. A model of 32B parameters on two H100 prefills some
	// 16,000 tokens a second, and a token's KV has 256 KiB. PCIe moves 50 GB/s of it, a network some 20, an NVMe disk 6.
	hostLoad   = 0.1
	sharedLoad = 0.2
	diskLoad   = 0.5

	// contextWeight is what a token counts that requests under way at the candidate have in memory, as a share of the
	// time of its prefill. Each step of the engine reads all of them: with the same model in 38 ns a token, 0.06 % of the
	// 62 us of its prefill. A request decodes some 160 tokens, each in a step of its own.
	contextWeight = 0.1

	// mostCongestion bounds the delay of later requests where all ranks are busy all the time.
	mostCongestion = 3
)

// expected is the scorer of a term of the policy kvatlas: its place among expectedTerms.
type expected int

func (e expected) Name() string { return expectedTerms[e].name }

func (e expected) Score(v *View, cost []float64) {
	copy(cost, v.expectedCosts()[int(e)*len(cost):])
}

// expectedCosts returns the costs of all terms, one term after the other. All terms of a candidate are calculated
// together, so that the candidates pass through the processor's cache once.
func (v *View) expectedCosts() []float64 {
	if v.expected != nil {
		return v.expected
	}
	n := len(v.kept)
	v.scratch.expected = grown(v.scratch.expected, n*len(expectedTerms))
	v.expected = v.scratch.expected
	prefers := len(v.Request.PreferredTaints) > 0 && v.Request.Pin == nil
	for i := range n {
		c := v.At(i)
		prefill, factor := prefillTime(v, c), 1.0
		if prefers {
			factor = taintFactor(v.Request.PreferredTaints, c.Worker.Taints)
		}
		for k := range expectedTerms {
			v.expected[k*n+i] = expectedTerms[k].term(v, c, prefill) * factor
		}
	}
	return v.expected
}

// rate is how many tokens a candidate prefills in a millisecond.
func rate(c *Candidate) float64 {
	if c.PrefillRate > 0 {
		return c.PrefillRate
	}
	return PriorPrefillRate
}

// queueTime is until the candidate has done what it has to prefill already. What it has done of the first request is
// not reported, so that it is estimated: at most what a request has on average.
func queueTime(_ *View, c *Candidate, _ float64) float64 {
	queue := float64(activePrefill(c)) / rate(c)
	if c.PrefillRequests > 0 {
		queue -= min(c.WorkingMS, queue/float64(c.PrefillRequests))
	}
	return queue
}

// roomTime is until requests under way have ended whose blocks the request needs, if they fill the candidate's memory.
func roomTime(_ *View, c *Candidate, _ float64) float64 {
	room := c.capacity()
	if !c.HasLoad || room == 0 || c.ActiveBlocks+c.NewBlocks <= room {
		return 0
	}
	short := float64(c.ActiveBlocks + c.NewBlocks - room)
	return c.LifeMS * min(short/float64(max(c.ActiveBlocks, 1)), 1)
}

// held is how many tokens of the prompt a candidate need not compute: in device memory when its turn comes, and in
// lower tiers. Requests under way there have computed the blocks that they share with the prompt by then.
func (v *View) held(c *Candidate) (device, lower float64) {
	size, isl := float64(v.Request.BlockSize), float64(v.Request.ISL)
	blocks := float64(c.Device)
	if v.untiered {
		blocks = c.Overlap
	}
	below := float64(c.Host + c.Disk + v.SharedBlocks(c))
	if c.HasLoad {
		under := float64(v.Request.Blocks - min(c.NewBlocks, v.Request.Blocks))
		more := max(under-blocks, 0)
		blocks, below = blocks+more, max(below-more, 0)
	}
	device = min(blocks*size, isl)
	return device, min(below*size, isl-device)
}

// prefillTokens is what a booking counts: what the candidate lacks of the prompt, and what it prefills in the time in
// which it loads the rest.
func prefillTokens(v *View, c *Candidate) uint64 {
	device, lower := v.held(c)
	return uint64(math.Round(float64(v.Request.ISL) - device - lower + v.loaded(c)))
}

// prefillTime is how long it takes to compute what the candidate lacks. A token attends to all before it, so that
// tokens at the end of a long prompt take longer.
func prefillTime(v *View, c *Candidate) float64 {
	if v.Request.Role == Decode {
		return 0 // another worker computes it
	}
	device, lower := v.held(c)
	before := device + lower
	uncached := float64(v.Request.ISL) - before
	return uncached / rate(c) * (1 + (before+uncached/2)/attentionTokens)
}

// ownPrefill is the prefill time of the request itself.
func ownPrefill(_ *View, _ *Candidate, prefill float64) float64 { return prefill }

// loaded is how many tokens a candidate prefills in the time in which it copies blocks of lower tiers into device
// memory.
func (v *View) loaded(c *Candidate) float64 {
	size := float64(v.Request.BlockSize)
	if c.Host+c.Disk+v.SharedBlocks(c) == 0 {
		return 0
	}
	_, lower := v.held(c)
	left := lower // the first ones are in device memory by then, if requests under way have them
	take := func(blocks uint32) float64 {
		n := min(float64(blocks)*size, left)
		left -= n
		return n
	}
	return take(v.SharedBlocks(c))*sharedLoad + take(c.Disk)*diskLoad + take(c.Host)*hostLoad
}

// loadTime is how long it takes to copy blocks of lower tiers into device memory, and, to a worker of the decode pool,
// what the prefill worker computes.
func loadTime(v *View, c *Candidate, _ float64) float64 {
	tokens := v.loaded(c)
	if v.Request.Role == Decode {
		device, lower := v.held(c)
		tokens += (float64(v.Request.ISL) - device - lower) * sharedLoad
	}
	return tokens / rate(c)
}

// contextTime is by how much the requests under way on the candidate slow the decoding of this request.
func contextTime(v *View, c *Candidate, _ float64) float64 {
	if !c.HasLoad {
		return 0
	}
	return contextWeight * float64(c.ActiveBlocks) * float64(v.Request.BlockSize) / rate(c)
}

// decodeSlowdown is by how much the prefill delays the requests that decode on the candidate.
func decodeSlowdown(_ *View, c *Candidate, prefill float64) float64 {
	if !c.HasLoad || c.ActiveRequests <= c.PrefillRequests {
		return 0
	}
	return decodeWeight * float64(c.ActiveRequests-c.PrefillRequests) * prefill
}

// congestion is how many milliseconds all requests wait for one more millisecond of work: 1/(1−u)², the derivative by
// the utilisation u of u/(1−u), the mean number of requests in a queue with random arrivals.
func congestion(busy float64) float64 {
	free := 1 - busy
	if free*free*mostCongestion <= 1 {
		return mostCongestion
	}
	return 1 / (free * free)
}

// crowd is what all candidates have in common.
type crowd struct {
	rate  float64 // the mean; 0: nothing is calculated yet
	delay float64 // of later requests, for each millisecond of work
}

// laterDelay is by how much the prefill delays requests that come later, beyond its own time. They may go to any
// candidate, so that the mean rate counts: errors of a single rate would count several times otherwise.
func laterDelay(v *View, c *Candidate, prefill float64) float64 {
	of := v.crowdOf()
	return of.delay * prefill * rate(c) / of.rate
}

// crowdOf calculates what all candidates have in common, once for each call.
func (v *View) crowdOf() *crowd {
	if v.crowd.rate == 0 {
		busy, n := 0.0, float64(len(v.kept))
		for i := range v.kept {
			busy += v.At(i).Busy / n
			v.crowd.rate += rate(v.At(i)) / n
		}
		v.crowd.delay = congestion(busy) - 1
	}
	return &v.crowd
}

// evictCost is the time that later requests need for the blocks that this prompt evicts from the device memory of the
// candidate: to compute them again, or to load them if the candidate has lower tiers. Their delay of other requests
// counts as in laterDelay.
func evictCost(v *View, c *Candidate, _ float64) float64 {
	m := c.Memory
	if m == nil {
		return 0
	}
	device, _ := v.held(c)
	lacks := math.Ceil((float64(v.Request.ISL) - device) / float64(v.Request.BlockSize))
	evicted := lacks - float64(m.Free)
	if evicted <= 0 {
		return 0
	}
	of, weight := v.crowdOf(), 1.0
	switch {
	case m.Tiered:
		weight *= hostLoad
	case v.Request.Role == Decode:
		weight *= sharedLoad
	}
	return weight * evicted * m.Unique * m.Again * float64(v.Request.BlockSize) / of.rate * (1 + of.delay)
}

// nearLowest is the picker of the policy kvatlas: of the candidates whose cost is as good as the smallest, any with the
// same probability. Estimates are not exact, so that otherwise small differences between measured rates would send all
// requests that nobody holds a part of to one rank. A temperature counts as with [Lowest].
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
