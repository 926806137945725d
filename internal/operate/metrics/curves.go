package metrics

import "github.com/kvatlas/kvatlas/pkg/api"

// curves adds the metrics of capacity curves.
func (to emitter) curves(of map[string][]api.CapacityTier) {
	for model, tiers := range of {
		for i := range tiers {
			t := &tiers[i]
			labels := []string{"model", model, "tier", t.Tier}
			to.gauge("kvatlas_capacity_hit_ratio", "Hit rate of prompts in this tier and the tiers before it, by reuse "+
				"distances of sampled blocks; a lower bound while requests have few different blocks. Only on the node with "+
				"the first name, while all nodes have samples.", t.Share, labels...)
			if t.LastBound {
				continue // both differences are unknown
			}
			to.gauge("kvatlas_capacity_doubled_gain_ratio", "Gain of the hit rate of all tiers if this tier had twice the "+
				"size; a lower bound while requests have few different blocks, and absent with fewer.", t.Doubled, labels...)
			to.gauge("kvatlas_capacity_last_loss_ratio", "Loss of the hit rate of all tiers if this tier lacked 30 % of its "+
				"size; absent while requests have too few different blocks.", t.Last, labels...)
		}
	}
}
