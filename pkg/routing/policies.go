package routing

// DynamoPolicy is the name of the policy with the cost of NVIDIA Dynamo's KV router.
const DynamoPolicy = "dynamo"

// kvatlas.go registers the default policy of an indexer.
func init() {
	policy := func(name string, picker func() Picker, scorers ...Scorer) {
		Register(name, func(Config) (Policy, error) {
			return Policy{Filters: []Filter{affinity}, Scorers: scorers, Picker: picker()}, nil
		})
	}
	policy(DynamoPolicy, Lowest, dynamoCost{})
	policy("least_load", Lowest, scorerFunc{"least_load", leastLoad})
	policy("prefix_only", Lowest, scorerFunc{"prefix_only", prefixOnly})
	policy("random", Uniform)
	policy("round_robin", RoundRobin)
}

// scorerFunc makes a scorer from a function.
type scorerFunc struct {
	name string
	cost func(*View, *Candidate) float64
}

func (s scorerFunc) Name() string { return s.name }

func (s scorerFunc) Score(v *View, cost []float64) {
	for i := range cost {
		cost[i] = s.cost(v, v.At(i))
	}
}

// leastLoad is the present load of a candidate in blocks, without regard to its cache.
func leastLoad(v *View, c *Candidate) float64 {
	if !c.HasLoad {
		return 0
	}
	return float64(c.ActivePrefillTokens)/float64(v.Request.BlockSize) + float64(c.ActiveBlocks)
}

// prefixOnly is the part of the prompt that a candidate lacks, in blocks, without regard to its load.
func prefixOnly(v *View, c *Candidate) float64 {
	shared := v.Config.SharedCacheMultiplier * float64(v.SharedBlocks(c))
	return float64(v.Request.RequestBlocks()) - v.effectiveOverlap(c) - shared
}
