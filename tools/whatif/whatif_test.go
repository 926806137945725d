package whatif

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

var seed = flag.Uint64("seed", 1, "seed of the random tests")

const blockSize = 16

// traffic is a generated recording of conversations with a common system prompt. A block of a prompt is a number that
// stands for the whole prompt up to its end.
type traffic struct {
	prompts [][]uint64
	joined  []recording.Joined
}

// generate returns requests on workers in turn, far apart in time, with recorded spans. depth returns the recorded
// depth of a prompt.
func generate(rng *rand.Rand, requests, workers, span int, depth func(worker int, blocks []uint64) int) *traffic {
	t := &traffic{}
	var open [][]uint64
	next := uint64(1)
	fresh := func(n int) (list []uint64) {
		for range n {
			next++
			list = append(list, next)
		}
		return list
	}
	system := [][]uint64{fresh(5), fresh(9)}
	at := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC).UnixMilli()
	for i := range requests {
		c := rng.IntN(len(open) + 1)
		if c == len(open) || len(open[c]) > 60 {
			open = append(open, slices.Clone(system[rng.IntN(2)]))
			c = len(open) - 1
		}
		open[c] = append(slices.Clone(open[c]), fresh(1+rng.IntN(12))...)
		p := open[c]
		w := rng.IntN(workers)
		q := recording.Joined{Request: recording.Request{Time: at, Model: "m", BlockSize: blockSize, Span: uint32(span),
			Tokens: uint64(len(p) * blockSize), Output: 1, Session: recording.Name(c + 1), Policy: "kvatlas",
			Place: recording.Place{Worker: fmt.Sprint("w", w), Device: uint32(depth(w, p))}}}
		per := span / blockSize
		for from := 0; from < len(p); from += per {
			q.Names = append(q.Names, recording.Name(p[min(from+per, len(p))-1]))
		}
		t.prompts, t.joined = append(t.prompts, p), append(t.joined, q)
		at += 60_000
		_ = i
	}
	return t
}

func (t *traffic) input(tb testing.TB) *Input {
	tb.Helper()
	in := NewInput(DefaultLimits(), "")
	for i := range t.joined {
		if err := in.Add(&t.joined[i]); err != nil {
			tb.Fatal(err)
		}
	}
	return in
}

func fleetOf(workers, blocks int) *Fleet {
	f := &Fleet{}
	for i := range workers {
		f.Workers = append(f.Workers, Worker{Name: fmt.Sprint("w", i), DeviceBlocks: blocks})
	}
	return f
}

// twin returns the share of the tokens of the second half that LRU caches reuse, one for each worker. The last token of
// a prompt is always computed, so its block is not reused.
func (t *traffic) twin(blocks int, worker func(i int) int) float64 {
	caches := map[int][]uint64{} // the most recently used block is the last one
	reused, all := 0, 0
	for i, p := range t.prompts {
		cache := caches[worker(i)]
		hit := 0
		for hit < len(p)-1 && slices.Contains(cache, p[hit]) {
			hit++
		}
		if i >= len(t.prompts)/2 {
			reused, all = reused+hit, all+len(p)
		}
		for _, b := range slices.Backward(p) {
			cache = append(slices.DeleteFunc(cache, func(x uint64) bool { return x == b }), b)
		}
		caches[worker(i)] = cache[max(0, len(cache)-blocks):]
	}
	return float64(reused) / float64(all)
}

func run(tb testing.TB, o Options) *Report {
	tb.Helper()
	o.Routing, o.Seeds, o.Parallel = routing.DefaultConfig(), 2, 2
	rep, err := Run(tb.Context(), o)
	if err != nil {
		tb.Fatal(err)
	}
	return rep
}

// TestTwin compares the replays with LRU caches by hand: the history on several workers, and a single worker with
// today's memory and with more memory. A span of one block has exact names.
func TestTwin(t *testing.T) {
	t.Parallel()
	t.Logf("seed %d", *seed)
	for round := range uint64(testkit.Rounds(10)) {
		rng := rand.New(rand.NewPCG(*seed, round))
		blocks := 70 + rng.IntN(300)
		for _, workers := range []int{1, 3} {
			tr := generate(rng, 300, workers, blockSize, func(int, []uint64) int { return 0 })
			o := Options{Input: tr.input(t), Fleet: fleetOf(workers, blocks), Changes: Changes{Capacity: &Amount{Factor: 2}}}
			rep := run(t, o)
			placed := func(i int) int { return int(tr.joined[i].Place.Worker[1] - '0') }
			equal := func(name string, got, want float64) {
				t.Helper()
				if math.Abs(got-want) > 1e-9 || want == 0 {
					t.Errorf("round %d, %d workers of %d blocks: %s hits %v, want %v", round, workers, blocks, name, got, want)
				}
			}
			equal("the history", rep.History.HitRate, tr.twin(blocks, placed))
			if workers == 1 {
				equal("today's fleet", rep.Baseline.HitRate, tr.twin(blocks, placed))
				equal("twice the memory", rep.Changed.HitRate, tr.twin(2*blocks, placed))
			}
			if c := rep.Changed; rep.Baseline.Requests != 150 || c.ComputedTokens > rep.Baseline.ComputedTokens {
				t.Errorf("%+v, %+v", rep.Baseline, c)
			}
		}
	}
}

// TestSpans compares the history with LRU caches by hand, for spans of many blocks and the depths that these caches
// have.
func TestSpans(t *testing.T) {
	t.Parallel()
	t.Logf("seed %d", *seed)
	for round := range uint64(testkit.Rounds(10)) {
		const workers, blocks = 4, 150
		caches := map[int][]uint64{}
		tr := generate(rand.New(rand.NewPCG(*seed, 200+round)), 1000, workers, 512, func(w int, p []uint64) (hit int) {
			cache := caches[w]
			for hit < len(p) && slices.Contains(cache, p[hit]) {
				hit++
			}
			for _, b := range slices.Backward(p) {
				cache = append(slices.DeleteFunc(cache, func(x uint64) bool { return x == b }), b)
			}
			caches[w] = cache[max(0, len(cache)-blocks):]
			return hit
		})
		want := tr.twin(blocks, func(i int) int { return int(tr.joined[i].Place.Worker[1] - '0') })
		got := run(t, Options{Input: tr.input(t), Fleet: fleetOf(workers, blocks)}).History.HitRate
		t.Logf("round %d: %.4f, by hand %.4f", round, got, want)
		if math.Abs(got-want) > 0.01 {
			t.Errorf("round %d: the history hits %v, want %v", round, got, want)
		}
	}
}

// TestNames: the names of blocks in spans of 512 tokens have at most the common prefixes of the true blocks, and hardly
// less. Without depths and sessions, common prefixes end at the borders of spans.
func TestNames(t *testing.T) {
	t.Parallel()
	t.Logf("seed %d", *seed)
	shared := func(list [][]uint64, i int) (most int) {
		for _, other := range list[:i] {
			n := 0
			for n < min(len(list[i]), len(other)) && list[i][n] == other[n] {
				n++
			}
			most = max(most, n)
		}
		return most
	}
	for round := range uint64(testkit.Rounds(10)) {
		held := map[uint64]bool{}
		tr := generate(rand.New(rand.NewPCG(*seed, 100+round)), 300, 1, 512, func(_ int, p []uint64) (n int) {
			for n < len(p) && held[p[n]] {
				n++
			}
			for _, b := range p {
				held[b] = true
			}
			return n
		})
		var named, coarse [][]uint64
		list := tr.input(t).list
		convert := func(n *namer) (all [][]uint64) {
			for _, x := range list {
				var names []uint64
				for _, b := range n.prompt(x).Names {
					names = append(names, uint64(b))
				}
				all = append(all, names)
			}
			return all
		}
		named = convert(newNamer(list))
		for _, x := range list {
			x.depth, x.session = 0, 0
		}
		coarse = convert(newNamer(list))
		less, missed := 0, 0
		for i, p := range tr.prompts {
			want, got, rough := shared(tr.prompts, i), shared(named, i), shared(coarse, i)
			if got < want {
				missed++ // mostly the first request after the first one with a system prompt
			}
			if len(named[i]) != len(p) || got > want {
				t.Errorf("round %d, request %d of %d blocks: %d blocks are common, want %d", round, i, len(p), got, want)
			}
			if rough > want {
				t.Errorf("round %d, request %d: %d blocks without depths, of %d", round, i, rough, want)
			}
			if rough < want {
				less++
			}
		}
		if less < 100 || missed > 6 {
			t.Errorf("round %d: %d requests need the evidence, and %d of 300 lack it", round, less, missed)
		}
	}
}

// stored is a stream of one batch for each request.
type stored struct{ data [][]byte }

func (s *stored) Info(context.Context) (jetstream.RecordingInfo, error) {
	return jetstream.RecordingInfo{First: 1, Last: events.StreamSeq(len(s.data))}, nil
}

func (s *stored) Next(_ context.Context, from events.StreamSeq) (jetstream.RecordedBatch, error) {
	return jetstream.RecordedBatch{Seq: from, Node: "n", Data: s.data[from-1]}, nil
}

func (s *stored) Store(_ context.Context, _, _ string, data []byte) error {
	s.data = append(s.data, slices.Clone(data))
	return nil
}

func (s *stored) Ensure(context.Context) error { return nil }

// TestFile: the analysis of an exported recording equals the analysis of the stream.
func TestFile(t *testing.T) {
	t.Parallel()
	keys, err := recording.NewKeys(bytes.Repeat([]byte{1}, recording.SecretBytes))
	if err != nil {
		t.Fatal(err)
	}
	s := &stored{}
	r := recording.New(recording.Config{Node: "n", Keys: keys, Stream: s, Span: 64})
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // Run stores all records
	tr := generate(rand.New(rand.NewPCG(*seed, 7)), 300, 3, 64, func(_ int, p []uint64) int { return len(p) / 2 })
	for i, p := range tr.prompts {
		q := tr.joined[i].Request
		q.Names, q.Span, q.Session = nil, 0, 0
		var seq []events.SeqHash
		for _, b := range p {
			seq = append(seq, events.SeqHash(b))
		}
		id := fmt.Sprint(i)
		r.Request(&recording.Observed{Request: q, ID: id, SessionID: fmt.Sprint(tr.joined[i].Request.Session), Sequence: seq})
		if i%3 != 0 {
			r.End(id, recording.End{Time: q.Time + 90, Freed: true, Life: uint64(90 + i), FirstToken: uint64(40 + i%9)})
			r.Report(id, recording.Report{Time: q.Time + 90, Cached: 32})
		}
		if i%20 == 19 {
			r.Run(ctx)
		}
	}
	r.Run(ctx)
	in := NewInput(DefaultLimits(), "m")
	if _, err := recording.Read(t.Context(), s, recording.Filter{}, in.Add); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if _, _, err := recording.Export(t.Context(), s, recording.Filter{}, &out, recording.JSON, 64); err != nil {
		t.Fatal(err)
	}
	file := NewInput(DefaultLimits(), "m")
	if err := file.ReadFile(&out, recording.Filter{}); err != nil {
		t.Fatal(err)
	}
	o := Options{Input: in, Fleet: fleetOf(3, 200), Changes: Changes{Workers: 1}}
	want := run(t, o)
	o.Input = file
	got := run(t, o)
	if !reflect.DeepEqual(got, want) || got.Counts.Unreported != 100 || got.Counts.NoLatency != 100 ||
		got.Measured.TTFTP50 < 0.04 || got.HistoryError.TTFTMean == nil || len(got.Notes) < 3 {
		t.Errorf("the file gives %+v\nthe stream %+v", got, want)
	}
	var shown bytes.Buffer
	if err := got.Print(&shown); err != nil || !strings.Contains(shown.String(), "error of the replay of the history") ||
		!strings.Contains(shown.String(), "EXPECTED") {
		t.Errorf("%s, %v", shown.String(), err)
	}
}

// TestLimits: an Input keeps the latest requests within the limits.
func TestLimits(t *testing.T) {
	t.Parallel()
	tr := generate(rand.New(rand.NewPCG(*seed, 8)), 1000, 1, blockSize, func(int, []uint64) int { return 0 })
	for _, l := range []Limits{{Requests: 150, Blocks: 1 << 20}, {Requests: 1000, Blocks: 4000}} {
		in := NewInput(l, "m")
		for i := range tr.joined {
			if err := in.Add(&tr.joined[i]); err != nil {
				t.Fatal(err)
			}
		}
		blocks := 0
		for _, x := range in.list {
			blocks += len(x.names)
		}
		if len(in.list) > l.Requests || blocks > l.Blocks || in.blocks != blocks || in.Older != 1000-len(in.list) ||
			len(in.list) < 100 || in.list[len(in.list)-1].at != tr.joined[999].Request.Time || cap(in.list) > 4000 {
			t.Errorf("%+v: %d requests with %d blocks, %+v", l, len(in.list), blocks, in.Counts)
		}
		rep := run(t, Options{Input: in, Fleet: fleetOf(1, 100)})
		if !strings.Contains(fmt.Sprint(rep.Notes), "older requests") {
			t.Errorf("%q", rep.Notes)
		}
	}
}

// TestNotes: the notes name the calls that a recording lacks, and ways by session that have no sessions.
func TestNotes(t *testing.T) {
	t.Parallel()
	tr := generate(rand.New(rand.NewPCG(*seed, 9)), 200, 2, blockSize, func(int, []uint64) int { return 0 })
	notes := func(policy string) string {
		rep := run(t, Options{Input: tr.input(t), Fleet: fleetOf(2, 100), Changes: Changes{Policy: policy}})
		return strings.Join(rep.Notes, "\n")
	}
	const lost = "have no session_id: sticky chooses by"
	if text := notes("sticky"); strings.Contains(text, lost) ||
		!strings.Contains(text, "200 of 200 requests have no time to the first token (routers report it by "+
			"prefill_complete, and free records it at the end)") {
		t.Error(text)
	}
	for i := range tr.joined[:150] {
		tr.joined[i].Session = 0
	}
	if text := notes("sticky"); !strings.Contains(text, "150 of 200 requests "+lost) {
		t.Error(text)
	}
	if text := notes("dynamo"); strings.Contains(text, "session_id") {
		t.Error(text)
	}
}

// TestWorkerHours: worker hours are compared with today's fleet, also if a worker of today has no recorded request.
func TestWorkerHours(t *testing.T) {
	t.Parallel()
	tr := generate(rand.New(rand.NewPCG(*seed, 10)), 200, 3, blockSize, func(int, []uint64) int { return 0 })
	for _, x := range []struct {
		changes Changes
		want    string
	}{{Changes{Policy: "sticky"}, "worker hours +0 %"}, {Changes{Workers: 2}, "worker hours +50 %"}} {
		rep := run(t, Options{Input: tr.input(t), Fleet: fleetOf(4, 100), Changes: x.changes})
		var out bytes.Buffer
		if err := rep.Print(&out); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), x.want+"\n") || rep.Measured.Workers != 3 {
			t.Errorf("%+v: %s, want %q", x.changes, out.String(), x.want)
		}
	}
}

// TestRefusals: an analysis without a basis is an error with the reason.
func TestRefusals(t *testing.T) {
	t.Parallel()
	flat := func(int, []uint64) int { return 0 }
	whole := func() *traffic { return generate(rand.New(rand.NewPCG(*seed, 9)), 200, 2, blockSize, flat) }
	each := func(f func(*recording.Joined)) *traffic {
		tr := whole()
		for i := range tr.joined {
			f(&tr.joined[i])
		}
		return tr
	}
	for _, x := range []struct {
		traffic *traffic
		fleet   *Fleet
		changes Changes
		want    string
	}{
		{&traffic{}, fleetOf(2, 100), Changes{}, "too few"},
		{generate(rand.New(rand.NewPCG(*seed, 9)), 50, 2, blockSize, flat), fleetOf(2, 100), Changes{}, "50 requests"},
		{each(func(q *recording.Joined) { q.Flags |= recording.Refused }), fleetOf(2, 100), Changes{}, "0 requests"},
		{each(func(q *recording.Joined) { q.Flags |= recording.Disaggregated }), fleetOf(2, 100), Changes{},
			"separate prefill"},
		{each(func(q *recording.Joined) { q.Policy = "of-a-plugin" }), fleetOf(2, 100), Changes{}, "of-a-plugin"},
		{whole(), fleetOf(2, 0), Changes{}, "capacity of worker w0"},
		{whole(), fleetOf(2, 100), Changes{Workers: -2}, "leaves none"},
		{whole(), fleetOf(2, 100), Changes{Policy: "none"}, `no "none"`},
		{whole(), fleetOf(2, 100), Changes{Policy: "sticky", Routers: 4}, "no effect"},
		{whole(), fleetOf(2, 100), Changes{Capacity: &Amount{Factor: 0.6}}, "do not fit"},
		{whole(), fleetOf(2, 100), Changes{Host: &Amount{Factor: 2}}, "no host tier"},
		{whole(), fleetOf(2, 100), Changes{Workers: 1023}, "1,024"},
	} {
		_, err := Run(t.Context(), Options{Input: x.traffic.input(t), Fleet: x.fleet, Changes: x.changes,
			Routing: routing.DefaultConfig()})
		if err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%+v: %v, want %q", x.changes, err, x.want)
		}
	}
	two := whole()
	two.joined[5].Model = "other"
	if _, err := Run(t.Context(), Options{Input: two.input(t), Fleet: fleetOf(2, 100)}); err == nil ||
		!strings.Contains(err.Error(), "m, other") {
		t.Error(err)
	}
}

// TestParse reads the changes of the flags.
func TestParse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{"": 0, "+2": 2, "-1": -1} {
		if n, err := ParseWorkers(text); err != nil || n != want {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
	for _, text := range []string{"2", "+", "two", "+2000", "+1.5"} {
		if n, err := ParseWorkers(text); err == nil {
			t.Errorf("%q: %d", text, n)
		}
	}
	for text, want := range map[string]*Amount{"": nil, "2x": {Factor: 2}, "0.5x": {Factor: 0.5},
		"500000": {Tokens: 500000}, "0": {}, "2GiB": {Tokens: 16384}, "1MiB": {Tokens: 8}} {
		if a, err := ParseAmount(text, 131072); err != nil || !reflect.DeepEqual(a, want) {
			t.Errorf("%q: %+v, %v", text, a, err)
		}
	}
	for _, text := range []string{"x", "0x", "1000x", "-5", "NaN", "Infx", "5GB", "9999TiB", "1e99"} {
		if a, err := ParseAmount(text, 1024); err == nil {
			t.Errorf("%q: %+v", text, a)
		}
	}
	if _, err := ParseAmount("200GiB", 0); err == nil || !strings.Contains(err.Error(), "--token-bytes") {
		t.Error(err)
	}
}

// TestFleetOf: the workers of a model are those that may be chosen, with their registered sizes.
func TestFleetOf(t *testing.T) {
	t.Parallel()
	worker := func(name, model string, r *api.WorkerRecord) api.WorkerInfo {
		return api.WorkerInfo{Instance: events.WorkerID(name), Model: model, Record: r,
			Blocks: api.TierCounts{Device: 7, Host: 9}}
	}
	ready := func(blocks uint64) *api.WorkerRecord {
		return &api.WorkerRecord{State: api.WorkerSchedulable, WorkerSpec: api.WorkerSpec{TotalKVBlocks: blocks,
			MaxBatchedTokens: 2048, Role: api.RoleAggregated}}
	}
	list := &api.WorkerList{Workers: []api.WorkerInfo{worker("a", "m", ready(100)), worker("b", "m", ready(0)),
		worker("c", "m", nil), worker("d", "m", &api.WorkerRecord{State: api.WorkerDraining}), worker("e", "n", ready(5))}}
	f, err := FleetOf(list, "m")
	want := &Fleet{Workers: []Worker{{"a", 100, 9, false, 2048}, {"b", 7, 9, true, 2048}}, Skipped: []string{"c", "d"}}
	if err != nil || !reflect.DeepEqual(f, want) {
		t.Errorf("%+v, %v", f, err)
	}
	if _, err := FleetOf(list, "none"); err == nil {
		t.Error("a model without workers has a fleet")
	}
	list.Workers[0].Record.Role = api.RolePrefill
	if _, err := FleetOf(list, "m"); err == nil || !strings.Contains(err.Error(), "prefill") {
		t.Error(err)
	}
}

// FuzzLine reads arbitrary lines of a file.
func FuzzLine(f *testing.F) {
	tr := generate(rand.New(rand.NewPCG(1, 1)), 3, 1, 64, func(int, []uint64) int { return 1 })
	for i := range tr.joined {
		var out bytes.Buffer
		e, err := recording.NewExporter(&out, recording.JSON, 64)
		if err != nil {
			f.Fatal(err)
		}
		if err := e.Write(&tr.joined[i]); err != nil {
			f.Fatal(err)
		}
		if err := e.Flush(); err != nil {
			f.Fatal(err)
		}
		f.Add(out.Bytes())
	}
	f.Add([]byte(`{"model":"m","block_size":1,"hash_tokens":1,"input_length":18446744073709551615}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		in := NewInput(Limits{Requests: 10, Blocks: 1 << 20}, "")
		if err := in.ReadFile(bytes.NewReader(text), recording.Filter{}); err != nil {
			return
		}
		n := newNamer(in.list)
		for _, x := range in.list {
			if p := n.prompt(x); len(p.Names) > x.tokens/x.blockSize || p.Tokens < 1 {
				t.Errorf("%d blocks of %d tokens", len(p.Names), p.Tokens)
			}
		}
		if _, err := json.Marshal(in.Counts); err != nil {
			t.Error(err)
		}
	})
}

// BenchmarkRun measures an analysis with one change and three seeds. A request has 4,000 tokens on average.
func BenchmarkRun(b *testing.B) {
	tr := generate(rand.New(rand.NewPCG(*seed, 11)), 10_000, 8, 512, func(_ int, p []uint64) int { return len(p) / 2 })
	for i := range tr.joined {
		q := &tr.joined[i].Request // blocks of 128 tokens become spans of 128 tokens with 8 blocks
		q.Time = tr.joined[0].Request.Time + int64(i)*100
		q.Tokens, q.Span, q.Place.Device = q.Tokens*8, 128, q.Place.Device*8
		q.Names = nil
		for _, id := range tr.prompts[i] {
			q.Names = append(q.Names, recording.Name(id))
		}
	}
	for b.Loop() {
		rep, err := Run(b.Context(), Options{Input: tr.input(b), Fleet: fleetOf(8, 20_000), Changes: Changes{Workers: 1},
			Routing: routing.DefaultConfig(), Seeds: 3, Parallel: 1})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(rep.Counts.Replayed), "requests")
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*len(tr.joined)), "µs/request")
}
