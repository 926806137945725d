package routesim

import "slices"

// llmd is llm-d's endpoint picker with the scorers and weights of its charts: prefix 3, queue 2, KV cache utilization
// 2, and the picker max-score. The queues and the KV cache come from the engines' metrics. The prefixes come from
// events, or from a table for every worker with the routed prompts. A table (prefix-cache-scorer) has 256 blocks of 64
// characters for a prompt, and 31,250 blocks for a worker.
type llmd struct {
	f       *fleet
	tables  []*pool // nil: prefixes come from events
	scraped micros
	queue   []int     // waiting requests by worker
	usage   []float64 // share of the KV cache in use
	scores  []float64
}

const (
	prefixWeight, queueWeight, usageWeight = 3, 2, 2

	scrapeEvery = 50_000     // µs
	llmdDepth   = 256 * 16   // tokens; 64 characters are some 16 tokens
	llmdTable   = 31250 * 16 // tokens
)

func newLLMD(f *fleet) rule {
	x := &llmd{f: f, scraped: -scrapeEvery, queue: make([]int, len(f.engines)), usage: make([]float64, len(f.engines))}
	if f.way.knows != knowsIndex {
		x.tables = make([]*pool, len(f.engines))
		for w := range x.tables {
			x.left(w)
		}
	}
	return x
}

func (x *llmd) left(worker int) {
	if x.tables != nil {
		x.tables[worker] = newPool(llmdTable/x.f.cfg.BlockSize, x.f.blocks, nil)
	}
}

func (x *llmd) choose(_ *router, r *request, live []int, now micros) int {
	if now >= x.scraped+scrapeEvery {
		x.scraped = now
		for w, e := range x.f.engines {
			x.queue[w] = len(e.waiting)
			x.usage[w] = float64(e.pool.pinned) / float64(e.pool.capacity())
		}
	}
	blocks := r.prompt.blocks
	x.scores = append(x.scores[:0], make([]float64, len(x.f.engines))...)
	if x.tables == nil {
		x.precise(r, live)
	} else {
		blocks = blocks[:min(len(blocks), llmdDepth/x.f.cfg.BlockSize)]
		for _, w := range live {
			if len(blocks) > 0 {
				x.scores[w] = float64(prefix(blocks, x.tables[w].held)) / float64(len(blocks))
			}
		}
	}
	low, high := x.queue[live[0]], x.queue[live[0]]
	for _, w := range live {
		low, high = min(low, x.queue[w]), max(high, x.queue[w])
	}
	chosen := x.f.least(live, func(w int) float64 {
		queue := 1.0
		if high > low {
			queue = float64(high-x.queue[w]) / float64(high-low)
		}
		return -(prefixWeight*x.scores[w] + queueWeight*queue + usageWeight*(1-x.usage[w]))
	})
	if x.tables != nil {
		x.remember(x.tables[chosen], blocks)
	}
	return chosen
}

// precise scores prefixes from events, as precise-prefix-cache-scorer does. Of the workers with a block of the prompt,
// the longest prefix scores 1 and the shortest 0. Equal prefixes score 1.
func (x *llmd) precise(r *request, live []int) {
	x.f.index.Match(0, r.prompt.locals(), nil, &x.f.answer)
	var depths []uint32
	for _, w := range live {
		if d, _ := x.f.indexed(w); d > 0 {
			depths = append(depths, d)
		}
	}
	if depths == nil {
		return
	}
	low, high := slices.Min(depths), slices.Max(depths)
	for _, w := range live {
		switch d, _ := x.f.indexed(w); {
		case d == 0:
		case low == high:
			x.scores[w] = 1
		default:
			x.scores[w] = float64(d-low) / float64(high-low)
		}
	}
}

// remember records the blocks sent to a worker.
func (x *llmd) remember(t *pool, blocks []block) {
	var slots []int32
	for _, b := range blocks {
		i, ok := t.pin(b)
		if !ok {
			i, _ = t.take(b)
		}
		slots = append(slots, i)
	}
	t.release(slots)
}

// greedy is an oracle: it chooses the worker with the earliest first token of the current request, from the true state
// of the engines and the durations of steps. It ignores later requests, so it is no bound for any figure.
type greedy struct{ f *fleet }

func newGreedy(f *fleet) rule { return greedy{f} }

func (greedy) left(int) {}

func (x greedy) choose(_ *router, r *request, live []int, now micros) int {
	return x.f.least(live, func(w int) float64 { return x.f.engines[w].forecast(r.prompt, now) })
}
