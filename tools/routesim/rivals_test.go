package routesim

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/trace"
)

// ruleFleet returns an idle fleet of an arm with a router.
func ruleFleet(t *testing.T, arm Arm, workers int, prompts ...*Prompt) (*fleet, *router) {
	t.Helper()
	e := Defaults()
	e.BlockSize, e.Capacity = 16, 16*1000
	w := Workload{Engine: e, Workers: workers, Stages: []Stage{{Rate: 1}}}
	for _, p := range prompts {
		w.Stages[0].Arrivals = append(w.Stages[0].Arrivals, Arrival{Prompt: p, Output: 1})
	}
	w.number()
	s, err := newSim(config(w, arm, 1))
	if err != nil {
		t.Fatal(err)
	}
	return s.fleet, s.fleet.routers[0]
}

// words returns a prompt of blocks of 16 tokens with the given names.
func words(names ...events.BlockHash) *Prompt { return &Prompt{Tokens: 16 * len(names), Names: names} }

// chosen returns the worker that a rule chooses.
func chosen(f *fleet, p *Prompt, session uint64, live ...int) int {
	return f.routers[0].rule.choose(f.routers[0], &request{prompt: p, session: session}, live, 0)
}

func TestSticky(t *testing.T) {
	f, _ := ruleFleet(t, ArmSticky, 5)
	moved, counts := 0, make([]int, 5)
	for session := uint64(1); session <= 1000; session++ {
		w := chosen(f, words(), session, 0, 1, 2, 3, 4)
		counts[w]++
		for away := range 5 {
			rest := slices.DeleteFunc([]int{0, 1, 2, 3, 4}, func(x int) bool { return x == away })
			if other := chosen(f, words(), session, rest...); w != away && other != w {
				moved++
			}
		}
	}
	if moved != 0 || slices.Min(counts) < 150 {
		t.Errorf("%d sessions moved without need; sessions by worker: %v", moved, counts)
	}
	head := words(slices.Repeat([]events.BlockHash{7}, headTokens/16)...)
	longer := words(append(slices.Clone(head.Names), 8, 9)...)
	f, _ = ruleFleet(t, ArmStickyHead, 5, head, longer)
	if a, b := chosen(f, head, 1, 0, 1, 2, 3, 4), chosen(f, longer, 2, 0, 1, 2, 3, 4); a != b {
		t.Errorf("prompts with the same head are on the workers %d and %d", a, b)
	}
}

func TestBoundedHash(t *testing.T) {
	f, r := ruleFleet(t, ArmBoundedHash, 4)
	live := []int{0, 1, 2, 3}
	for n := 1; n <= 100; n++ { // all of the same session
		w := chosen(f, words(), 1, live...)
		r.loads[w].requests++
		if bound := int(math.Ceil(1.25 * float64(n) / 4)); r.loads[w].requests > bound {
			t.Fatalf("worker %d has %d of %d requests, the bound is %d", w, r.loads[w].requests, n, bound)
		}
	}
	first := rendezvous(mix(1), live)[0]
	if got := r.loads[first].requests; got != 32 {
		t.Errorf("the session's first worker has %d requests, want 32, the bound", got)
	}
}

func TestPowerOfTwo(t *testing.T) {
	f, r := ruleFleet(t, ArmPowerOfTwo, 4)
	r.loads[2].requests = 5
	for range 200 {
		if w := chosen(f, words(), 0, 0, 1, 2, 3); w == 2 {
			t.Fatal("the busiest worker was chosen")
		}
	}
	f, r = ruleFleet(t, ArmVLLMPowerOfTwo, 2)
	f.engines[0].requests = 3 // of other routers: found at the poll
	r.loads[1].requests = 2
	if w := chosen(f, words(), 0, 0, 1); w != 1 {
		t.Error("the engines' reported load does not count")
	}
	f.engines[0].requests = 0
	if w := chosen(f, words(), 0, 0, 1); w != 1 {
		t.Error("the engines were polled again within five seconds")
	}
}

func TestCacheAware(t *testing.T) {
	long := words(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
	three, four := words(1, 2, 3, 21, 22, 23, 24, 25, 26, 27), words(1, 2, 3, 4, 31, 32, 33, 34, 35, 36)
	f, r := ruleFleet(t, ArmCacheAware, 3, long, three, four)
	r.loads[0].requests, r.loads[1].requests = 2, 2
	if w := chosen(f, long, 0, 0, 1, 2); w != 2 {
		t.Fatalf("a new prompt went to worker %d, not to the least loaded worker", w)
	}
	r.loads[2].requests = 3
	if w := chosen(f, four, 0, 0, 1, 2); w != 2 {
		t.Errorf("a match of 0.4 went to worker %d", w)
	}
	if w := chosen(f, three, 0, 0, 1, 2); w != 0 {
		t.Errorf("a match of 0.3, below the threshold, went to worker %d", w)
	}
	r.loads[2].requests = 2 + balanceAbsThreshold
	if w := chosen(f, long, 0, 0, 1, 2); w != 2 {
		t.Errorf("%d requests more are not out of balance yet: worker %d", balanceAbsThreshold, w)
	}
	r.loads[2].requests++
	if w := chosen(f, four, 0, 0, 1, 2); w != 0 {
		t.Errorf("out of balance, worker %d was chosen", w)
	}
	r.loads[0].requests, r.loads[2].requests = 200, 265 // 65 more, but not 1.5 times as many
	r.loads[1].requests = 200
	if w := chosen(f, long, 0, 0, 1, 2); w != 2 {
		t.Errorf("below 1.5 times the load, worker %d was chosen", w)
	}
	w := Workload{Engine: Defaults(), Stages: []Stage{{Rate: 1}}, Workers: treeWorkers + 1}
	w.number()
	if _, err := newSim(config(w, ArmCacheAware, 1)); err == nil {
		t.Error("the tree accepts more workers than bits")
	}
	r.rule.left(2)
	if w := chosen(f, long, 0, 0, 1, 2); w == 2 {
		t.Error("a departed worker is still in the tree")
	}
}

func TestLLMD(t *testing.T) {
	p := words(1, 2, 3, 4)
	f, r := ruleFleet(t, ArmLLMD, 3, p)
	x := r.rule.(*llmd)
	if w := chosen(f, p, 0, 1); w != 1 {
		t.Fatal("an absent worker was chosen")
	}
	// The prefix weighs 3, a queue and a full cache 2 each. The worker with the prefix loses only to both.
	x.scraped, x.queue, x.usage = 0, []int{0, 9, 0}, []float64{0.5, 0.9, 0.6}
	if w := chosen(f, p, 0, 0, 1, 2); w != 1 { // 3 + 0 + 0.2 against 0 + 2 + 1
		t.Errorf("worker %d was chosen: the prefix should win with 3.2 to 3", w)
	}
	x.usage[0] = 0.3
	if w := chosen(f, p, 0, 0, 1, 2); w != 0 { // 3.2 against 3.4
		t.Errorf("worker %d was chosen: the idle worker should win with 3.4 to 3.2", w)
	}
}

func TestRing(t *testing.T) {
	f, _ := ruleFleet(t, ArmVLLMHash, 4)
	counts := make([]int, 4)
	for session := uint64(1); session <= 2000; session++ {
		w := chosen(f, words(), session, 0, 1, 2, 3)
		counts[w]++
		if w != 0 {
			live := slices.DeleteFunc([]int{0, 1, 2, 3}, func(x int) bool { return x == w })
			if other := chosen(f, words(), session, live...); other != 0 {
				t.Fatalf("worker %d is absent, and the session went to %d, not to the first live worker", w, other)
			}
		}
	}
	if slices.Min(counts) < 300 {
		t.Errorf("sessions by worker: %v", counts)
	}
}

// TestGPU compares shared GPUs with a simulation in steps of a microsecond.
func TestGPU(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 9))
		g := &gpu{loss: float64(rng.IntN(3)) / 10}
		type want struct{ start, work, end float64 }
		var jobs []*want
		for range 12 {
			jobs = append(jobs, &want{start: float64(rng.IntN(3000)), work: float64(1 + rng.IntN(900))})
		}
		slices.SortFunc(jobs, func(a, b *want) int { return int(a.start - b.start) })
		left := make([]float64, len(jobs))
		for i := range jobs {
			left[i] = jobs[i].work
		}
		for now := 0.0; slices.Max(left) > 0; now += 0.25 {
			n := 0
			for i, j := range jobs {
				if j.start <= now && left[i] > 0 {
					n++
				}
			}
			rate := 1.0
			if n > 1 {
				rate = (1 - g.loss) / float64(n)
			}
			for i, j := range jobs {
				if j.start <= now && left[i] > 0 {
					if left[i] -= rate / 4; left[i] <= 1e-9 {
						left[i], j.end = 0, now+0.25
					}
				}
			}
		}
		next := 0
		for done := 0; done < len(jobs); {
			at := g.next()
			if next < len(jobs) && micros(jobs[next].start) <= at {
				g.start(micros(jobs[next].start), next, plan{gpu: micros(jobs[next].work)})
				next++
				continue
			}
			for _, j := range g.finished(at) {
				done++
				if d := float64(at) - jobs[j.worker].end; math.Abs(d) > 15 {
					t.Fatalf("seed %d: job %d ends at %d, want %.0f", seed, j.worker, at, jobs[j.worker].end)
				}
			}
		}
	}
}

// TestUnequalWorkers checks that a worker of double speed needs half the time, and that an absent worker gets no
// requests.
func TestUnequalWorkers(t *testing.T) {
	e := Defaults()
	w := Workload{Engine: e, Workers: 3, Speeds: []float64{1, 2, 1}, Capacities: []float64{1, 1, 0.5}}
	w.Stages = []Stage{{Rate: 1}}
	for i := range 30 {
		p := &Prompt{Tokens: 6400}
		for b := range 100 {
			p.Names = append(p.Names, events.BlockHash(1+i*100+b))
		}
		w.Stages[0].Arrivals = append(w.Stages[0].Arrivals, Arrival{At: float64(10 * i), Prompt: p, Output: 1})
	}
	w.Changes = []Change{{At: 95, Worker: 2, Up: true}, {At: 195, Worker: 0}}
	w.number()
	s, err := newSim(config(w, ArmRoundRobin, 1))
	if err == nil {
		err = s.loop(t.Context(), 30)
	}
	if err != nil {
		t.Fatal(err)
	}
	if a, b := s.engines[0].pool.capacity(), s.engines[2].pool.capacity(); a != 2*b {
		t.Errorf("capacities: %d and %d blocks", a, b)
	}
	for _, r := range s.all {
		took := (r.done - r.sent).seconds()
		want := 6400 / e.Prefill
		if r.worker == 1 {
			want /= 2
		}
		if math.Abs(took-want) > 1e-3 {
			t.Errorf("worker %d took %.3f s, want %.3f", r.worker, took, want)
		}
		if at := r.sent.seconds(); r.worker == 2 && at < 95 || r.worker == 0 && at > 195 {
			t.Errorf("the absent worker %d got a request at %.0f s", r.worker, at)
		}
	}
	w.Changes = []Change{{At: 1}, {At: 2, Worker: 1}, {At: 3, Worker: 2}}
	_, err = Simulate(t.Context(), config(w, ArmRandom, 1))
	if err == nil || !strings.Contains(err.Error(), "no worker") {
		t.Errorf("all workers left: %v", err)
	}
	w.Changes = []Change{{At: 1, Worker: 3}}
	if _, err := newSim(config(w, ArmRandom, 1)); err == nil || !strings.Contains(err.Error(), "worker 3") {
		t.Errorf("a change of an unknown worker: %v", err)
	}
}

// TestFacts checks that an arm can pass the state of every worker to a policy.
func TestFacts(t *testing.T) {
	const arm = Arm("with-facts")
	x := ways[ArmExactShared]
	defer delete(ways, arm)
	w := generated[2].workload(1, 300, MatrixEngine())
	w.Engine.Capacity = 60_000
	w.fit(w.Engine)
	w.Workers = 3
	c := config(w.AtRate(2*w.SaturatingRate(3)), arm, 1)
	calls, dropped, unique, queued, decoding := 0, 0, 0, 0, 0
	var s *sim
	x.fill = func(cand *routing.Candidate, x Facts) {
		calls++
		e := s.engines[x.Worker]
		if used := e.pool.pinned; used+x.Free+x.Evictable != e.pool.capacity() || x.DroppedUnique > x.Dropped ||
			x.Dropped > x.Evictable || x.Device > int(cand.Device)+200 {
			t.Fatalf("%d used, %+v", used, x)
		}
		dropped, unique = dropped+x.Dropped, unique+x.DroppedUnique
		queued, decoding = queued+x.QueuedWork, decoding+x.Decoding
	}
	ways[arm] = x
	var err error
	if s, err = newSim(c); err == nil {
		err = s.loop(t.Context(), c.Workload.requests())
	}
	if err != nil {
		t.Fatal(err)
	}
	if calls != 3*c.Workload.requests() || min(dropped, unique, queued, decoding) == 0 || unique == dropped {
		t.Errorf("%d calls, %d dropped, %d unique, %d queued, %d decoding", calls, dropped, unique, queued, decoding)
	}
}

func TestSessionsOf(t *testing.T) {
	var reqs []trace.Request
	for user := range uint64(6) { // a system prompt of two ids, a conversation of two turns for every user
		reqs = append(reqs, trace.Request{HashIDs: []uint64{1, 2, 10 * (user + 1)}},
			trace.Request{HashIDs: []uint64{1, 2, 10 * (user + 1), 10*(user+1) + 1}})
	}
	ids := sessionsOf(reqs)
	for i := range reqs {
		if ids[i] != ids[i/2*2] || i >= 2 && ids[i] == ids[i/2*2-1] || ids[i] == 0 {
			t.Fatalf("sessions %v", ids)
		}
	}
	reqs[0].SessionID, reqs[11].SessionID = "a", "a"
	if ids = sessionsOf(reqs); ids[0] != ids[11] || ids[0] == ids[1] {
		t.Errorf("the sessions of the trace do not count: %v", ids)
	}
}

// TestGenerated checks the shapes of the generated workloads.
func TestGenerated(t *testing.T) {
	for _, x := range generated {
		w := x.workload(1, 1000, MatrixEngine())
		turns := map[uint64]int{}
		for _, a := range w.Stages[0].Arrivals {
			turns[a.Session]++
		}
		n := float64(w.requests()) / float64(len(turns))
		if n < 0.5*x.turns || n > 1.6*x.turns {
			t.Errorf("%s has %.1f turns, want %.1f", x.name, n, x.turns)
		}
		twice := w.AtRate(2)
		if d := twice.Duration() / w.Duration(); math.Abs(d-0.5) > 1e-9 {
			t.Errorf("%s: double the rate needs %.3f of the time", x.name, d)
		}
		for worker, want := range []float64{0.8, 0.8, 1, 0.75} {
			if got := w.present(worker); x.churn && math.Abs(got-want) > 1e-9 || !x.churn && got != 1 {
				t.Errorf("%s: worker %d is there for %.3f of the run", x.name, worker, got)
			}
		}
		w.SingleTurns()
		if w.requests() != len(turns) {
			t.Errorf("%s: %d requests of %d sessions are left", x.name, w.requests(), len(turns))
		}
	}
}

// TestDraw checks that a drawn workload has whole sessions in the order of the trace, and that another seed draws other
// sessions.
func TestDraw(t *testing.T) {
	w, err := FromTrace("trace", trace.Generate(trace.Options{Seed: 1, Requests: 2000}), 64, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := map[uint64]int{}
	for _, a := range w.Stages[0].Arrivals {
		all[a.Session]++
	}
	one, other := w.draw(1, 300), w.draw(2, 300)
	turns, last := map[uint64]int{}, 0.0
	for _, a := range one.Stages[0].Arrivals {
		if turns[a.Session]++; a.At < last {
			t.Fatal("the order differs from the trace")
		}
		last = a.At
	}
	for session, n := range turns {
		if n != all[session] {
			t.Errorf("session %d has %d of %d requests", session, n, all[session])
		}
	}
	if n := one.requests(); n < 300 || n > 400 || w.requests() != 2000 {
		t.Errorf("%d requests were drawn of %d", n, w.requests())
	}
	if one.Stages[0].Arrivals[0].Prompt == other.Stages[0].Arrivals[0].Prompt {
		t.Error("two seeds draw the same")
	}
}

// TestJudge checks every target with a miss.
func TestJudge(t *testing.T) {
	cell := func(own CellArm) []string {
		own.Arm = "own"
		c := Cell{Arms: []CellArm{own, {ArmSticky, 0.5, 100, 90, 0, 300}, {defaultArm, 0.3, 130, 120, 0, 200},
			{ArmOracleGreedy, 0.6, 10, 10, 0, 10}}}
		c.judge("own")
		return c.Missed
	}
	for _, x := range []struct {
		own  CellArm
		want []string
	}{{CellArm{Reuse: 0.495, TTFTMean: 97, TTFTP99: 209}, nil},
		{CellArm{Reuse: 0.48, TTFTMean: 97, TTFTP99: 209}, []string{"reuse 48.0%: sticky"}},
		{CellArm{Reuse: 0.5, TTFTMean: 103, TTFTP99: 209, TTFTRepeats: 91},
			[]string{"91 ms is less than 25% below dynamo-1-1", "mean 103 ms: sticky"}},
		{CellArm{Reuse: 0.5, TTFTMean: 97, TTFTP99: 211}, []string{"p99 211 ms: dynamo-1-1"}}} {
		got := cell(x.own)
		ok := len(got) == len(x.want)
		for i := range x.want {
			ok = ok && strings.Contains(got[i], x.want[i])
		}
		if !ok {
			t.Errorf("%+v misses %q, want %q", x.own, got, x.want)
		}
	}
}

// TestMatrix checks that a small matrix has all cells, and that a weak arm misses targets. The race detector runs a
// quarter of the matrix.
func TestMatrix(t *testing.T) {
	t.Parallel()
	hosts := []float64{0, 1}
	if testkit.Race {
		hosts = hosts[:1]
	}
	m := Matrix{Workloads: MatrixWorkloads(60, nil), Loads: []float64{0.5}, Hosts: hosts, Seeds: testkit.Rounds(2),
		Arms: []Arm{ArmSticky, ArmOracleGreedy, ArmRandom}, Routing: routing.DefaultConfig(), Subject: ArmRandom}
	cells, err := m.Run(t.Context())
	if err != nil || len(cells) != 9*len(hosts) {
		t.Fatalf("%d cells, %v", len(cells), err)
	}
	again, err := m.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var a, b strings.Builder
	if err := m.Markdown(&a, cells); err != nil {
		t.Fatal(err)
	}
	if err := m.Markdown(&b, again); err != nil || a.String() != b.String() {
		t.Error("two runs of a matrix differ")
	}
	missed := 0
	for _, c := range cells {
		if missed += len(c.Missed); len(c.Arms) != 3 || c.Arms[0].TTFTMean <= 0 {
			t.Errorf("%+v", c)
		}
		for _, what := range c.Missed {
			if strings.Contains(what, string(ArmOracleGreedy)) {
				t.Errorf("the oracle is a rival: %s", what)
			}
		}
	}
	if missed == 0 || !strings.Contains(a.String(), "random misses a target") {
		t.Errorf("random misses no target:\n%s", a.String())
	}
}
