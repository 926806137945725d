package routesim

import (
	"math"
	"slices"
)

// gpu is a GPU that several engines share. It divides its time equally among the engines that have a step under way
// (processor sharing), as a driver does that lets processes take turns.
type gpu struct {
	jobs    []job
	last    micros  // the time up to which the jobs' work is counted
	loss    float64 // the share of the rate that is lost while more than one job is under way
	version int     // of the event that is planned
}

// job is the step of one engine.
type job struct {
	worker int
	left   float64 // µs of work on a GPU that does nothing else
	until  micros  // the step does not end before
}

// end is when the step ends, if its work on the GPU ends now.
func (j *job) end(now micros) micros { return max(now, j.until) }

// rate is the share of the GPU that each job has.
func (g *gpu) rate() float64 {
	if n := len(g.jobs); n > 1 {
		return (1 - g.loss) / float64(n)
	}
	return 1
}

// advance counts the work that was done until now.
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

// drop removes the step of an engine that crashed.
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

// finished removes and returns the steps whose work is done.
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
