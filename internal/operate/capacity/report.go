package capacity

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Size is the size of a tier of all workers of a model.
type Size struct {
	Blocks uint64
	Held   bool // some of the blocks are a count of held blocks
}

// Sizes are the sizes of all tiers.
type Sizes [events.NumTiers]Size

const (
	lastShare = 0.3 // of a tier, for [api.CapacityTier].Last
	octaves   = 10  // of the sizes in a report
	perOctave = 4   // sizes

	shown = 0.05 // points: sentences have one decimal
)

// Report describes a curve with the tiers of today.
func Report(model string, c *Curve, sizes Sizes) *api.Capacity {
	out := &api.Capacity{Model: model, BlockSize: c.BlockSize, From: c.From, To: c.To, Blocks: c.Blocks, Rate: c.Rate,
		Samples: c.Samples, Workers: c.Workers, Skipped: c.Skipped, Limit: c.Limit, Routed: c.Routed.Known(),
		Disabled: []string{}, Tiers: []api.CapacityTier{}, Points: []api.CapacityPoint{}, Advice: []string{}}
	rates := &c.Shared
	if out.Routed {
		rates = &c.Routed
	}
	total := uint64(0)
	for _, s := range sizes {
		total += s.Blocks
	}
	sum, at := uint64(0), []uint64{}
	for i, s := range sizes {
		if s.Blocks == 0 {
			continue
		}
		sum += s.Blocks
		at = append(at, sum)
		tier := api.CapacityTier{Tier: events.Tier(i + 1).String(), Blocks: s.Blocks, Source: api.CapacityRegistered,
			Share: rates.At(sum), Doubled: rates.At(total+s.Blocks) - rates.At(total),
			Last:   rates.At(total) - rates.At(total-uint64(lastShare*float64(s.Blocks))),
			Beyond: total+s.Blocks > c.Limit, ShareBound: sum > c.Limit, LastBound: total > c.Limit}
		if s.Held {
			tier.Source = api.CapacityHeld
		}
		out.Tiers = append(out.Tiers, tier)
	}
	for step := range octaves*perOctave + 1 {
		at = append(at, uint64(math.Round(float64(c.Limit)*math.Exp2(float64(step)/perOctave-octaves))))
	}
	slices.Sort(at)
	for _, blocks := range slices.Compact(at) {
		if blocks == 0 || blocks > c.Limit {
			continue
		}
		p := api.CapacityPoint{Blocks: blocks, Shared: c.Shared.At(blocks)}
		if out.Routed {
			routed := c.Routed.At(blocks)
			p.Routed = &routed
		}
		out.Points = append(out.Points, p)
	}
	out.Advice = advice(out, c, total)
	return out
}

// advice returns sentences about a report.
func advice(out *api.Capacity, c *Curve, total uint64) (list []string) {
	list = []string{}
	if c.Limit == 0 || total == 0 {
		return list
	}
	for i := range out.Tiers {
		t := &out.Tiers[i]
		list = append(list, benefit("doubling "+memory(t.Tier), t.Doubled, t.Beyond),
			benefit("the last 30 % of "+memory(t.Tier), t.Last, t.LastBound))
	}
	if total > c.Limit {
		return append(list, fmt.Sprintf("the stored requests cover only %d different blocks: the rates of larger sizes are "+
			"lower bounds; serve more requests first", c.Limit))
	}
	if out.Routed {
		list = append(list, separate(c.Workers, 100*(c.Shared.At(total)-c.Routed.At(total))))
	}
	return list
}

// benefit returns a sentence about the hit rate that some memory adds. bound means that share is a lower bound. A bound
// of 0.0 points is no information.
func benefit(of string, share float64, bound bool) string {
	switch {
	case bound && 100*share < shown:
		return "the benefit of " + of + " is unknown"
	case bound:
		return fmt.Sprintf("%s adds at least %.1f points", of, 100*share)
	}
	return fmt.Sprintf("%s adds %.1f points", of, 100*share)
}

// separate returns a sentence about the points that a shared cache gains over separate caches. Both evict by LRU, so
// separate caches may be better: the requests of a worker may repeat sooner than those of the fleet.
func separate(workers int, gain float64) string {
	switch {
	case gain >= shown:
		return fmt.Sprintf("separate caches of %d workers cost %.1f points against one shared cache", workers, gain)
	case gain <= -shown:
		return fmt.Sprintf("separate caches of %d workers reuse %.1f points more than one shared LRU cache", workers, -gain)
	}
	return fmt.Sprintf("separate caches of %d workers reuse as much as one shared cache", workers)
}

// memory returns the name of a tier in sentences.
func memory(tier string) string {
	switch tier {
	case events.Device.String(), events.Host.String():
		return tier + " memory"
	case events.External.String():
		return "the external store"
	}
	return tier
}
