package routesim

import (
	"context"
	"fmt"
	"math"

	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Options configures a comparison of all arms with all relevant numbers of routers, on every workload and at every
// ratio of memory to working set.
type Options struct {
	Workloads []Workload // equal apart from the rate
	Workers   int        // 0: the workload's
	Arms      []Arm
	Routers   []int
	Ratios    []float64 // ratios of the fleet's KV memory to the working set; nil: the engine's capacity
	Disturb   []Disturbance
	Seed      uint64
	Routing   routing.Config

	// TableTokens and TableDepth are as in [Config]; below 0: the workload's.
	TableTokens, TableDepth int

	// Progress is called with the current work and the number of completed requests of all runs. nil disables the call.
	Progress func(what string, done, of int)
}

// Report is the result of a comparison.
type Report struct {
	Workload   string         `json:"workload"`
	Workers    int            `json:"workers"`
	Seed       uint64         `json:"seed"`
	Engine     Engine         `json:"engine"`
	Routing    routing.Config `json:"routing"`
	Disturb    []Disturbance  `json:"disturb,omitempty"`
	WorkingSet int            `json:"working_set_tokens"`
	Points     []Point        `json:"points"`
	Published  []Beside       `json:"published,omitempty"`
}

// Point has all arms at a load and an amount of memory.
type Point struct {
	Rate  float64 `json:"rate,omitempty"` // of a workload of one stage; else see Runs[i].Stages
	Ratio float64 `json:"capacity_by_working_set"`
	Bound Bounds  `json:"bounds"`
	Runs  []*Run  `json:"runs"`
	Exact []Worth `json:"exactness,omitempty"`
}

// Worth is the gain of exact shared knowledge over guesses.
type Worth struct {
	Against     Arm     `json:"against"`
	Routers     int     `json:"routers"`
	HitRate     float64 `json:"hit_rate_gain"`     // a difference of shares
	TTFTP90     float64 `json:"ttft_p90_saved_s"`  // may be negative
	OutputShare float64 `json:"output_rate_ratio"` // output tokens per second by those of the other
	Nothing     bool    `json:"buys_nothing"`      // less than a hundredth in all three
}

// Beside is a published figure and ours.
type Beside struct {
	Theirs     string     `json:"theirs"`
	Arm        Arm        `json:"arm"`
	OutputPerS [2]float64 `json:"output_tokens_per_s"` // published, ours
	TTFTP90    [2]float64 `json:"ttft_p90_s"`
	TTFTMean   [2]float64 `json:"ttft_mean_s"`
}

// Compare runs a comparison, in sequence.
func Compare(ctx context.Context, o Options) (*Report, error) {
	first := &o.Workloads[0]
	rep := &Report{Workload: first.Name, Workers: o.Workers, Seed: o.Seed, Engine: first.Engine, Routing: o.Routing,
		Disturb: o.Disturb}
	if rep.Workers == 0 {
		rep.Workers = first.Workers
	}
	rep.WorkingSet = (len(first.names) - 1) * first.Engine.BlockSize
	ratios := o.Ratios
	if ratios == nil {
		ratios = []float64{float64(rep.Workers*first.Engine.Capacity) / float64(max(1, rep.WorkingSet))}
	}
	of, before := 0, 0
	for i := range o.Workloads {
		of += o.Workloads[i].requests() * len(ratios) * o.runs()
	}
	for i := range o.Workloads {
		for _, ratio := range ratios {
			w := o.Workloads[i]
			if o.Ratios != nil {
				w.Engine.Capacity = int(math.Round(ratio * float64(rep.WorkingSet) / float64(rep.Workers)))
			}
			if o.TableTokens >= 0 {
				w.TableTokens = o.TableTokens
			}
			if o.TableDepth >= 0 {
				w.TableDepth = o.TableDepth
			}
			p := Point{Ratio: ratio}
			if len(w.Stages) == 1 {
				p.Rate = w.Stages[0].Rate
			}
			p.Bound = Bound(&w, rep.Workers)
			for _, arm := range o.Arms {
				for _, routers := range o.Routers {
					if !arm.Scales() && routers != o.Routers[0] {
						continue
					}
					cfg := Config{Workload: w, Arm: arm, Routers: routers, Workers: rep.Workers, Seed: o.Seed,
						Disturb: o.Disturb, EventLag: 5e-3, Routing: o.Routing, TableTokens: w.TableTokens,
						TableDepth: w.TableDepth}
					if !arm.Scales() {
						cfg.Routers = 1
					}
					if o.Progress != nil {
						what := string(arm)
						if arm.Scales() {
							what = fmt.Sprintf("%s, routers: %d", arm, routers)
						}
						cfg.Progress = func(done, _ int) { o.Progress(what, before+done, of) }
					}
					run, err := Simulate(ctx, cfg)
					if err != nil {
						return nil, err
					}
					run.Funnel.bound(p.Bound)
					before += w.requests()
					p.Runs = append(p.Runs, run)
				}
			}
			p.worth()
			rep.Points = append(rep.Points, p)
		}
	}
	if len(o.Workloads) == 1 && o.Ratios == nil && rep.Workers == first.Workers {
		rep.beside(first.Published)
	}
	return rep, nil
}

// runs returns the number of runs of a workload.
func (o *Options) runs() (n int) {
	for _, a := range o.Arms {
		if a.Scales() {
			n += len(o.Routers)
		} else {
			n++
		}
	}
	return n
}

func (w *Workload) requests() (n int) {
	for _, s := range w.Stages {
		n += len(s.Arrivals)
	}
	return n
}

// worth compares exact shared knowledge with every kind of guess.
func (p *Point) worth() {
	for _, exact := range p.Runs {
		if exact.Arm != ArmExactShared {
			continue
		}
		for _, r := range p.Runs {
			if !r.Arm.tables() || r.Routers != exact.Routers {
				continue
			}
			x := Worth{Against: r.Arm, Routers: r.Routers, HitRate: exact.Total.HitRate - r.Total.HitRate,
				TTFTP90:     r.Total.TTFTP90 - exact.Total.TTFTP90,
				OutputShare: exact.Total.OutputPerS / r.Total.OutputPerS}
			x.Nothing = x.HitRate < 0.01 && x.OutputShare < 1.01 && x.TTFTP90 < max(0.01, 0.1*r.Total.TTFTP90)
			p.Exact = append(p.Exact, x)
		}
	}
}

// beside adds published figures to the first run of the same arm.
func (rep *Report) beside(published []Published) {
	for _, theirs := range published {
		for _, r := range rep.Points[0].Runs {
			if r.Arm == theirs.Arm {
				rep.Published = append(rep.Published, Beside{theirs.Theirs, r.Arm,
					[2]float64{theirs.OutputPerS, r.Total.OutputPerS}, [2]float64{theirs.TTFTP90, r.Total.TTFTP90},
					[2]float64{theirs.TTFTMean, r.Total.TTFTMean}})
				break
			}
		}
	}
}
