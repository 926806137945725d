package whatif

import (
	"context"
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/tools/routesim"
)

// fitRequests bounds the requests of a replay in the fit. The first half of them only fills the caches.
const fitRequests = 8000

// fitRounds is the number of rounds of the fit.
const fitRounds = 6

// startEngine returns engine constants from requests on idle workers and from the pace of answers, as a start of the
// fit. Constants without evidence are those of [routesim.Defaults].
func startEngine(list []*request, fleet *Fleet) routesim.Engine {
	e := routesim.Defaults()
	e.BlockSize = list[0].blockSize
	if n := fleet.batchTokens(); n > 0 {
		e.MaxBatchedTokens = n
	}
	e.MaxBatchedTokens = max(e.MaxBatchedTokens, e.BlockSize)
	fixed, rate := idleLine(list)
	if rate > 0 {
		e.Prefill = rate
		e.PrefillHost, e.Reply = fixed/2, fixed/2
		tokens := 0.0
		for _, x := range list {
			tokens += float64(x.tokens) / float64(len(list))
		}
		e.Attention = 0.02 / (rate * max(1, tokens))
	}
	var paces []float64
	for _, x := range list {
		if x.output > 1 && x.first > 0 && x.life > x.first {
			paces = append(paces, float64(x.life-x.first)/1000/float64(x.output-1))
		}
	}
	if len(paces) >= leastLatency {
		slices.Sort(paces)
		e.StepBase = max(1e-5, paces[len(paces)/4])
	} else if rate > 0 {
		e.StepBase = max(1e-5, fixed/4)
	}
	e.StepPerRequest = e.StepBase / 100
	return e
}

// idleLine fits TTFT = fixed + computed / rate, in seconds, by least squares over the requests on idle workers. The
// rate is 0 without evidence.
func idleLine(list []*request) (fixed, rate float64) {
	var xs, ys []float64
	for _, idle := range []bool{true, false} {
		xs, ys = nil, nil
		for _, x := range list {
			if x.first > 0 && (x.idle || !idle) {
				xs, ys = append(xs, float64(max(1, x.tokens-x.cached))), append(ys, float64(x.first)/1000)
			}
		}
		if len(xs) >= leastLatency {
			break
		}
	}
	if len(xs) < leastLatency {
		return 0, 0
	}
	n, sx, sy, sxx, sxy := float64(len(xs)), 0.0, 0.0, 0.0, 0.0
	for i := range xs {
		sx, sy, sxx, sxy = sx+xs[i], sy+ys[i], sxx+xs[i]*xs[i], sxy+xs[i]*ys[i]
	}
	slope := (n*sxy - sx*sy) / (n*sxx - sx*sx)
	if fixed = (sy - slope*sx) / n; !(slope > 0) || fixed < 0 { // no line: all time is the computation's
		return 0, sx / sy
	}
	return fixed, 1 / slope
}

// constants are the constants that the fit changes.
func constants(e *routesim.Engine) []*float64 {
	return []*float64{&e.Prefill, &e.StepBase, &e.StepPerRequest, &e.Attention, &e.PrefillHost, &e.Reply}
}

// fit fits the constants of the engines to the recorded latencies, with each request on the recorded worker.
func (r *replays) fit(ctx context.Context, rounds int) error {
	half := r.list[:len(r.list)/2]
	half = half[max(0, len(half)-fitRequests):]
	from := len(r.list)/2 - len(half)
	known := 0
	for _, x := range half[len(half)/2:] {
		if x.first > 0 {
			known++
		}
	}
	if known < leastLatency {
		return nil
	}
	var err error
	r.engine, _, err = routesim.Descend(r.engine, constants, rounds, func(e routesim.Engine) (float64, error) {
		w := r.workload(from, from+len(half), r.recorded)
		keep := w.Engine
		w.Engine = e
		w.Engine.Capacity, w.Engine.Host = keep.Capacity, keep.Host
		out, err := simulate(ctx, w, r.o.Routing, placedArm, 1, 1)
		if err != nil {
			return 0, err
		}
		return misfit(half[len(half)/2:], out[len(half)/2:]), nil
	})
	r.fitted = err == nil
	return err
}

// ttftGrain is added to both times before their comparison: a fit of shorter times has no use.
const ttftGrain = 0.005 // seconds

// misfit is the mean of the squared logarithms of simulated over recorded TTFT, with the same of the mean and p99.
func misfit(list []*request, out []outcome) float64 {
	var ours, theirs []float64
	sum := 0.0
	add := func(a, b, weight float64) {
		d := math.Log((a + ttftGrain) / (b + ttftGrain))
		sum += weight * d * d
	}
	for i, x := range list {
		if x.first == 0 {
			continue
		}
		a, b := out[i].ttft, float64(x.first)/1000
		ours, theirs = append(ours, a), append(theirs, b)
		add(a, b, 1)
	}
	sum /= float64(len(ours))
	add(mean(ours), mean(theirs), 1)
	add(quantile(ours, 0.5), quantile(theirs, 0.5), 0.5)
	add(quantile(ours, 0.99), quantile(theirs, 0.99), 0.5)
	return sum
}

func mean(list []float64) float64 {
	sum := 0.0
	for _, x := range list {
		sum += x
	}
	return sum / float64(max(1, len(list)))
}

// quantile sorts a list and returns a quantile; 0 of an empty list.
func quantile(list []float64, q float64) float64 {
	if len(list) == 0 {
		return 0
	}
	slices.Sort(list)
	return list[max(0, int(math.Ceil(q*float64(len(list))))-1)]
}
