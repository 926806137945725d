package routesim

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Change is the departure or arrival of a worker during a run.
type Change struct {
	At     float64 `json:"at_s"` // seconds since the beginning of the run
	Worker int     `json:"worker"`
	Up     bool    `json:"up"` // joins with empty memory; false: crashes, and others get its requests
}

// engine returns the constants of a worker's engine: the workload's constants with the worker's speed and capacity.
func (w *Workload) engine(worker int) Engine {
	e := w.Engine
	if n := len(w.Speeds); n > 0 {
		x := w.Speeds[worker%n]
		e.Prefill *= x
		e.StepBase, e.StepPerRequest, e.StepPerToken = e.StepBase/x, e.StepPerRequest/x, e.StepPerToken/x
		e.Attention /= x
	}
	if n := len(w.Capacities); n > 0 {
		e.Capacity = int(math.Round(float64(e.Capacity) * w.Capacities[worker%n]))
	}
	return e
}

// changes schedules the workload's changes. A worker with a join as the first change is absent before.
func (s *sim) changes() error {
	seen := map[int]bool{}
	last := 0.0
	for i := range s.Workload.Changes {
		c := &s.Workload.Changes[i]
		if c.Worker < 0 || c.Worker >= len(s.engines) || !(c.At >= last) {
			return fmt.Errorf("change %d: worker %d of %d at %v s: the worker does not exist, or a later change is before",
				i, c.Worker, len(s.engines), c.At)
		}
		last = c.At
		if !seen[c.Worker] && c.Up {
			s.engines[c.Worker].downTill = never
		}
		seen[c.Worker] = true
		s.queue.push(after(c.At), func() error { return s.change(c) })
	}
	return nil
}

// change lets a worker join or leave.
func (s *sim) change(c *Change) error {
	e := s.engines[c.Worker]
	if c.Up {
		e.downTill = s.now
		return s.resend()
	}
	if err := s.crash(c.Worker); err != nil {
		return err
	}
	e.downTill = never
	return s.resend()
}

// crash empties an engine. resend sends the requests again.
func (s *sim) crash(w int) error {
	s.lost = append(s.lost, s.engines[w].restart()...)
	if s.gpus != nil {
		g := s.gpus[w/s.Workload.Engine.EnginesPerGPU]
		g.drop(s.now, w)
		s.plan(g)
	}
	s.fleet.workerRestarted(w)
	return nil
}

// staffed reports whether a worker is there.
func (s *sim) staffed() bool {
	return slices.ContainsFunc(s.engines, func(e *engine) bool { return s.now >= e.downTill })
}

// resend routes the requests of crashed engines again.
func (s *sim) resend() error {
	lost := s.lost
	s.lost = nil
	for _, r := range lost {
		if r.booked.life > 0 {
			s.fleet.free(r, s.now)
		}
		if r.copies {
			s.fleet.warm.planner.Done(events.SeqHash(r.prompt.Names[len(r.prompt.Names)-1]))
			continue
		}
		r.again()
		if err := s.send(r); err != nil {
			return err
		}
	}
	return nil
}
