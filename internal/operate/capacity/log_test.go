package capacity

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// prompt returns the names of n random blocks.
func prompt(r *rand.Rand, n int) (names []funnel.Name) {
	for range n {
		names = append(names, funnel.Name(r.Uint64()))
	}
	return names
}

// check verifies the invariants of a log, given the blocks of all its requests since the last drop at the most.
func (l *Log) check(t *testing.T) {
	t.Helper()
	if len(l.Refs) > l.size || cap(l.Refs) > l.size || l.Below > l.taking {
		t.Fatalf("%d references with room for %d, of %d; below %d, taking %d", len(l.Refs), cap(l.Refs), l.size, l.Below,
			l.taking)
	}
	for i, r := range l.Refs {
		if r.Name >= l.taking || i > 0 && r.At < l.Refs[i-1].At || int(r.Worker) > len(l.Workers) ||
			i > 0 && r.At == l.Refs[i-1].At && (r.Before != 0 || r.Place <= l.Refs[i-1].Place) {
			t.Fatalf("reference %d is %+v after %+v", i, r, l.Refs[max(0, i-1)])
		}
	}
}

// TestLogAdaptsItsRate: a log lowers the rate until it covers the wanted blocks, counts all blocks, and raises the rate
// after fewer blocks are wanted. A prompt larger than the log and a few repeated blocks do no harm.
func TestLogAdaptsItsRate(t *testing.T) {
	r := rand.New(rand.NewPCG(*seed, 0))
	l := NewLog(16, 1000)
	l.want = 20_000
	sent := uint64(0)
	for i := range 200 {
		l.Add(int64(i), events.WorkerID(rune('a'+i%7)), prompt(r, 100))
		sent += 100
		if l.check(t); blocksOf(l.Refs)+uint64(l.before) != sent {
			t.Fatalf("seed %d: %d blocks after %d requests, want %d", *seed, blocksOf(l.Refs)+uint64(l.before), i+1, sent)
		}
	}
	for i := range 400 {
		l.Add(int64(1000+i), "", prompt(r, 100))
		l.check(t)
	}
	low := l.Below
	if _, covered := l.covered(); covered < 15_000 || covered > 40_000 {
		t.Errorf("seed %d: the log covers %d blocks, want about 20,000", *seed, covered)
	}
	l.want = 1000
	for i := range 1000 {
		l.Add(int64(2000+i), "", prompt(r, 100))
		l.check(t)
	}
	if l.Below < 4*low || l.Thinned(100).Below >= l.Below || len(l.Thinned(100).Refs) > 100 {
		t.Errorf("seed %d: names below %d are sampled with few wanted blocks, %d before", *seed, l.Below, low)
	}
	l.want = 1 << 30
	few := prompt(r, 100)
	for i := range 10_000 {
		l.Add(int64(4000+i), "", few)
	}
	if l.check(t); len(l.Refs) < 500 {
		t.Errorf("seed %d: %d references to a few repeated blocks", *seed, len(l.Refs))
	}
	l.Add(20_000, "", prompt(r, 100_000))
	l.check(t)
	small := NewLog(16, 64)
	small.Add(1, "w", prompt(r, 100_000))
	if small.check(t); blocksOf(small.Refs)+uint64(small.before) != 100_000 {
		t.Errorf("seed %d: %d of 100,000 blocks", *seed, blocksOf(small.Refs))
	}
}

// TestTracker: models have logs of their own. Requests with another block size are counted, and replace the log after
// many of them.
func TestTracker(t *testing.T) {
	r := rand.New(rand.NewPCG(*seed, 1))
	k := New(Config{Samples: 1000})
	at := time.UnixMilli(1000)
	if k.Requested("m", 16, at, "w", nil); k.Samples("m", 10) != nil {
		t.Error("a request without blocks made a log")
	}
	k.Requested("m", 16, at, "w", prompt(r, 10))
	k.Requested("m", 32, at, "w", prompt(r, 3))
	if s := k.Samples("m", 1000); s.BlockSize != 16 || len(s.Refs) != 10 || s.Skipped != 3 ||
		!slices.Equal(s.Workers, []events.WorkerID{"w"}) {
		t.Errorf("%+v", s)
	}
	for range maxStrays {
		k.Requested("m", 32, at, "w", prompt(r, 1))
	}
	if s := k.Samples("m", 1000); s.BlockSize != 32 || len(s.Refs) != 1 {
		t.Errorf("the block size changed: %+v", s)
	}
	for i := range 2 * maxModels {
		k.Requested(strconv.Itoa(i), 16, at, "", prompt(r, 1))
	}
	if len(k.logs) != maxModels {
		t.Errorf("%d models", len(k.logs))
	}
}

// TestReport: a report has the sizes of today, and marks rates beyond the stored requests.
func TestReport(t *testing.T) {
	if out := Report("m", Compute(nil, 0), Sizes{{Blocks: 7}}); len(out.Points) != 0 || len(out.Advice) != 0 ||
		len(out.Tiers) != 1 {
		t.Errorf("without requests: %+v", out)
	}
	l := NewLog(16, 1<<16)
	loop := prompt(rand.New(rand.NewPCG(*seed, 2)), 1000)
	for i := range 8000 { // every block has the distance 999
		l.Add(int64(i+1), "", loop[i%1000:i%1000+1])
	}
	c := Compute([]*Samples{&l.Samples}, 0)
	out := Report("m", c, Sizes{{Blocks: 400}, {Blocks: 300, Held: true}})
	if c.Limit != 1000 || out.Routed || len(out.Tiers) != 2 || out.Blocks != 4000 {
		t.Fatalf("%+v", out)
	}
	device, host := out.Tiers[0], out.Tiers[1]
	if device.Share != 0 || device.Doubled != 1 || !device.Beyond || device.Source != api.CapacityRegistered ||
		host.Share != 0 || host.Doubled != 1 || host.Beyond || host.Source != api.CapacityHeld {
		t.Errorf("%+v", out.Tiers)
	}
	text := strings.Join(out.Advice, "\n")
	if !strings.Contains(text, "doubling device memory adds at least 100.0 points") ||
		!strings.Contains(text, "doubling host memory adds 100.0 points") ||
		!strings.Contains(text, "the last 30 % of host memory adds 0.0 points") {
		t.Error(text)
	}
	if device.ShareBound || host.ShareBound || device.LastBound || host.LastBound {
		t.Errorf("bounds of known rates: %+v", out.Tiers)
	}
}

// TestReportBounds: beyond the stored requests, hit rates are lower bounds, and differences are lower bounds or
// unknown.
func TestReportBounds(t *testing.T) {
	l := NewLog(16, 1<<16)
	loop := prompt(rand.New(rand.NewPCG(*seed, 2)), 1000)
	for i := range 8000 { // every block has the distance 999
		l.Add(int64(i+1), "w", loop[i%1000:i%1000+1])
	}
	c := Compute([]*Samples{&l.Samples}, 0)
	out := Report("m", c, Sizes{{Blocks: 1100}})
	text := strings.Join(out.Advice, "\n")
	if tier := out.Tiers[0]; tier.Last != 1 || !tier.ShareBound || !tier.LastBound || !tier.Beyond ||
		!strings.Contains(text, "the benefit of doubling device memory is unknown") ||
		!strings.Contains(text, "the last 30 % of device memory adds at least 100.0 points") ||
		!strings.Contains(text, "only 1000 different blocks") {
		t.Errorf("%+v %q", out.Tiers, out.Advice)
	}
	out = Report("m", c, Sizes{{Blocks: 900}, {Blocks: 2000}})
	if device, host := out.Tiers[0], out.Tiers[1]; device.ShareBound || !device.LastBound || !host.ShareBound {
		t.Errorf("%+v", out.Tiers)
	}
	text = strings.Join(out.Advice, "\n")
	if strings.Contains(text, " 0.0 points") || strings.Contains(text, "separate") ||
		!strings.Contains(text, "the benefit of the last 30 % of host memory is unknown") {
		t.Error(text)
	}
}

// TestSeparateCaches: with small caches, separate caches may reuse more than one LRU cache. The sentence then names no
// cost.
func TestSeparateCaches(t *testing.T) {
	l := NewLog(16, 1<<16)
	rng := rand.New(rand.NewPCG(*seed, 3))
	loop, one := prompt(rng, 150), prompt(rng, 1)
	for i := range 9000 { // worker a repeats a block; worker b has a loop of blocks, larger than its cache
		worker, blocks := events.WorkerID("a"), one
		if i%10 != 0 {
			worker, blocks = "b", loop[i%150:i%150+1]
		}
		l.Add(int64(i+1), worker, blocks)
	}
	c := Compute([]*Samples{&l.Samples}, 2)
	for _, x := range []struct {
		blocks uint64
		want   string
	}{{8, "separate caches of 2 workers reuse 10.0 points more than one shared LRU cache"},
		{136, "separate caches of 2 workers cost"}} {
		out := Report("m", c, Sizes{{Blocks: x.blocks}})
		if text := strings.Join(out.Advice, "\n"); !out.Routed || !strings.Contains(text, x.want) {
			t.Errorf("%d blocks, shared %v, routed %v: %s", x.blocks, c.Shared.At(x.blocks), c.Routed.At(x.blocks), text)
		}
	}
	if text := separate(3, -0.01); text != "separate caches of 3 workers reuse as much as one shared cache" {
		t.Error(text)
	}
}

// FuzzDecode: no bytes break the decoder, and decoded references give a curve.
func FuzzDecode(f *testing.F) {
	f.Add(Encode([]Ref{{Name: 1, At: 5, Rest: 3}, {Name: 9, At: 5, Place: 2, Rest: 1, Before: 4, Worker: 1}}))
	f.Add(binary.AppendUvarint(nil, 1<<40))
	f.Fuzz(func(t *testing.T, data []byte) {
		refs, err := Decode(data)
		if err != nil {
			return
		}
		again, err := Decode(Encode(refs))
		if err != nil || !slices.Equal(again, refs) {
			t.Errorf("%v, %v; want %v", again, err, refs)
		}
		c := Compute([]*Samples{{BlockSize: 16, Below: all, Refs: refs}}, 0)
		if share := c.Shared.At(c.Limit); share < 0 || share > 1 {
			t.Errorf("the share is %v", share)
		}
	})
}

// BenchmarkRequested measures a request of 500 blocks with the sampling rate of a large fleet.
func BenchmarkRequested(b *testing.B) {
	k := New(Config{Samples: MaxSamples, Blocks: func(string) uint64 { return 1 << 18 }})
	r := rand.New(rand.NewPCG(1, 3))
	var prompts [][]funnel.Name
	for range 20_000 {
		prompts = append(prompts, prompt(r, 500))
	}
	for i := range prompts {
		k.Requested("m", 16, time.UnixMicro(int64(i)), "w", prompts[i])
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		k.Requested("m", 16, time.UnixMicro(int64(1e6+i)), "w", prompts[i%len(prompts)])
	}
}

// BenchmarkCompute measures the curves of a full log.
func BenchmarkCompute(b *testing.B) {
	l := NewLog(16, MaxSamples)
	for i, q := range randomRequests(rand.New(rand.NewPCG(1, 4)), 20_000) {
		l.Add(int64(i), q.worker, q.names)
	}
	for b.Loop() {
		Compute([]*Samples{&l.Samples}, 0)
	}
}
