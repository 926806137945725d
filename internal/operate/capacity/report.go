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
			Beyond: total+s.Blocks > c.Limit}
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
	for _, t := range out.Tiers {
		bound := ""
		if t.Beyond {
			bound = "at least "
		}
		list = append(list, fmt.Sprintf("doubling %s adds %s%.1f points", memory(t.Tier), bound, 100*t.Doubled),
			fmt.Sprintf("the last 30 %% of %s adds %.1f points", memory(t.Tier), 100*t.Last))
	}
	if out.Routed {
		list = append(list, separate(c.Workers, 100*(c.Shared.At(total)-c.Routed.At(total))))
	}
	if total > c.Limit {
		list = append(list, fmt.Sprintf("the stored requests cover only %d different blocks: the rates of larger sizes are "+
			"lower bounds", c.Limit))
	}
	return list
}

// separate returns a sentence about the points that a shared cache gains over separate caches. Both evict by LRU, so
// separate caches may be better: the requests of a worker may repeat sooner than those of the fleet.
func separate(workers int, gain float64) string {
	const least = 0.05 // points, of which one decimal is shown
	switch {
	case gain >= least:
		return fmt.Sprintf("separate caches of %d workers cost %.1f points against one shared cache", workers, gain)
	case gain <= -least:
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
