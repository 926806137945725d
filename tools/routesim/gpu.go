package routesim

import (
	"math"
	"slices"
)

// gpu is a shared GPU of several engines. It divides its time equally among the engines with a running step (processor
// sharing), as a driver with time slices for processes does.
type gpu struct {
	jobs    []job
	last    micros  // end of the accounted time
	loss    float64 // lost share of the rate with more than one job
	version int     // of the scheduled event
}

// job is the step of an engine.
type job struct {
	worker int
	left   float64 // remaining µs of work on an otherwise idle GPU
	until  micros  // the step does not end before
}

// end returns the end of the step if the work on the GPU ends at now.
func (j *job) end(now micros) micros { return max(now, j.until) }

// rate returns the share of the GPU of a job.
func (g *gpu) rate() float64 {
	if n := len(g.jobs); n > 1 {
		return (1 - g.loss) / float64(n)
	}
	return 1
}

// advance accounts the work until now.
func (g *gpu) advance(now micros) {
	done := float64(now-g.last) * g.rate()
	for i := range g.jobs {
		g.jobs[i].left -= done
	}
	g.last = now
}

// start adds a step.
func (g *gpu) start(now micros, worker int, p plan) {
	g.advance(now)
	g.jobs = append(g.jobs, job{worker: worker, left: float64(p.gpu), until: now + p.host})
}

// drop removes the step of a crashed engine.
func (g *gpu) drop(now micros, worker int) {
	g.advance(now)
	g.jobs = slices.DeleteFunc(g.jobs, func(j job) bool { return j.worker == worker })
}

// next is when the first of the steps ends, if none is added.
func (g *gpu) next() micros {
	if len(g.jobs) == 0 {
		return never
	}
	least := math.Inf(1)
	for i := range g.jobs {
		least = min(least, g.jobs[i].left)
	}
	return g.last + micros(math.Ceil(max(0, least)/g.rate()))
}

// finished removes and returns the completed steps.
func (g *gpu) finished(now micros) (done []job) {
	g.advance(now)
	g.jobs = slices.DeleteFunc(g.jobs, func(j job) bool {
		if j.left < 0.5 {
			done = append(done, j)
			return true
		}
		return false
	})
	return done
}
