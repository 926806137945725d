package routesim

import (
	"context"
	"math"
)

// constants returns the constants that a fit changes.
func (e *Engine) constants() []*float64 {
	return []*float64{&e.Prefill, &e.StepBase, &e.StepPerRequest, &e.StepPerToken, &e.Attention, &e.PrefillHost,
		&e.ShareLoss}
}

// fitted reports whether the constants of [VLLMOnH200] were fitted to an arm of the measured run. The other arms test
// the fit.
func (x *MeasuredArm) fitted() bool {
	slow := x.Rate < 30
	return x.Arm == ArmRandom || x.Arm == ArmSticky && slow || x.Arm == defaultArm && !slow
}

// Fit changes the constants of an engine to bring the simulation with the recorded choices near the measured TTFT. use
// selects the arms. rounds and the results are as in [Descend].
func (m *Measured) Fit(ctx context.Context, e Engine, rounds int, use func(*MeasuredArm) bool) (Engine, float64,
	error) {
	return Descend(e, (*Engine).constants, rounds, func(try Engine) (float64, error) { return m.misfit(ctx, try, use) })
}

// Descend changes the given constants of an engine to reduce the error that misfit returns. It is a coordinate descent
// with the given number of rounds, and returns the remaining error. A constant of 0 stays.
func Descend(e Engine, constants func(*Engine) []*float64, rounds int, misfit func(Engine) (float64, error)) (Engine,
	float64, error) {
	best, err := misfit(e)
	step := make([]float64, len(constants(&e)))
	for i := range step {
		step[i] = 0.15
	}
	for round := 0; round < rounds && err == nil; round++ {
		for i := range step {
			better := false
			for _, x := range []float64{1 + step[i], 1 - step[i]} {
				try := e
				if *constants(&try)[i] *= x; try == e {
					continue
				}
				left, err := misfit(try)
				if err != nil {
					return e, best, err
				}
				if left < best {
					best, e, better = left, try, true
					break
				}
			}
			if better {
				step[i] = min(0.4, 1.3*step[i])
			} else {
				step[i] /= 2
			}
		}
	}
	return e, best, err
}

// misfit is the sum of squared logarithms of simulated over measured times. The duration of a short request on an idle
// engine counts too, because under load queueing hides the duration.
func (m *Measured) misfit(ctx context.Context, e Engine, use func(*MeasuredArm) bool) (sum float64, err error) {
	add := func(weight, ours, measured float64) {
		d := math.Log(ours / measured)
		sum += weight * d * d
	}
	for i := range m.Arms {
		x := &m.Arms[i]
		if !use(x) {
			continue
		}
		c := m.Config(x, 1, true)
		c.Workload.Engine = e
		run, err := Simulate(ctx, c)
		if err != nil {
			return 0, err
		}
		f := &run.Total
		add(1, 1000*f.TTFTMean, x.TTFTMean)
		add(1, 1000*f.TTFTP50, x.TTFTP50)
		add(1, 1000*f.TTFTP90, x.TTFTP90)
		add(1, 1000*f.TTFTP99, x.TTFTP99)
		add(0.3, 1000*f.E2EP50, x.E2EP50)
		add(0.3, 1000*f.E2EP99, x.E2EP99)
	}
	add(2, 1000*(e.Delay+e.PrefillHost+e.Reply), m.aloneTTFT())
	return sum, nil
}

// shortPrompt is the greatest number of computed tokens of a request with a constant duration on an idle engine.
const shortPrompt = 1700

// aloneTTFT is the median TTFT of short requests in sequence, in ms.
func (m *Measured) aloneTTFT() float64 {
	var list []Figures
	for _, r := range m.Alone {
		if r[0]-r[1] < shortPrompt {
			list = append(list, Figures{TTFTP50: r[2]})
		}
	}
	return median(list, func(f *Figures) float64 { return f.TTFTP50 })
}
