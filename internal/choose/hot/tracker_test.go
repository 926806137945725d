package hot

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

const blockSize = 16

// path returns the sequence hashes of a prompt: a path in a tree with few branches.
func path(rng *rand.Rand, blocks int) (seq []events.SeqHash, locals []events.LocalHash) {
	hash := uint64(1)
	for i := range blocks {
		if i%5 == 0 {
			hash = hash*31 + uint64(rng.IntN(2))
		}
		hash = hash*1_000_003 + 7
		seq, locals = append(seq, events.SeqHash(hash)), append(locals, events.LocalHash(hash))
	}
	return seq, locals
}

// ranks returns idle workers with random loads and depths.
func ranks(rng *rand.Rand, n, blocks int) (list []routing.Candidate) {
	for i := range n {
		list = append(list, routing.Candidate{
			Worker: &routing.Worker{ID: events.WorkerID(fmt.Sprint("w", i)), State: routing.Schedulable}, HasLoad: true,
			Device: uint32(rng.IntN(blocks + 1)), ActivePrefillTokens: uint64(rng.IntN(8000)), PrefillRequests: 1,
			ActiveRequests: 1, NewBlocks: uint64(blocks), PrefillRate: 2 + rng.Float64()})
	}
	return list
}

// TestTracker compares the weights and counts of a tracker with direct calculations over all workers.
func TestTracker(t *testing.T) {
	for round := range uint64(testkit.Rounds(60)) {
		rng := rand.New(rand.NewPCG(*seed, round))
		tracker := New(Config{Entries: 1 << 16, HalfLife: time.Minute, MinTokens: 2 * blockSize})
		twin := &exact{halfLife: time.Minute, additions: map[events.SeqHash][]addition{}}
		requests := map[events.SeqHash]float64{} // since the first addition, without decay
		now := time.Duration(0)
		for range 60 {
			now += time.Millisecond
			blocks := 1 + rng.IntN(40)
			seq, locals := path(rng, blocks)
			list := ranks(rng, 1+rng.IntN(sampledRanks), blocks)
			chosen := rng.IntN(len(list))
			r := &routing.Request{ISL: uint64(blocks*blockSize + 5), BlockSize: blockSize, Blocks: uint64(blocks)}
			bound := rng.IntN(5) == 0
			tracker.Chose(now, &Choice{Request: r, Ranks: list, Chosen: chosen, Sequence: seq, Locals: locals, Bound: bound})

			own, longest := routing.FirstToken(r, &list[chosen]), 0
			for i := range list {
				longest = max(longest, int(list[i].Device))
			}
			for depth := 2; depth <= longest; depth++ {
				power := 1 << (int(math.Log2(float64(depth))))
				if depth != longest && depth != power && 2*depth != 3*power {
					continue
				}
				sum, n := 0.0, 0.0
				for i, c := range list {
					if i == chosen || int(c.Device) >= depth {
						continue
					}
					n++
					c.Device = uint32(depth)
					if ms := own - routing.FirstToken(r, &c); ms > noiseMS+noiseShare*own {
						sum += ms
					}
				}
				hash := seq[depth-1]
				if sum > 0 && !bound {
					twin.additions[hash] = append(twin.additions[hash], addition{now, sum / n})
				}
				if len(twin.additions[hash]) > 0 {
					requests[hash]++
				}
			}
		}
		if len(tracker.sketch.heap) != len(twin.additions) {
			t.Fatalf("round %d: %d entries, want %d", round, len(tracker.sketch.heap), len(twin.additions))
		}
		for hash := range twin.additions {
			e, want := tracker.sketch.byHash[hash], twin.weight(now, hash)
			if got := e.weight / tracker.sketch.unit; math.Abs(got-want) > 1e-9*want || e.excess != 0 {
				t.Fatalf("round %d: prefix %x has a weight of %v, want %v", round, hash, got, want)
			}
			if got := e.sums.requests / tracker.sketch.unit; math.Abs(got-requests[hash]) > 0.01*requests[hash] {
				t.Fatalf("round %d: prefix %x has %v requests, want %v", round, hash, got, requests[hash])
			}
			if events.SeqHash(e.locals[e.depth-1]) != hash {
				t.Fatalf("round %d: prefix %x has the hashes of another prefix", round, hash)
			}
		}
	}
}

// demand records requests for a prompt of 64 blocks that worker 0 holds, while it is busy and worker 1 is idle.
func demand(t *Tracker, now time.Duration, n int) {
	rng := rand.New(rand.NewPCG(1, 1))
	seq, locals := path(rng, 64)
	list := ranks(rng, 2, 64)
	list[0].Device, list[0].ActivePrefillTokens, list[1].Device, list[1].ActivePrefillTokens = 64, 5000, 0, 0
	list[0].PrefillRate, list[1].PrefillRate = 1, 1
	r := &routing.Request{ISL: 64*blockSize + 100, BlockSize: blockSize, Blocks: 64}
	for range n {
		t.Chose(now, &Choice{Request: r, Ranks: list, Sequence: seq, Locals: locals})
	}
}

// TestCopies makes a prefix hot, records a copy, and counts the requests that use the copy.
func TestCopies(t *testing.T) {
	now := time.Minute
	tracker := New(Config{})
	demand(tracker, now, 20)
	list := Merge(10, tracker.Prefixes(now, Listed))
	if len(list) != 1 || list[0].Depth != 64 || math.Abs(list[0].Helped-20) > 0.01 || len(list[0].Locals) != 64 {
		t.Fatalf("%+v", list)
	}
	tracker.Copied(now, Copy{Hash: list[0].Hash, Depth: 64, Rank: events.RankKey{Instance: "w1"}, Before: 4})
	if list := tracker.Prefixes(now, Listed); len(list) > 0 {
		t.Fatalf("after the copy: %+v", list)
	}
	seq, locals := path(rand.New(rand.NewPCG(1, 1)), 64)
	state := ranks(rand.New(rand.NewPCG(1, 2)), 2, 64)
	state[0].Device, state[0].ActivePrefillTokens, state[1].Device, state[1].ActivePrefillTokens = 64, 300, 64, 0
	state[0].PrefillRate, state[1].PrefillRate = 1, 1
	state[0].WorkingMS, state[1].WorkingMS = 0, 0
	r := &routing.Request{ISL: 64*blockSize + 100, BlockSize: blockSize, Blocks: 64}
	for range 3 {
		tracker.Chose(now, &Choice{Request: r, Ranks: state, Chosen: 1, Sequence: seq, Locals: locals})
	}
	state[1].Device = 60 // evicted since
	tracker.Chose(now, &Choice{Request: r, Ranks: state, Chosen: 1, Sequence: seq, Locals: locals})
	use := tracker.Copies()[0].Use
	if use.Requests != 3 || use.Tokens != 3*60*blockSize || math.Abs(use.SavedMS-3*300) > 1e-6 || use != tracker.Total() {
		t.Errorf("%+v", use)
	}
}

// TestMerge keeps one prefix of a chain, the one with the largest saving over all nodes.
func TestMerge(t *testing.T) {
	a := []Prefix{{Hash: 1, Depth: 4, Saves: 5}, {Hash: 2, Above: 1, Depth: 8, Saves: 4},
		{Hash: 3, Above: 2, Depth: 16, Saves: 3},
		{Hash: 9, Depth: 8, Saves: 1}}
	b := []Prefix{{Hash: 2, Above: 1, Depth: 8, Saves: 4, PerSecond: 2}, {Hash: 4, Above: 1, Depth: 8, Saves: 2},
		{Hash: 5, Above: 5, Depth: 8, Saves: 0.5}}
	var got []string
	for _, p := range Merge(10, a, b) {
		got = append(got, fmt.Sprint(p.Hash, ":", p.Saves))
	}
	if fmt.Sprint(got) != "[2:8 4:2 9:1 5:0.5]" {
		t.Errorf("%v", got)
	}
	if list := Merge(2, a, b); len(list) != 2 {
		t.Errorf("%d prefixes with a limit of 2", len(list))
	}
}

// TestPlanner checks the limits of copies: a number in a minute, one under way of a prefix, no repetition, and a
// benefit above the cost.
func TestPlanner(t *testing.T) {
	p := Planner{PerMinute: 2}
	good := func(hash events.SeqHash, worker events.WorkerID) *Candidate {
		return &Candidate{Hash: hash, Worker: worker, Helped: leastHelped, SavesMSPerS: 10, CostMS: 500}
	}
	now := time.Hour
	few, dear := good(1, "a"), good(1, "a")
	few.Helped--
	dear.CostMS = 600
	if p.Take(now, few) || p.Take(now, dear) || !p.Take(now, good(1, "a")) || p.Take(now, good(1, "b")) {
		t.Error("a copy without demand, with too large a cost, or beside a copy of the same prefix; or no copy")
	}
	p.Done(1)
	if p.Take(now, good(1, "a")) || !p.Take(now, good(1, "b")) || p.Take(now, good(2, "a")) {
		t.Error("a repeated copy, or more than two in a minute; or no second copy")
	}
	p.Done(1)
	if now += time.Minute; p.Take(now, good(1, "a")) || !p.Take(now, good(2, "a")) {
		t.Error("a repeated copy after a minute, or no other one")
	}
	if now += retryAfter; !p.Take(now, good(1, "a")) {
		t.Error("no copy after the pause")
	}
	if none := (Planner{}); none.Take(now, good(1, "a")) {
		t.Error("a planner without copies makes one")
	}
}

// TestTarget finds the least busy worker for prompts without the prefix.
func TestTarget(t *testing.T) {
	list := ranks(rand.New(rand.NewPCG(1, 3)), 6, 8)
	for i := range list {
		list[i].Device, list[i].ActivePrefillTokens, list[i].PrefillRate = 0, uint64(1000-100*i), 1
		list[i].WorkingMS = 0
	}
	list[5].Device = 8
	list[4].NewBlocks = 0
	list[3].Worker.State = routing.Draining
	r := &routing.Request{ISL: 8 * blockSize, BlockSize: blockSize, Blocks: 8}
	best, cost, holders := Target(r, list)
	if best != 2 || !(cost > 0) || fmt.Sprint(holders) != "[5]" {
		t.Errorf("target %d at %v, holders %v", best, cost, holders)
	}
	if best, _, _ := Target(r, list[3:]); best != -1 {
		t.Errorf("target %d without an eligible worker", best)
	}
}

// BenchmarkChose measures a request for a prompt of 16,384 tokens in a fleet of 8 and of 64 workers, with a saving in
// every request.
func BenchmarkChose(b *testing.B) {
	for _, n := range []int{8, 64} {
		b.Run(fmt.Sprint(n, "workers"), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(1, 4))
			tracker := New(Config{})
			seq, locals := path(rng, 1024)
			list := ranks(rng, n, 1024)
			list[0].Device, list[0].ActivePrefillTokens = 1024, 100_000
			r := &routing.Request{ISL: 1025 * blockSize, BlockSize: blockSize, Blocks: 1024}
			now := time.Duration(0)
			b.ReportAllocs()
			for b.Loop() {
				now += time.Millisecond
				tracker.Chose(now, &Choice{Request: r, Ranks: list, Sequence: seq, Locals: locals})
			}
		})
	}
}
