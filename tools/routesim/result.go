package routesim

import (
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// Run is the result of an arm on a workload. The warm-up counts only in its own stage.
type Run struct {
	Arm     Arm     `json:"arm"`
	Routers int     `json:"routers"`
	Total   Figures `json:"total"`
	Stages  []Stats `json:"stages"`
	Funnel  Funnel  `json:"funnel"`

	// Imbalance is the most work of any worker, in tokens computed and put out, over the mean.
	Imbalance   float64 `json:"imbalance"`
	Preemptions int     `json:"preemptions"` // the warm-up's too

	byStage [][]*request
	work    []float64
}

// Stats are a stage's figures.
type Stats struct {
	Rate float64 `json:"rate"` // requests per second
	Warm bool    `json:"warm_up,omitempty"`
	Figures
}

// Figures are of some requests. Times are in seconds.
type Figures struct {
	Requests     int     `json:"requests"`
	PromptTokens int     `json:"prompt_tokens"`
	HitRate      float64 `json:"hit_rate"`    // the share of prompt tokens that were not computed
	LoadedRate   float64 `json:"loaded_rate"` // the share of them that came from host memory or the shared store
	TTFTMean     float64 `json:"ttft_mean_s"`
	TTFTRepeats  float64 `json:"ttft_mean_repeats_s"` // mean of requests with a real prefix: see repeatedShare
	TTFTP50      float64 `json:"ttft_p50_s"`
	TTFTP90      float64 `json:"ttft_p90_s"`
	TTFTP99      float64 `json:"ttft_p99_s"`
	E2EP50       float64 `json:"e2e_p50_s"` // until the last token
	E2EP99       float64 `json:"e2e_p99_s"`
	OutputPerS   float64 `json:"output_tokens_per_s"` // from the first request until the last one's end
	PerUser      float64 `json:"tokens_per_s_user"`   // after the first token, the mean over requests
	Seconds      float64 `json:"seconds"`
}

// Funnel has the losses of reuse: shares of all prompt tokens. A share is at most the share before.
type Funnel struct {
	// Offered is the reuse of a cache without bounds. Capacity is the reuse of a single cache with the memory of the whole
	// fleet and knowledge of the future (Belady's rule).
	Offered  float64 `json:"offered"`
	Capacity float64 `json:"capacity"`

	// Perfect is the match of every request on the best worker at the time of the choice, including blocks that earlier
	// requests were about to compute. Chosen is the match on the chosen worker. The part above Capacity could not have
	// lasted and is excluded.
	Perfect float64 `json:"perfect_routing"`
	Chosen  float64 `json:"chosen"`

	// Reused is the match at the start of the prefill.
	Reused float64 `json:"reused"`
}

func newRun(cfg Config) *Run {
	return &Run{Arm: cfg.Arm, Routers: cfg.Routers, byStage: make([][]*request, len(cfg.Workload.Stages)),
		work: make([]float64, cfg.Workers)}
}

func (run *Run) done(r *request) { run.byStage[r.stage] = append(run.byStage[r.stage], r) }

// close computes the figures.
func (run *Run) close(s *sim) {
	var measured []*request
	seconds, best, chosen, reused := 0.0, 0, 0, 0
	for i, list := range run.byStage {
		st := &s.Workload.Stages[i]
		if len(list) == 0 {
			continue
		}
		f := figures(list)
		run.Stages = append(run.Stages, Stats{st.Rate, st.Warm, f})
		if st.Warm {
			continue
		}
		measured = append(measured, list...)
		seconds += f.Seconds
		for _, r := range list {
			run.work[r.worker] += float64(r.prompt.Tokens - r.reused - r.loaded + r.output)
			best, chosen = best+r.best, chosen+r.chosen
			reused += min(r.chosen, r.reused+r.loaded)
		}
	}
	run.Total = figures(measured)
	run.Total.Seconds = seconds
	output := 0
	for _, r := range measured {
		output += r.output
	}
	if seconds > 0 {
		run.Total.OutputPerS = float64(output) / seconds
	}
	most, sum := 0.0, 0.0
	for _, w := range run.work {
		most, sum = max(most, w), sum+w
	}
	run.Imbalance = most / (sum / float64(len(run.work)))
	for _, e := range s.engines {
		run.Preemptions += e.preemptions
	}
	tokens := float64(max(1, run.Total.PromptTokens))
	run.Funnel = Funnel{Perfect: float64(best) / tokens, Chosen: float64(chosen) / tokens,
		Reused: float64(reused) / tokens}
	run.byStage, run.work = nil, nil
}

// bound sets the offered reuse and reduces the other shares to the capacity.
func (f *Funnel) bound(b Bounds) {
	f.Offered, f.Capacity = b.Offered, b.Capacity
	f.Perfect = min(f.Perfect, f.Capacity)
	f.Chosen = min(f.Chosen, f.Perfect)
}

func figures(list []*request) Figures {
	f := Figures{Requests: len(list)}
	if len(list) == 0 {
		return f
	}
	var ttft, whole []float64
	first, last, output, reused, loaded, users, repeats := never, micros(0), 0, 0, 0, 0, 0
	for _, r := range list {
		t := (r.first - r.sent).seconds()
		ttft, whole = append(ttft, t), append(whole, (r.done-r.sent).seconds())
		f.TTFTMean += t / float64(len(list))
		if r.repeats {
			f.TTFTRepeats += t
			repeats++
		}
		f.PromptTokens += r.prompt.Tokens
		reused, loaded, output = reused+r.reused, loaded+r.loaded, output+r.output
		first, last = min(first, r.sent), max(last, r.done)
		if r.output > 1 && r.done > r.first {
			f.PerUser += float64(r.output-1) / (r.done - r.first).seconds()
			users++
		}
	}
	f.PerUser /= float64(max(1, users))
	f.TTFTRepeats /= float64(max(1, repeats))
	f.HitRate = float64(reused+loaded) / float64(f.PromptTokens)
	f.LoadedRate = float64(loaded) / float64(f.PromptTokens)
	slices.Sort(ttft)
	slices.Sort(whole)
	at := func(list []float64, q float64) float64 { return list[int(math.Ceil(q*float64(len(list))))-1] }
	f.TTFTP50, f.TTFTP90, f.TTFTP99 = at(ttft, 0.5), at(ttft, 0.9), at(ttft, 0.99)
	f.E2EP50, f.E2EP99 = at(whole, 0.5), at(whole, 0.99)
	f.Seconds = (last - first).seconds()
	f.OutputPerS = float64(output) / f.Seconds
	return f
}

// Bounds are the limits of any routing, as shares of the measured prompt tokens.
type Bounds struct {
	Offered  float64 `json:"offered"`  // a cache without bounds
	Capacity float64 `json:"capacity"` // a cache with the memory of the fleet that evicts what is needed latest
	LRU      float64 `json:"lru"`      // the same, but that it evicts what was used least recently, as engines do
	Distinct int     `json:"distinct"` // tokens of different blocks: the working set
}

// Bound computes the bounds of a workload on so many workers, in the order of arrival.
func Bound(w *Workload, workers int) Bounds {
	size := w.Engine.BlockSize
	room := workers*((w.Engine.Capacity+w.Engine.Host)/size) + w.Engine.Store/size
	var arrivals []Arrival
	var refs [][]block // by request, the blocks in order
	var usable []int   // number of reusable blocks
	var warm []bool
	tokens := 0
	for _, st := range w.Stages {
		for _, a := range st.Arrivals {
			list := a.Prompt.blocks
			arrivals, refs = append(arrivals, a), append(refs, list)
			usable = append(usable, min(len(list), (a.Prompt.Tokens-1)/size))
			if warm = append(warm, st.Warm); !st.Warm {
				tokens += a.Prompt.Tokens
			}
		}
	}
	// nextUse of a block after request i; len(refs) is never
	last := make([]int32, len(w.names))
	for i := range last {
		last[i] = int32(len(refs))
	}
	after := make([][]int32, len(refs))
	for i := len(refs) - 1; i >= 0; i-- {
		after[i] = make([]int32, len(refs[i]))
		for j, id := range refs[i] {
			after[i][j], last[id] = last[id], int32(i)
		}
	}
	// The cache has the blocks by their next request. Later blocks of a prompt are evicted first.
	needed := make([][]block, len(refs)) // by request
	kept := make([]bool, len(w.names))
	seen := make([]bool, len(w.names))
	held, latest := 0, 0
	offered, allowed := 0, 0
	lru, recent := enginesim.NewCache(room), 0
	for i, a := range arrivals {
		if names := a.Prompt.Names; !warm[i] {
			recent += lru.Hit(names[:usable[i]])
		}
		lru.Use(a.Prompt.Names, nil)
	}
	for i, list := range refs {
		for j, id := range list {
			if seen[id] && j < usable[i] && !warm[i] {
				offered++
			}
			if kept[id] {
				kept[id] = false
				held--
				if j < usable[i] && !warm[i] {
					allowed++
				}
			}
			seen[id] = true
		}
		needed[i] = nil
		for j, id := range list {
			if n := after[i][j]; int(n) < len(refs) {
				needed[n] = append(needed[n], id)
				kept[id] = true
				held++
				latest = max(latest, int(n))
			}
		}
		for held > room {
			if n := len(needed[latest]); n == 0 {
				latest--
			} else {
				kept[needed[latest][n-1]] = false
				needed[latest] = needed[latest][:n-1]
				held--
			}
		}
	}
	share := func(blocks int) float64 { return float64(blocks*size) / float64(max(1, tokens)) }
	return Bounds{share(offered), share(allowed), share(recent), (len(w.names) - 1) * size}
}
