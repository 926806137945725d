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
	Register("kvatlas", func(Config) (Policy, error) {
		return Policy{Filters: []Filter{affinity}, Picker: nearLowest{}, Scorers: []Scorer{
			expected{"queue", queueTime}, expected{"room", roomTime}, expected{"prefill", prefillTime},
			expected{"load", loadTime}, expected{"decode", decodeSlowdown}, expected{"later", laterDelay},
		}}, nil
	})
}

const (
	// attentionTokens is the length of a context at which attention takes as long as everything else that a token
	// takes. It is 19,000 for Llama 3.2 3B, 31,000 for Llama 3.1 8B and 53,000 for 70B, by their shapes.
	attentionTokens = 32_768

	// decodeWeight is what a millisecond counts by which a request that decodes is delayed.
	decodeWeight = 0.05

	// mostCongestion bounds the delay of later requests where all ranks are busy all the time.
	mostCongestion = 6
)

// expected is a term of the policy kvatlas.
type expected struct {
	name string
	term func(*View, *Candidate) float64
}

func (e expected) Name() string { return e.name }

func (e expected) Score(v *View, cost []float64) {
	prefers := len(v.Request.PreferredTaints) > 0 && v.Request.Pin == nil
	for i := range cost {
		c := v.At(i)
		cost[i] = e.term(v, c)
		if prefers {
			cost[i] *= taintFactor(v.Request.PreferredTaints, c.Worker.Taints)
		}
	}
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
func queueTime(_ *View, c *Candidate) float64 {
	queue := float64(activePrefill(c)) / rate(c)
	if c.PrefillRequests > 0 {
		queue -= min(c.WorkingMS, queue/float64(c.PrefillRequests))
	}
	return queue
}

// roomTime is until requests under way have ended whose blocks the request needs, if they fill the candidate's memory.
func roomTime(_ *View, c *Candidate) float64 {
	room := c.capacity()
	if !c.HasLoad || room == 0 || c.ActiveBlocks+c.NewBlocks <= room {
		return 0
	}
	short := float64(c.ActiveBlocks + c.NewBlocks - room)
	return c.LifeMS * min(short/float64(max(c.ActiveBlocks, 1)), 1)
}

// held is how many tokens of the prompt a candidate need not compute: in device memory, and in lower tiers.
func (v *View) held(c *Candidate) (device, lower float64) {
	size, isl := float64(v.Request.BlockSize), float64(v.Request.ISL)
	device = float64(c.Device)
	if v.untiered {
		device = c.Overlap
	}
	device = min(device*size, isl)
	return device, min(float64(c.Host+c.Disk+v.SharedBlocks(c))*size, isl-device)
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

// loadTime is how long it takes to copy blocks of lower tiers into device memory: the part of their prefill that their
// weights do not save.
func loadTime(v *View, c *Candidate) float64 {
	w, size := &v.Config, float64(v.Request.BlockSize)
	_, lower := v.held(c)
	host := min(float64(c.Host)*size, lower)
	disk := min(float64(c.Disk)*size, lower-host)
	shared := lower - host - disk
	tokens := host*(1-w.HostCacheHitWeight) + disk*(1-w.DiskCacheHitWeight) + shared*(1-w.SharedCacheMultiplier)
	if v.Request.Role == Decode {
		device, _ := v.held(c)
		tokens += (float64(v.Request.ISL) - device - lower) * (1 - w.HostCacheHitWeight) // from the prefill worker
	}
	return tokens / rate(c)
}

// decodeSlowdown is by how much the prefill delays the requests that decode on the candidate.
func decodeSlowdown(v *View, c *Candidate) float64 {
	if !c.HasLoad || c.ActiveRequests <= c.PrefillRequests {
		return 0
	}
	return decodeWeight * float64(c.ActiveRequests-c.PrefillRequests) * prefillTime(v, c)
}

// congestion is how many milliseconds all requests wait for one more millisecond of work: 1/(1−u)², the derivative by
// the utilisation u of u/(1−u), the mean number of requests in a queue with random arrivals.
func (v *View) congestion() float64 {
	if v.crowd == 0 {
		busy := 0.0
		for i := range v.kept {
			busy += v.At(i).Busy
		}
		free := 1 - busy/float64(len(v.kept))
		v.crowd = mostCongestion
		if free*free*mostCongestion > 1 {
			v.crowd = 1 / (free * free)
		}
	}
	return v.crowd
}

// laterDelay is by how much the prefill delays requests that come later, beyond its own time.
func laterDelay(v *View, c *Candidate) float64 { return (v.congestion() - 1) * prefillTime(v, c) }

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
