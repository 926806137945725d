package capacity

import (
	"flag"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/trace"
)

var seed = flag.Uint64("seed", 1, "of the random tests")

// request is a request of a test.
type request struct {
	worker events.WorkerID
	names  []funnel.Name
}

// lru is a cache: the naive twin of a curve. The most recently used block is the last one.
type lru struct {
	size   int
	blocks []funnel.Name
}

// serve returns the hits of a request, and whether they are a prefix of the prompt.
func (c *lru) serve(names []funnel.Name) (hits int, prefix bool) {
	prefix = true
	for i, n := range names {
		if slices.Contains(c.blocks, n) {
			prefix = prefix && hits == i
			hits++
		}
	}
	for _, n := range slices.Backward(names) {
		if at := slices.Index(c.blocks, n); at >= 0 {
			c.blocks = slices.Delete(c.blocks, at, at+1)
		}
		c.blocks = append(c.blocks, n)
	}
	c.blocks = c.blocks[max(0, len(c.blocks)-c.size):]
	return hits, prefix
}

// randomRequests returns requests for paths in a random tree of prompts.
func randomRequests(r *rand.Rand, n int) (list []request) {
	for range n {
		var names []funnel.Name
		h := uint64(1)
		for range 1 + r.IntN(8) {
			h = xxh3.HashStringSeed(strconv.Itoa(r.IntN(3)), h)
			names = append(names, funnel.Name(h))
		}
		list = append(list, request{events.WorkerID("w" + strconv.Itoa(r.IntN(3))), names})
	}
	return list
}

// traceRequests returns the requests of a trace, with eight blocks for each block of the trace.
func traceRequests(reqs []trace.Request) (list []request) {
	for i, q := range reqs {
		var names []funnel.Name
		h := uint64(1)
		for _, id := range q.HashIDs {
			for part := range 8 {
				h = xxh3.HashSeed([]byte{byte(id), byte(id >> 8), byte(id >> 16), byte(id >> 24), byte(part)}, h)
				names = append(names, funnel.Name(h))
			}
		}
		list = append(list, request{events.WorkerID("w" + strconv.Itoa(i%8)), names})
	}
	return list
}

// TestCurveMatchesCaches: without sampling, both curves are the hit rates of simulated caches, for every size, also
// when the requests are divided among nodes and their samples are encoded.
func TestCurveMatchesCaches(t *testing.T) {
	for round := range testkit.Rounds(30) {
		r := rand.New(rand.NewPCG(*seed, uint64(round)))
		list := randomRequests(r, 20+r.IntN(200))
		logs := []*Log{NewLog(16, 1<<20), NewLog(16, 1<<20), NewLog(16, 1<<20)}
		for i, q := range list {
			logs[r.IntN(1+round%3)].Add(int64(1000+i), q.worker, q.names)
		}
		var nodes []*Samples
		for _, l := range logs {
			s := l.Thinned(1 << 20)
			refs, err := Decode(Encode(s.Refs))
			if err != nil || !slices.Equal(refs, s.Refs) {
				t.Fatalf("seed %d round %d: decoded %v, %v; want %v", *seed, round, refs, err, s.Refs)
			}
			nodes = append(nodes, s)
		}
		c := Compute(append(nodes, nil), round%5)
		from := int(c.From.UnixMicro() - 1000)
		for size := uint64(1); size <= c.Limit; size++ {
			shared := &lru{size: int(size)}
			parts := map[events.WorkerID]*lru{}
			hits, partHits, asked := 0, 0, 0
			for i, q := range list {
				part := parts[q.worker]
				if part == nil {
					part = &lru{size: int(size)}
					parts[q.worker] = part
				}
				n, prefix := shared.serve(q.names)
				m, partPrefix := part.serve(q.names)
				if !prefix || !partPrefix {
					t.Fatalf("seed %d round %d size %d: the hits are no prefix", *seed, round, size)
				}
				if i >= from {
					hits, partHits, asked = hits+n, partHits+m, asked+len(q.names)
				}
			}
			if c.Blocks != uint64(asked) {
				t.Fatalf("seed %d round %d: %d blocks, want %d", *seed, round, c.Blocks, asked)
			}
			if got, want := c.Shared.At(size), float64(hits)/float64(asked); math.Abs(got-want) > 1e-9 {
				t.Fatalf("seed %d round %d: shared cache of %d blocks hits %v, want %v", *seed, round, size, got, want)
			}
			each := size * uint64(c.Workers)
			if got, want := c.Routed.At(each), float64(partHits)/float64(asked); each <= c.Limit &&
				math.Abs(got-want) > 1e-9 {
				t.Fatalf("seed %d round %d: %d caches of %d blocks hit %v, want %v", *seed, round, c.Workers, size, got, want)
			}
		}
	}
}

// TestSampledCurve: on three traces, the mean error of both curves against the exact distances is at most a point, with
// at most 1 MiB of samples for each node.
func TestSampledCurve(t *testing.T) {
	for i, of := range []trace.Options{{Seed: *seed, Requests: 4000}, {Seed: *seed + 1, Requests: 3000, Clump: 3},
		{Seed: *seed + 2, Requests: 2000, Clump: 1}} {
		checkSampled(t, "generated trace "+strconv.Itoa(i), traceRequests(trace.Generate(of)), 1<<17)
	}
}

// checkSampled compares the curves of samples on three nodes with the exact distances.
func checkSampled(t *testing.T, name string, list []request, want uint64) {
	t.Helper()
	exact := NewLog(512, math.MaxInt32)
	logs := []*Log{NewLog(512, MaxSamples), NewLog(512, MaxSamples), NewLog(512, MaxSamples)}
	begun := time.Now()
	blocks := 0
	for i, q := range list {
		l := logs[i%3]
		l.want = want
		l.Add(int64(i+1), q.worker, q.names)
		blocks += len(q.names)
	}
	took := time.Since(begun)
	for i, q := range list {
		exact.Add(int64(i+1), q.worker, q.names)
	}
	var nodes []*Samples
	for _, l := range logs {
		if bytes := cap(l.Refs) * int(unsafe.Sizeof(Ref{})); bytes > 1<<20 {
			t.Errorf("%s: a log has %d bytes, more than 1 MiB", name, bytes)
		}
		nodes = append(nodes, l.Thinned(MaxSamples))
	}
	c := Compute(nodes, 8)
	truth := exactCurve(&exact.Samples, c.From)
	for of, rates := range map[string][2]*Rates{"shared": {&c.Shared, &truth.Shared},
		"routed": {&c.Routed, &truth.Routed}} {
		sum, worst, n := 0.0, 0.0, 0
		for size := 64.0; size <= float64(c.Limit); size *= math.Sqrt2 {
			wrong := math.Abs(rates[0].At(uint64(size)) - rates[1].At(uint64(size)))
			sum, worst, n = sum+wrong, max(worst, wrong), n+1
		}
		mean := 100 * sum / float64(n)
		t.Logf("%s, %s: rate %.4f, %d samples, limit %d of %d blocks: mean error %.2f, worst %.2f points in %d sizes; %v a block",
			name, of, c.Rate, c.Samples, c.Limit, blocks, mean, 100*worst, n, took/time.Duration(blocks))
		if mean > 1 || n < 10 {
			t.Errorf("%s, %s: the mean error at %d sizes is %.2f points, more than 1", name, of, n, mean)
		}
	}
}

// exactCurve returns the curves of all requests from a time on, with all requests before as history.
func exactCurve(s *Samples, from time.Time) *Curve {
	refs, _ := merge([]*Samples{s}, &Curve{BlockSize: s.BlockSize})
	warm, _ := slices.BinarySearchFunc(refs, from.UnixMicro(), func(r merged, at int64) int { return int(r.At - at) })
	return count(refs, warm, 1, math.MaxInt32, 8)
}
