package routing

import (
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// twin is the policy dynamo by the formula of the package comment, term by term and in maps by rank. It shares only the
// input types with the package.
type twin struct {
	config Config
	r      *Request
	all    []Candidate
}

type rankKey = events.RankKey

func keyOf(c *Candidate) rankKey { return rankKey{Instance: c.Worker.ID, Rank: c.Rank} }

// overridden returns the constants with the overrides of the request.
func (t *twin) overridden() Config {
	c, o := t.config, t.r.Overrides
	if o.OverlapScoreCredit != nil {
		c.OverlapScoreCredit = *o.OverlapScoreCredit
	}
	if o.PrefillLoadScale != nil {
		c.PrefillLoadScale = *o.PrefillLoadScale
	}
	if o.OverlapScoreWeight != nil {
		c.PrefillLoadScale = *o.OverlapScoreWeight
		if *o.OverlapScoreWeight == 0 {
			c.OverlapScoreCredit = 0
		}
	}
	if o.RouterTemperature != nil {
		c.RouterTemperature = *o.RouterTemperature
	}
	if o.TrackPrefillTokens != nil {
		c.RouterTrackPrefillTokens = *o.TrackPrefillTokens
	}
	if o.SharedCacheMultiplier != nil {
		c.SharedCacheMultiplier = *o.SharedCacheMultiplier
	}
	return c
}

// eligible returns the filter that drops each rank; "" for the remaining ranks.
func (t *twin) eligible() map[rankKey]string {
	r, config := t.r, t.overridden()
	left := map[rankKey]string{}
	drop := func(filter string, keep func(*Candidate) bool) {
		for i := range t.all {
			if c := &t.all[i]; left[keyOf(c)] == "" && !keep(c) {
				left[keyOf(c)] = filter
			}
		}
	}
	any := func(what func(*Candidate) bool) bool {
		for i := range t.all {
			if left[keyOf(&t.all[i])] == "" && what(&t.all[i]) {
				return true
			}
		}
		return false
	}
	matches := func(target *Target) func(c *Candidate) bool {
		return func(c *Candidate) bool {
			if target.Rank != nil && *target.Rank != c.Rank {
				return false
			}
			return c.Worker.ID == target.Worker
		}
	}
	if r.Pin != nil {
		drop("pinned_worker", matches(r.Pin))
	}
	if r.Allowed != nil {
		drop("allowed_worker_ids", func(c *Candidate) bool { return slices.Contains(r.Allowed, c.Worker.ID) })
	}
	drop("excluded_workers", func(c *Candidate) bool { return !slices.Contains(r.Excluded, c.Worker.ID) })
	if r.Endpoints != nil {
		drop("endpoints", func(c *Candidate) bool { return slices.Contains(r.Endpoints, c.Worker.Endpoint) })
	}
	drop("role", func(c *Candidate) bool {
		switch c.Worker.Role {
		case "", Aggregated:
			return r.Role == "" || r.Role == Aggregated
		case Decode:
			return r.Role == "" || r.Role == Decode
		case Prefill:
			return r.Role == Prefill
		}
		return false
	})
	drop("state", func(c *Candidate) bool { return c.Worker.State == "" || c.Worker.State == Schedulable })
	if r.LoRA != "" && r.Pin == nil {
		has := func(c *Candidate) bool { return slices.Contains(c.Worker.LoRAs, r.LoRA) }
		if !any(has) {
			has = func(c *Candidate) bool { return c.Worker.LoRAs == nil || slices.Contains(c.Worker.LoRAs, AnyLoRA) }
		}
		drop("lora", has)
	}
	drop("required_taints", func(c *Candidate) bool {
		return !slices.ContainsFunc(r.RequiredTaints, func(t string) bool { return !slices.Contains(c.Worker.Taints, t) })
	})
	if r.Near != nil {
		drop("near", func(c *Candidate) bool {
			return slices.ContainsFunc(r.Near, func(t string) bool { return slices.Contains(c.Worker.Taints, t) })
		})
	}
	drop("overload", func(c *Candidate) bool {
		capacity := float64(c.Worker.TotalKVBlocks)
		if capacity == 0 {
			capacity = float64(c.UsedOf)
		}
		if x := config.ActiveDecodeBlocksThreshold; x != nil && capacity != 0 {
			if c.HasUsed && float64(c.UsedBlocks) > *x*capacity || c.HasLoad && float64(c.ActiveBlocks) > *x*capacity {
				return false
			}
		}
		over := func(bound float64) bool {
			return float64(c.UsedPrefillTokens) > bound || c.HasLoad && float64(c.ActivePrefillTokens) > bound
		}
		if x := config.ActivePrefillTokensThreshold; x != nil && over(*x) {
			return false
		}
		batch := float64(c.Worker.MaxNumBatchedTokens)
		if batch == 0 {
			batch = 10_000_000
		}
		x := config.ActivePrefillTokensThresholdFrac
		return x == nil || !over(*x*batch)
	})
	if any(func(c *Candidate) bool { return c.Penalty == nil }) {
		drop("penalty", func(c *Candidate) bool { return c.Penalty == nil })
	}
	if r.Affinity != nil && any(matches(r.Affinity)) {
		drop("affinity_target", matches(r.Affinity))
	}
	return left
}

// cost returns a rank's cost by the formula of the package comment.
func (t *twin) cost(of rankKey) float64 {
	config, r := t.overridden(), t.r
	isl, b := float64(r.ISL), float64(r.BlockSize)
	requestBlocks := math.Ceil(isl / b)
	dropped := t.eligible()
	var w *Candidate
	untiered := true
	minActive := math.Inf(1)
	for i := range t.all {
		c := &t.all[i]
		if c.Device != 0 || c.Host != 0 || c.Disk != 0 {
			untiered = false
		}
		if keyOf(c) == of {
			w = c
		}
		if dropped[keyOf(c)] == "" {
			active := 0.0
			if c.HasLoad {
				active = float64(c.ActivePrefillTokens)
			}
			minActive = math.Min(minActive, active)
		}
	}
	device, host, disk := float64(w.Device), float64(w.Host), float64(w.Disk)
	effective := device + config.HostCacheHitWeight*host + config.DiskCacheHitWeight*disk
	if untiered {
		effective = w.Overlap
		device = effective
	}
	cachedTokens := math.Round(effective * b)
	uncached := math.Max(isl-cachedTokens, 0)

	var activePrefill, activeBlocks, newBlocks, activeRequests float64
	if w.HasLoad {
		activePrefill, activeBlocks = float64(w.ActivePrefillTokens), float64(w.ActiveBlocks)
		newBlocks, activeRequests = float64(w.NewBlocks), float64(w.ActiveRequests)
	}
	rawPrefillTokens := 0.0
	if config.RouterTrackPrefillTokens {
		rawPrefillTokens = isl
		if w.HasLoad {
			rawPrefillTokens = activePrefill + uncached + cachedTokens
		}
	}
	rawPrefill := rawPrefillTokens / b

	decay := 1.0
	if d := config.OverlapScoreCreditDecay; config.RouterTrackPrefillTokens && d > 0 {
		decay = 1 / (1 + d*((activePrefill-minActive)/b)/math.Max(requestBlocks, 1))
	}
	hits := float64(w.WouldLoad)
	if config.SharedCacheMode == SharedDynamo {
		hits = 0
		for _, s := range r.Shared {
			for block := s[0]; block < s[1]; block++ {
				if float64(block) >= math.Round(device) {
					hits++
				}
			}
		}
	}
	shared := config.SharedCacheMultiplier * hits
	credit := config.OverlapScoreCredit*decay*device + config.HostCacheHitWeight*host +
		config.DiskCacheHitWeight*disk + shared
	decode := activeBlocks + newBlocks
	a := config.DecodeActiveRequestWeight

	cost := config.PrefillLoadScale*math.Max(rawPrefill-credit, 0) + decode + a*activeRequests
	if r.Role != Prefill && !config.RouterTrackPrefillTokens && config.OverlapScoreCredit > 0 {
		cost = math.Max(decode-credit, 0) + a*activeRequests
	}
	if len(r.PreferredTaints) > 0 && r.Pin == nil {
		sum := 0.0
		for _, p := range r.PreferredTaints {
			if slices.Contains(w.Worker.Taints, p.Taint) {
				sum += float64(p.Weight)
			}
		}
		cost *= math.Exp(-math.Tanh(sum))
	}
	return cost
}
