package routing

import (
	"math"
	"slices"
)

// Estimate has the cached and the new part of a request at a candidate. The scorers of the policy have no influence on
// an estimate.
type Estimate struct {
	EffectiveOverlap       float64 `json:"effective_overlap" msgpack:"effective_overlap"` // blocks, tiers weighted
	CachedTokens           uint64  `json:"cached_tokens" msgpack:"cached_tokens"`
	EffectivePrefillTokens uint64  `json:"effective_prefill_tokens" msgpack:"effective_prefill_tokens"`
	PotentialDecodeBlocks  uint64  `json:"potential_decode_blocks" msgpack:"potential_decode_blocks"`
}

// Estimate returns the estimate of the request at c.
func (v *View) Estimate(c *Candidate) Estimate {
	e := Estimate{EffectiveOverlap: v.effectiveOverlap(c)}
	e.CachedTokens = v.cachedTokens(e.EffectiveOverlap)
	if e.EffectivePrefillTokens = v.Request.ISL - min(e.CachedTokens, v.Request.ISL); v.prefill != nil {
		e.EffectivePrefillTokens = v.prefill(v, c)
	}
	blocks := v.Request.RequestBlocks()
	e.PotentialDecodeBlocks = decodeBlocks(c) + blocks - min(v.Request.Blocks, blocks)
	return e
}

func (v *View) effectiveOverlap(c *Candidate) float64 {
	if v.untiered {
		return c.Overlap
	}
	return float64(c.Device) + v.Config.HostCacheHitWeight*float64(c.Host) + v.Config.DiskCacheHitWeight*float64(c.Disk)
}

func (v *View) cachedTokens(overlap float64) uint64 {
	return roundBlocks(overlap * float64(v.Request.BlockSize))
}

// roundBlocks rounds half away from zero. Negative numbers and NaN become 0.
func roundBlocks(x float64) uint64 {
	if !(x > 0) {
		return 0
	}
	return uint64(math.Round(x))
}

// decodeBlocks returns the number of blocks of all requests at c, with the whole blocks of the new request.
func decodeBlocks(c *Candidate) uint64 {
	if !c.HasLoad {
		return 0
	}
	return c.ActiveBlocks + c.NewBlocks
}

func activePrefill(c *Candidate) uint64 {
	if !c.HasLoad {
		return 0
	}
	return c.ActivePrefillTokens
}

// Terms are the parts of a candidate's cost by the policy dynamo, in blocks unless a field states another unit. The
// comment of the package has the formula.
type Terms struct {
	RawPrefill     float64 `json:"raw_prefill" msgpack:"raw_prefill"`
	Decay          float64 `json:"decay" msgpack:"decay"` // a factor
	DeviceCredit   float64 `json:"device_credit" msgpack:"device_credit"`
	GuessedBlocks  uint32  `json:"guessed_blocks,omitempty" msgpack:"guessed_blocks,omitempty"` // without confirmation
	HostCredit     float64 `json:"host_credit" msgpack:"host_credit"`
	DiskCredit     float64 `json:"disk_credit" msgpack:"disk_credit"`
	SharedBlocks   uint32  `json:"shared_blocks" msgpack:"shared_blocks"` // before the multiplier
	SharedCredit   float64 `json:"shared_credit" msgpack:"shared_credit"`
	Prefill        float64 `json:"prefill" msgpack:"prefill"` // s·max(raw_prefill − credits, 0)
	Decode         float64 `json:"decode" msgpack:"decode"`
	ActiveRequests float64 `json:"active_requests" msgpack:"active_requests"`
	TaintFactor    float64 `json:"taint_factor" msgpack:"taint_factor"`

	// DecodeForm: the cost has its second form. Credits are subtracted from Decode, and Prefill is 0.
	DecodeForm bool `json:"decode_form,omitempty" msgpack:"decode_form,omitempty"`
}

// DynamoCost returns the scorer of the policy dynamo.
func DynamoCost() Scorer { return dynamoCost{} }

type dynamoCost struct{}

func (dynamoCost) Name() string { return "dynamo" }

func (dynamoCost) Score(v *View, cost []float64) {
	r, c := v.Request, &v.Config
	track := c.RouterTrackPrefillTokens
	decodeForm := !track && c.OverlapScoreCredit > 0 && r.Role != Prefill
	blockSize, requestBlocks := float64(r.BlockSize), float64(max(r.RequestBlocks(), 1))
	decays := track && c.OverlapScoreCreditDecay > 0
	least := uint64(math.MaxUint64)
	if decays {
		for i := range v.Len() {
			least = min(least, activePrefill(v.At(i)))
		}
	}
	prefers := v.weighsTaints()
	if r.Explain {
		v.terms = make([]Terms, len(cost))
	}
	found, tokensOf := -1.0, uint64(0) // the last overlap in tokens: many candidates have the same
	for i, k := range v.kept {
		w := &v.candidates[k]
		overlap := v.effectiveOverlap(w)
		device := float64(w.Device)
		if v.untiered {
			device = overlap
		}
		decay := 1.0
		if decays {
			excess := float64(activePrefill(w)-least) / blockSize
			decay = 1 / (1 + c.OverlapScoreCreditDecay*(excess/requestBlocks))
		}
		shared := uint32(0)
		if c.SharedCacheMultiplier > 0 {
			shared = v.SharedBlocks(w)
		}
		deviceCredit := c.OverlapScoreCredit * decay * device
		hostCredit := c.HostCacheHitWeight * float64(w.Host)
		diskCredit := c.DiskCacheHitWeight * float64(w.Disk)
		sharedCredit := c.SharedCacheMultiplier * float64(shared)
		credit := deviceCredit + hostCredit + diskCredit + sharedCredit
		decode, requests := float64(decodeBlocks(w)), 0.0
		if w.HasLoad {
			requests = c.DecodeActiveRequestWeight * float64(w.ActiveRequests)
		}
		rawPrefill := 0.0
		if track {
			tokens := r.ISL
			if w.HasLoad {
				if overlap != found {
					found, tokensOf = overlap, max(r.ISL, v.cachedTokens(overlap)) // cached and uncached tokens
				}
				tokens = w.ActivePrefillTokens + tokensOf
			}
			rawPrefill = float64(tokens) / blockSize
		}
		prefill := 0.0
		if decodeForm {
			cost[i] = atLeast0(decode-credit) + requests
		} else {
			prefill = c.PrefillLoadScale * atLeast0(rawPrefill-credit)
			cost[i] = prefill + decode + requests
		}
		factor := 1.0
		if prefers {
			factor = taintFactor(r.PreferredTaints, w.Worker.Taints)
			cost[i] *= factor
		}
		if v.terms != nil {
			v.terms[i] = Terms{
				RawPrefill: rawPrefill, Decay: decay, DeviceCredit: deviceCredit, GuessedBlocks: w.Guessed,
				HostCredit: hostCredit, DiskCredit: diskCredit, SharedBlocks: shared, SharedCredit: sharedCredit, Prefill: prefill,
				Decode: decode, ActiveRequests: requests, TaintFactor: factor, DecodeForm: decodeForm,
			}
		}
	}
}

// atLeast0 is max(x, 0) without the builtin's care for negative zeros, which no difference of positive numbers is.
func atLeast0(x float64) float64 {
	if x < 0 {
		return 0
	}
	return x
}

// taintFactor returns the factor of a worker's cost: below 1 for preferred taints, above 1 for avoided ones.
func taintFactor(preferred []TaintWeight, has []string) float64 {
	sum := 0.0
	for i := range preferred {
		if slices.Contains(has, preferred[i].Taint) {
			sum += float64(preferred[i].Weight)
		}
	}
	return math.Exp(-math.Tanh(sum))
}
