package routing

import (
	"math"
	"math/rand/v2"
	"sync/atomic"
)

// Lowest returns the picker of the policies dynamo, least_load and prefix_only. With a temperature of 0
// (Config.RouterTemperature) the picker chooses the smallest cost, and among equal costs at random. With a temperature
// above 0 the probability of a candidate is proportional to exp(−(cost − min) / ((max − min)·temperature)).
func Lowest() Picker { return lowest{} }

type lowest struct{}

func (lowest) Pick(v *View, cost, probability []float64, rng *rand.Rand) int {
	least, most, ties := cost[0], cost[0], 0
	for _, c := range cost {
		if c < least {
			least, ties = c, 0
		}
		if c == least {
			ties++
		}
		most = max(most, c)
	}
	if v.Config.RouterTemperature > 0 && least < most {
		return soften(least, most, v.Config.RouterTemperature, cost, probability, rng)
	}
	which := 0
	if ties > 1 {
		which = rng.IntN(ties)
	}
	picked := -1
	for i, c := range cost {
		if c != least {
			continue
		}
		probability[i] = 1 / float64(ties)
		if which == 0 {
			picked = i
		}
		which--
	}
	return picked
}

// soften sets the probabilities at a temperature and chooses by them.
func soften(least, most, temperature float64, cost, probability []float64, rng *rand.Rand) int {
	half := 1.0
	if math.IsInf(most-least, 0) {
		half = 0.5 // so that no difference overflows
	}
	span, sum := most*half-least*half, 0.0
	for i, c := range cost {
		probability[i] = 1
		if c != least { // 0 by any temperature
			probability[i] = math.Exp(-((c*half - least*half) / span) / temperature)
		}
		sum += probability[i]
	}
	picked, at := -1, rng.Float64()
	for i := range probability {
		probability[i] /= sum
		if at -= probability[i]; picked < 0 && at < 0 {
			picked = i
		}
	}
	for i := len(cost) - 1; picked < 0; i-- { // rounding has left the draw beyond the last
		if probability[i] > 0 {
			picked = i
		}
	}
	return picked
}

// Uniform returns the picker of the policy random: any candidate with the same probability.
func Uniform() Picker { return uniform{} }

type uniform struct{}

func (uniform) Pick(_ *View, _, probability []float64, rng *rand.Rand) int {
	for i := range probability {
		probability[i] = 1 / float64(len(probability))
	}
	return rng.IntN(len(probability))
}

// RoundRobin returns a picker that chooses the candidates in turn, in the order of the call. All users of the picker
// share one counter.
func RoundRobin() Picker { return new(roundRobin) }

type roundRobin struct{ next atomic.Uint64 }

func (p *roundRobin) Pick(_ *View, _, probability []float64, _ *rand.Rand) int {
	i := int((p.next.Add(1) - 1) % uint64(len(probability)))
	probability[i] = 1
	return i
}
