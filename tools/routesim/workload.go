package routesim

import (
	"fmt"
	"math/rand/v2"
	"unsafe"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/trace"
)

// Prompt has the length of a prompt and the names of the full blocks. Names are equal as far as two prompts have a
// common prefix.
type Prompt struct {
	Tokens int
	Names  []events.BlockHash

	blocks []block // the same, as numbers of the workload's
}

// locals returns the blocks' local hashes, which are equal to the names in the simulation.
func (p *Prompt) locals() []events.LocalHash {
	return unsafe.Slice((*events.LocalHash)(unsafe.SliceData(p.Names)), len(p.Names))
}

// Arrival is a request of a stage.
type Arrival struct {
	At     float64 // seconds since the stage's beginning
	Prompt *Prompt
	Output int // tokens

	// Session is the conversation of the request; 0 without a session id.
	Session uint64
}

// Stage is a series of requests at a rate. A stage begins a second after the end of the last request of the stage
// before.
type Stage struct {
	Rate     float64 // requests per second
	Warm     bool    // not measured
	Arrivals []Arrival
}

// Workload is a list of requests, with the fleet of the publication.
type Workload struct {
	Name    string
	Stages  []Stage
	Clients int // requests under way at most, of all users together; 0: no bound

	// Engine and Workers describe the fleet of the publication, or a usual fleet.
	Engine    Engine
	Workers   int
	Published []Published

	// PrefillLoadScale is the published routers' weight of prefixes against load, in the unit of policy dynamo, where the
	// default is 1. TableTokens and TableDepth are the parameters of their approximate router, as in [Config].
	PrefillLoadScale        float64
	TableTokens, TableDepth int

	// Speeds and Capacities are factors of the workers' engines, repeated for further workers; nil: all are 1.
	Speeds, Capacities []float64

	// Changes are departures and arrivals of workers, in order of time.
	Changes []Change

	// Placed has recorded choices by arm: the worker of every request. A recorded choice replaces the arm's own choice.
	Placed map[Arm][]int

	names []events.BlockHash // of the blocks by number
}

// number gives every block of the workload a number.
func (w *Workload) number() {
	known := map[events.BlockHash]block{}
	w.names = []events.BlockHash{0}
	for _, s := range w.Stages {
		for _, a := range s.Arrivals {
			p := a.Prompt
			if p.blocks != nil {
				continue
			}
			p.blocks = make([]block, len(p.Names))
			for i, n := range p.Names {
				b, ok := known[n]
				if !ok {
					b = block(len(w.names))
					known[n] = b
					w.names = append(w.names, n)
				}
				p.blocks[i] = b
			}
		}
	}
}

// Published has measured figures of a publication over all stages except the warm-up.
type Published struct {
	Arm        Arm // the closest arm
	Theirs     string
	OutputPerS float64 // tokens
	TTFTP90    float64 // seconds
	TTFTMean   float64
}

// sharedPrefix is a workload of inference-perf's kind shared_prefix: groups with a system prompt, and prompts of every
// group after the system prompt. All prompts are shuffled once and then repeated in the same order.
type sharedPrefix struct {
	groups, prompts          int
	system, question, output int // tokens
	poisson                  bool
	stages                   [][2]float64 // requests per second, seconds; the first is the warm-up
}

// The routers of the published workloads. Their precise router weighs the present share of a prompt 3 : 2 : 2 against
// two shares of load, far more than Dynamo's default. Their approximate router uses 256 blocks of 64 characters, about
// 16 tokens, and assumes that a worker holds the latest 31,250 of such blocks.
const (
	publishedScale = 8
	publishedTable = 31_250 * 16
	publishedDepth = 256 * 16
)

// The published workloads: github.com/llm-d/llm-d-kv-cache, benchmarking/73-capacity and benchmarking/37-capacity.
var (
	// The published runs requested answers of 1,000 tokens. By the durations of stages, the tokens per second and the
	// published time between two tokens, about 540 tokens arrived. With 1,000 tokens the memory would not have room for
	// the prompts.
	mix73 = sharedPrefix{150, 5, 6000, 1200, 540, true, [][2]float64{{15, 50}, {3, 20}, {10, 20}, {15, 20}, {20, 38},
		{22, 34}, {25, 30}, {30, 25}, {35, 21}, {40, 38}, {43, 36}, {46, 33}, {49, 30}, {52, 29}, {55, 27}, {57, 26},
		{60, 25}}}
	mix37 = sharedPrefix{83, 3, 8000, 1000, 1000, false, [][2]float64{{9, 30}, {3, 210}, {4, 180}, {5, 120}, {6, 120},
		{8, 90}, {10, 70}, {12, 60}, {15, 50}, {20, 50}}}
)

// Capacity73 returns llm-d's mix that needs 73 % of a fleet's memory. With nil rates the mix is as published.
// Otherwise, the warm-up is followed by a stage for every rate with two passes over the prompts. The clients have at
// most 640 running requests, which Little's law gives for the published times and rates.
func Capacity73(seed uint64, blockSize int, rates []float64) Workload {
	w := mix73.workload("capacity-73", seed, blockSize, rates)
	w.Workers, w.Clients = 8, 640
	w.PrefillLoadScale, w.TableTokens, w.TableDepth = publishedScale, publishedTable, publishedDepth
	w.Engine = Defaults()
	w.Engine.BlockSize = blockSize
	w.Published = []Published{
		{ArmExactShared, "precise", 8730.0, 0.542, 0.298},
		{ArmApproxLRU, "approximate", 6944.4, 31.083, 13.316},
		{ArmRandom, "random", 4428.7, 92.551, 45.281},
		{ArmLeastLoad, "load", 4266.4, 94.865, 46.987},
	}
	return w
}

// Capacity37 returns llm-d's mix that needs less than half of a fleet's memory, with rates as for [Capacity73]. The
// prefill rate gives the published saturation of random routing.
func Capacity37(seed uint64, blockSize int, rates []float64) Workload {
	w := mix37.workload("capacity-37", seed, blockSize, rates)
	w.Workers = 4
	w.PrefillLoadScale, w.TableTokens, w.TableDepth = publishedScale, publishedTable, publishedDepth
	w.Engine = Defaults()
	w.Engine.BlockSize = blockSize
	w.Engine.Capacity, w.Engine.Prefill = 461_376, 7_000
	w.Engine.StepBase, w.Engine.StepPerRequest, w.Engine.StepPerToken = 11e-3, 50e-6, 20e-9
	w.Published = []Published{
		{ArmExactShared, "precise", 5650.0, 0.275, 0.193},
		{ArmApproxLRU, "approximate", 5096.2, 7.536, 1.549},
		{ArmLeastLoad, "load", 3018.3, 78.303, 41.058},
		{ArmRandom, "random", 2895.4, 84.623, 42.011},
	}
	return w
}

// Defaults returns the constants of Qwen3-32B on two H100: the published prefill rate and KV memory, and decoding at 30
// to 60 tokens per second and user.
func Defaults() Engine {
	return Engine{BlockSize: 64, Capacity: 307_328, MaxBatchedTokens: 8192, MaxRequests: 256, Prefill: 15_928,
		StepBase: 9.4e-3, StepPerRequest: 100e-6, StepPerToken: 38e-9,
		HostDelay: 1e-3, HostRate: 190_000, PullDelay: 27e-3, PullRate: 235_000}
}

func (m sharedPrefix) workload(name string, seed uint64, blockSize int, rates []float64) Workload {
	rng := rand.New(rand.NewPCG(seed, 0x73686172656470))
	var prompts []*Prompt
	for g := range uint64(m.groups) {
		for q := range uint64(m.prompts) {
			p := &Prompt{Tokens: m.system + m.question}
			for b := range uint64(p.Tokens / blockSize) {
				of := mix(g + 1)
				if (int(b)+1)*blockSize > m.system {
					of = mix(of + q + 1)
				}
				p.Names = append(p.Names, events.BlockHash(mix(of+b)|1))
			}
			prompts = append(prompts, p)
		}
	}
	rng.Shuffle(len(prompts), func(i, j int) { prompts[i], prompts[j] = prompts[j], prompts[i] })
	stages := m.stages
	if rates != nil {
		stages = stages[:1:1]
		for _, r := range rates {
			stages = append(stages, [2]float64{r, float64(2*len(prompts)) / r})
		}
	}
	w := Workload{Name: name}
	next := 0
	for i, s := range stages {
		st := Stage{Rate: s[0], Warm: i == 0}
		n := int(s[0]*s[1] + 0.5)
		at := 0.0
		for range n {
			if m.poisson {
				at += rng.ExpFloat64() / s[0]
			} else {
				at += 1 / s[0]
			}
			st.Arrivals = append(st.Arrivals, Arrival{At: at, Prompt: prompts[next%len(prompts)], Output: m.output})
			next++
		}
		w.Stages = append(w.Stages, st)
	}
	w.number()
	return w
}

// FromTrace returns a workload of a single stage from a trace. rate, in requests per second, scales the times; 0 keeps
// the times.
func FromTrace(name string, reqs []trace.Request, blockSize int, rate float64) (Workload, error) {
	return FromTraceScaled(name, reqs, trace.BlockTokens, blockSize, rate)
}

// FromTraceScaled is [FromTrace] for a trace with hash ids of blockTokens tokens.
func FromTraceScaled(name string, reqs []trace.Request, blockTokens, blockSize int, rate float64) (Workload, error) {
	if blockSize < 1 || blockTokens < blockSize || blockTokens%blockSize != 0 {
		return Workload{}, fmt.Errorf("a hash id of %d tokens has no whole number of blocks of %d tokens", blockTokens,
			blockSize)
	}
	if len(reqs) < 2 {
		return Workload{}, fmt.Errorf("%d requests are too few", len(reqs))
	}
	begin, end := reqs[0].Timestamp, reqs[len(reqs)-1].Timestamp
	for i, r := range reqs[1:] {
		if r.Timestamp < reqs[i].Timestamp {
			return Workload{}, fmt.Errorf("request %d is earlier than the request before", i+1)
		}
	}
	scale, own := 1e-3, float64(len(reqs))/max(1e-3, float64(end-begin)/1000)
	if rate > 0 {
		scale *= own / rate
	} else {
		rate = own
	}
	per := uint64(blockTokens / blockSize)
	st := Stage{Rate: rate}
	ids := sessionsOf(reqs)
	for i, r := range reqs {
		p := &Prompt{Tokens: max(1, r.InputLength)}
		full := min(r.InputLength/blockSize, len(r.HashIDs)*int(per))
		p.Names = make([]events.BlockHash, full)
		for b := range p.Names {
			p.Names[b] = events.BlockHash(mix(r.HashIDs[uint64(b)/per]*per+uint64(b)%per+1) | 1)
		}
		st.Arrivals = append(st.Arrivals, Arrival{At: float64(r.Timestamp-begin) * scale, Prompt: p,
			Output: max(1, r.OutputLength), Session: ids[i]})
	}
	e := Defaults()
	e.BlockSize = blockSize
	return FromArrivals(name, st, e), nil
}

// FromArrivals returns a workload of a single stage, for eight engines. The prompts must not be part of another
// workload.
func FromArrivals(name string, st Stage, e Engine) Workload {
	w := Workload{Name: name, Stages: []Stage{st}, Engine: e, Workers: 8, PrefillLoadScale: 1}
	w.number()
	return w
}

// sharedBy is the least number of different continuations of a system prompt. A prefix with fewer continuations is a
// conversation.
const sharedBy = 5

// sessionsOf returns a session id for every request: the trace's, or otherwise a number for the first block of the
// prompt after the last prefix with [sharedBy] different continuations.
func sessionsOf(reqs []trace.Request) []uint64 {
	next := map[uint64]map[uint64]bool{} // by hash id, the following ids
	for _, r := range reqs {
		for i := 1; i < len(r.HashIDs) && r.SessionID == ""; i++ {
			from := r.HashIDs[i-1]
			if next[from] == nil {
				next[from] = map[uint64]bool{}
			}
			if len(next[from]) < sharedBy {
				next[from][r.HashIDs[i]] = true
			}
		}
	}
	numbers := map[any]uint64{}
	ids := make([]uint64, len(reqs))
	for i, r := range reqs {
		var key any = r.SessionID
		if r.SessionID == "" {
			key = i // a unique prompt
			for j := len(r.HashIDs) - 1; j >= 0; j-- {
				if j == 0 || len(next[r.HashIDs[j-1]]) >= sharedBy {
					key = r.HashIDs[j]
					break
				}
			}
		}
		if numbers[key] == 0 {
			numbers[key] = uint64(len(numbers)) + 1
		}
		ids[i] = numbers[key]
	}
	return ids
}

// mix is SplitMix64's step for a state of x.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}
