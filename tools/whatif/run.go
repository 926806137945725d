package whatif

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/routesim"
)

// Options configures an analysis.
type Options struct {
	Input    *Input
	Selected bool   // Input has the requests of a given model
	Fleet    *Fleet // today's workers
	Changes  Changes
	Routing  routing.Config
	Seeds    int // replays with choices of their own; figures are medians
	Parallel int // replays at a time; 0: 1

	// Progress is called before each replay, from any goroutine. nil disables the call.
	Progress func(what string)
}

// placedArm is the arm of replays with the recorded choices: it observes no caches.
const placedArm = routesim.ArmRandom

// outcome is a replayed request.
type outcome struct {
	ttft, done float64 // seconds: since the arrival, and since the beginning of the replay
	reused     int     // tokens
}

// replays has the workload of all replays.
type replays struct {
	o        *Options
	list     []*request
	arrivals []routesim.Arrival
	base     routesim.Workload
	placed   []int // by request, the index in recorded
	recorded *Fleet
	engine   routesim.Engine
	fitted   bool
	measured int // the first measured request
}

// Run replays the history, today's fleet and the changed fleet.
func Run(ctx context.Context, o Options) (*Report, error) {
	if err := o.Input.severalModels(o.Selected); err != nil {
		return nil, err
	}
	in := o.Input
	if len(in.list) == 0 {
		_, err := in.requests(nil)
		return nil, err
	}
	blockSize := in.list[len(in.list)-1].blockSize
	today, err := o.Fleet.changed(&Changes{}, blockSize)
	if err != nil {
		return nil, err
	}
	changed, err := today.changed(&o.Changes, blockSize)
	if err != nil {
		return nil, err
	}
	most := min(today.smallest(), changed.smallest()) * blockSize
	guessOutputs(in.list, most)
	list, err := in.requests(func(x *request) bool { return x.tokens+x.output <= most })
	if err != nil {
		return nil, err
	}
	policy, err := recordedArm(list)
	if err != nil {
		return nil, err
	}
	changedArm, err := changedPolicy(policy, &o.Changes)
	if err != nil {
		return nil, err
	}
	r := newReplays(&o, list, today)
	o.progress("fit of the engines")
	if err := r.fit(ctx, fitRounds); err != nil {
		return nil, err
	}
	rep := r.report(today, changed, policy, changedArm)
	return rep, r.replay(ctx, rep, today, changed, policy, changedArm)
}

func (o *Options) progress(what string) {
	if o.Progress != nil {
		o.Progress(what)
	}
}

// replay runs the replays and completes the report.
func (r *replays) replay(ctx context.Context, rep *Report, today, changed *Fleet, policy, other routesim.Arm) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(max(1, r.o.Parallel))
	run := func(what string, fleet *Fleet, placed bool, arm routesim.Arm, routers, seed int, to *Figures) {
		g.Go(func() error {
			r.o.progress(what)
			w := r.workload(0, len(r.list), fleet)
			if !placed {
				w.Placed = nil
			}
			out, err := simulate(ctx, w, r.o.Routing, arm, routers, uint64(seed))
			if err == nil {
				*to = r.figures(out, len(fleet.Workers))
			}
			return err
		})
	}
	n := max(1, r.o.Seeds)
	baseline, after := make([]Figures, n), make([]Figures, n)
	run("history", r.recorded, true, placedArm, 1, 1, &rep.History)
	for i := range n {
		run("today's fleet", today, false, policy, 1, i+1, &baseline[i])
		if rep.Changed != nil {
			run("changed fleet", changed, false, other, max(1, r.o.Changes.Routers), i+1, &after[i])
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	rep.Measured = r.measuredFigures(len(r.recorded.Workers))
	rep.Baseline = medians(baseline)
	rep.HistoryError, rep.BaselineError = errorOf(&rep.History, &rep.Measured), errorOf(&rep.Baseline, &rep.Measured)
	if rep.Changed != nil {
		*rep.Changed = medians(after)
		rep.Expected = expected(&rep.Measured, &rep.Baseline, rep.Changed)
	}
	return nil
}

// recordedArm returns the arm of the most frequent recorded policy.
func recordedArm(list []*request) (routesim.Arm, error) {
	count := map[string]int{}
	for _, x := range list {
		count[x.policy]++
	}
	best := ""
	for p, n := range count {
		if n > count[best] || n == count[best] && p < best {
			best = p
		}
	}
	if best == "" {
		best = "kvatlas"
	}
	if !slices.Contains(routing.Policies(), best) {
		return "", fmt.Errorf("the recorded policy %q is unknown to this build, which has %s", best,
			strings.Join(routing.Policies(), ", "))
	}
	return routesim.Arm("policy:" + best), nil
}

// changedPolicy returns the arm of the changed fleet.
func changedPolicy(arm routesim.Arm, c *Changes) (routesim.Arm, error) {
	if c.Policy != "" {
		arm = routesim.Arm(c.Policy)
		if slices.Contains(routing.Policies(), c.Policy) {
			arm = routesim.Arm("policy:" + c.Policy)
		} else if _, err := routesim.ParseArms([]string{c.Policy}); err != nil || c.Policy == "rivals" {
			return "", fmt.Errorf("--policy: there is no %q; there are the policies %s, and the ways of indexer simulate: %v",
				c.Policy, strings.Join(routing.Policies(), ", "), routesim.AllArms())
		}
	}
	if c.Routers > 0 {
		if name, ok := strings.CutPrefix(string(arm), "policy:"); ok {
			arm = routesim.Arm("own:" + name)
		}
		if arm != "" && !arm.Scales() {
			return "", fmt.Errorf("--routers has no effect with --policy %s", c.Policy)
		}
	}
	return arm, nil
}

func newReplays(o *Options, list []*request, today *Fleet) *replays {
	r := &replays{o: o, list: list, measured: len(list) / 2, engine: startEngine(list[:len(list)/2], today)}
	known := map[string]Worker{}
	for _, w := range today.Workers {
		known[w.Name] = w
	}
	r.recorded = &Fleet{}
	index := map[string]int{}
	for i, name := range recordedWorkers(list) {
		w, ok := known[name]
		if !ok {
			w = today.Workers[0]
			w.Name = name
		}
		index[name] = i
		r.recorded.Workers = append(r.recorded.Workers, w)
	}
	n := newNamer(list)
	st := routesim.Stage{}
	for _, x := range list {
		r.placed = append(r.placed, index[x.worker])
		st.Arrivals = append(st.Arrivals, routesim.Arrival{At: float64(x.at-list[0].at) / 1000, Prompt: n.prompt(x),
			Output: x.output, Session: x.session})
	}
	st.Rate = float64(len(list)) / max(1e-3, float64(list[len(list)-1].at-list[0].at)/1000)
	r.base = routesim.FromArrivals("recording", st, r.engine)
	r.arrivals = st.Arrivals
	return r
}

// guessOutputs sets unknown lengths of answers: to the mean of the known lengths, or else, if hardly any is known, to
// the length that fits the duration at the usual pace. A guess does not exceed the memory of a worker.
func guessOutputs(list []*request, most int) {
	sum, n := 0, 0
	for _, x := range list {
		if x.output > 0 && !x.guessed {
			sum, n = sum+x.output, n+1
		}
	}
	pace := routesim.Defaults().StepBase
	for _, x := range list {
		if x.output > 0 && !x.guessed {
			continue
		}
		x.guessed, x.output = true, 1
		if n >= leastLatency {
			x.output = sum / n
		} else if x.first > 0 && x.life > x.first {
			x.output += int(float64(x.life-x.first) / 1000 / pace)
		}
		x.output = max(1, min(x.output, most-x.tokens))
	}
}

// workload returns the requests from from to to on a fleet. The requests are placed if the fleet is the recorded one.
func (r *replays) workload(from, to int, fleet *Fleet) routesim.Workload {
	w := r.base
	w.Engine = r.engine
	fleet.apply(&w)
	w.Stages = []routesim.Stage{{Rate: r.base.Stages[0].Rate}}
	list := slices.Clone(r.arrivals[from:to])
	begin := list[0].At
	for i := range list {
		list[i].At -= begin
	}
	w.Stages[0].Arrivals = list
	w.Placed = map[routesim.Arm][]int{placedArm: r.placed[from:to]}
	return w
}

// eventLag is the usual time from an engine's event to the index, in seconds.
const eventLag = 5e-3

// simulate returns the outcomes of all requests.
func simulate(ctx context.Context, w routesim.Workload, cfg routing.Config, arm routesim.Arm, routers int, seed uint64,
) ([]outcome, error) {
	out := make([]outcome, len(w.Stages[0].Arrivals))
	_, err := routesim.Simulate(ctx, routesim.Config{Workload: w, Arm: arm, Routers: routers, Workers: w.Workers,
		Seed: seed, EventLag: eventLag, Routing: cfg, Done: func(x routesim.Outcome) {
			out[x.Number] = outcome{x.First - x.Sent, x.Done, x.Reused + x.Loaded}
		}})
	return out, err
}

// since returns the time of a request.
func (x *request) since() time.Time { return time.UnixMilli(x.at).UTC() }
