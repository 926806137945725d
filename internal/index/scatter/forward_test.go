package scatter

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// forwarding is a fleet with forwarded queries. Messages need time and are lost.
type forwarding struct {
	*fleet
	scatters map[string]*Scatter
	reports  *Reports      // of all nodes
	faulty   func() string // fault of a forwarded query: "", "lost", "slow", "unreported", "unsent", "held"
	budget   rpc.Budget    // of hedges, of all nodes

	mu       sync.Mutex
	answers  map[string][]*api.Answer // received by a client, by its reply subject
	outcomes map[string]int
}

func newForwarding(t *testing.T, f *fleet, partitions uint32, faulty func() string) *forwarding {
	f.finishes = true
	g := &forwarding{fleet: f, scatters: map[string]*Scatter{}, faulty: faulty, answers: map[string][]*api.Answer{},
		outcomes: map[string]int{}}
	g.reports = NewReports(func(origin string, reports []byte) {
		go func() {
			time.Sleep(g.delay())
			g.scatters[origin].Finished(reports)
		}()
	})
	for name, n := range f.nodes {
		g.scatters[name] = New(Config{
			Self: name, Partitions: partitions, PartitionOf: partitionOf, Local: n, View: func() View { return f },
			Transport: f, Hedges: &g.budget,
			Forward: func(to string, patience time.Duration, _, reply string, body []byte) error {
				return g.forward(to, patience, reply, body)
			},
			Metrics: forwardMetrics{g: g},
		})
	}
	return g
}

// forwardMetrics counts forwarded queries by outcome.
type forwardMetrics struct {
	NoMetrics
	g *forwarding
}

func (m forwardMetrics) Forwarded(outcome string) {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	m.g.outcomes[outcome]++
}

func (g *forwarding) deliver(reply string, a *api.Answer) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answers[reply] = append(g.answers[reply], a)
}

func (g *forwarding) forward(to string, patience time.Duration, reply string, body []byte) error {
	fault, there := g.faulty(), g.delay()
	if fault == "unsent" {
		return rpc.ErrDisconnected
	}
	body = slices.Clone(body)
	go func() {
		time.Sleep(there)
		if state := g.states[to]; fault == "lost" || state == "silent" || state == "dead" {
			return // no report
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		f, err := ReadForwarded(body)
		if err != nil {
			g.t.Error(err)
			return
		}
		if fault == "slow" {
			time.Sleep(time.Duration(5+rand.IntN(400)) * ms)
		}
		var a *api.Answer
		if g.states[to] == "failing" {
			err = api.Errorf(api.CodeInternal, "disk on fire")
		} else {
			_, a, err = g.scatters[to].Finish(ctx, f)
		}
		summary := &api.Answer{}
		if err == nil {
			*summary = *a
			time.Sleep(g.delay())
			g.deliver(reply, a)
		}
		if fault == "held" {
			time.Sleep(6 * time.Second)
		}
		if fault != "unreported" {
			g.reports.Add(f, summary, failure(err))
		}
	}()
	return nil
}

// query sends a query to a node like a client: it is forwarded if possible, and otherwise answered there. It returns
// all answers within six seconds, and the error if the answer is one.
func (g *forwarding) query(t *testing.T, node string, q *api.Query, reply string) (forwarded bool, list []*api.Answer,
	err error) {
	s := g.scatters[node]
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	here := func() (err error) {
		a, err := s.Find(ctx, q)
		if err == nil {
			g.deliver(reply, a)
		}
		return err
	}
	f := s.Forward(ctx, api.MsgPack, q)
	if f == nil {
		err = here()
		return false, g.answers[reply], err
	}
	ended, begun := 0, time.Now()
	f.Send(reply, func(summary *api.Answer, _ time.Duration) {
		g.mu.Lock()
		ended++
		g.mu.Unlock()
		if summary == nil {
			err = here()
		}
		if took := time.Since(begun); took > 4*time.Second {
			t.Errorf("an answer was there after %v", took)
		}
	})
	time.Sleep(6 * time.Second)
	synctest.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if ended != 1 {
		t.Errorf("a forwarded query ended %d times", ended)
	}
	return true, g.answers[reply], err
}

// TestForwardedAnswersAreTheSame sends random queries to random clusters, with lost and late messages, and nodes that
// are missing, slow or failing. All answers equal the answer of a scattered query, and each query is counted once.
func TestForwardedAnswersAreTheSame(t *testing.T) {
	seeds := uint64(testkit.Rounds(240))
	if testing.Short() {
		seeds = 200
	}
	outcomes, forwarded, twice := map[string]int{}, 0, 0
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 5))
			f := replicated(t, rng)
			if seed%4 == 0 {
				f, _, _, _ = newFleet(t, rng)
			}
			partitions := uint32(len(f.serving))
			faults := []string{"", "", "lost", "slow", "unreported", "unsent", "held"}
			g := newForwarding(t, f, partitions, func() string { return faults[rand.IntN(len(faults))] })
			for seed%3 == 0 && g.budget.Spend() { // no hedges, so missing reports time out
			}
			for i := range 12 {
				node := []string{"n0", "n1"}[rng.IntN(2)]
				if g.scatters[node] == nil {
					node = "n0"
				}
				q := query(rng, partitions)
				was := *q
				if i == 6 { // the workers of a model change their hashing
					for _, n := range f.nodes {
						for k := range n.workers {
							if n.workers[k].model == "m1" {
								n.workers[k].ahead = (n.workers[k].ahead + 1) % 4
							}
						}
					}
				}
				is, got, err := g.query(t, node, q, fmt.Sprint(i))
				if !reflect.DeepEqual(*q, was) {
					t.Errorf("seed %d, query %d: %+v became %+v", seed, i, was, *q)
				}
				if !is {
					continue
				}
				forwarded++
				ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
				want, wantErr := g.scatters[node].Find(ctx, q)
				cancel()
				if code(err) != code(wantErr) || err == nil && len(got) == 0 {
					t.Errorf("seed %d, query %d %+v: %d answers and %v, not %v", seed, i, q, len(got), err, wantErr)
				}
				if wantErr == nil { // which missing partitions a node without such workers reports depends on the node
					want.Partitions = nil
				}
				for _, a := range got {
					for _, p := range a.Partitions {
						if p.Seq != events.StreamSeq(10+p.Partition) {
							t.Errorf("seed %d, query %d: %+v differs from its node's answer", seed, i, p)
						}
					}
					if a.Partitions = nil; !reflect.DeepEqual(a, want) {
						t.Errorf("seed %d, query %d %+v:\n got %+v\nwant %+v", seed, i, q, a, want)
					}
				}
				if len(got) > 1 {
					twice++
				}
			}
			time.Sleep(10 * time.Second)
			synctest.Wait()
			for name, s := range g.scatters {
				if n := len(s.forwards.list); n > 0 || s.forwards.wake != 0 {
					t.Errorf("seed %d: node %s still waits for %d forwards", seed, name, n)
				}
			}
			for o, n := range g.outcomes {
				outcomes[o] += n
			}
		})
	}
	t.Log(forwarded, "forwarded", outcomes, twice, "answered twice")
	for _, o := range []string{ForwardAnswered, ForwardDeclined, ForwardHedged, ForwardGivenUp, ForwardUnsent} {
		if outcomes[o] < int(seeds)/100 {
			t.Errorf("the outcome %q came %d times only", o, outcomes[o])
		}
	}
}

// replicated makes a random cluster of three nodes with two replicas. At times a node is missing or failing, or does
// not serve an announced partition.
func replicated(t *testing.T, rng *rand.Rand) *fleet {
	partitions := 3 + rng.IntN(6)
	f := &fleet{
		t: t, nodes: map[string]*node{}, states: map[string]string{}, serving: make([][]string, partitions),
		fit: make([]int, partitions), delay: func() time.Duration { return time.Duration(100+rand.IntN(900)) * ms / 1000 },
	}
	names, truth, knows := []string{"n0", "n1", "n2"}, map[string]bool{}, map[string]bool{}
	for _, name := range names {
		f.nodes[name] = &node{partitions: uint32(partitions),
			seq:    func(p events.Partition) events.StreamSeq { return events.StreamSeq(10 + p) },
			serves: func(p events.Partition) bool { return truth[fmt.Sprint(name, p)] }}
	}
	if rng.IntN(4) == 0 {
		f.states[names[1+rng.IntN(2)]] = []string{"silent", "dead", "failing"}[rng.IntN(3)]
	}
	for p := range partitions {
		for _, at := range rng.Perm(3)[:2] {
			f.serving[p] = append(f.serving[p], names[at])
			truth[fmt.Sprint(names[at], p)] = rng.IntN(60) > 0
		}
		if f.fit[p] = 2; rng.IntN(20) == 0 {
			f.fit[p] = 1
		}
	}
	for i := range rng.IntN(40) {
		p := events.Partition(rng.IntN(partitions))
		w := worker{name: events.WorkerID(fmt.Sprintf("p%d-w%d", p, i)), partition: p, size: 4, held: prompt(rng),
			model: fmt.Sprint("m", rng.IntN(3))}
		if w.model == "m1" {
			w.ahead = uint32(rng.IntN(3))
		}
		if w.model == "m2" && rng.IntN(12) == 0 {
			w.size = 8
		}
		knows[fmt.Sprint(p, w.model)] = true
		for name, n := range f.nodes {
			if truth[fmt.Sprint(name, p)] {
				n.workers = append(n.workers, w)
			}
		}
	}
	f.models = func(p events.Partition, model string) bool { return knows[fmt.Sprint(p, model)] }
	return f
}

// three returns three nodes with two replicas of each of three partitions.
func three(t *testing.T, faulty func() string) *forwarding {
	f := &fleet{
		t: t, nodes: map[string]*node{}, states: map[string]string{},
		serving: [][]string{{"n0", "n1"}, {"n1", "n2"}, {"n2", "n0"}}, fit: []int{2, 2, 2},
		delay: func() time.Duration { return ms / 2 }, models: func(_ events.Partition, m string) bool { return m == "m" },
	}
	for name := range map[string]bool{"n0": true, "n1": true, "n2": true} {
		n := &node{partitions: 3, seq: func(events.Partition) events.StreamSeq { return 1 },
			serves: func(p events.Partition) bool { return slices.Contains(f.serving[p], name) }}
		for p := range events.Partition(3) {
			if n.serves(p) {
				n.workers = append(n.workers, worker{name: events.WorkerID(fmt.Sprintf("p%d-w", p)), partition: p,
					model: "m", size: 4, held: make([]uint32, 4+4*p)})
			}
		}
		f.nodes[name] = n
	}
	return newForwarding(t, f, 3, faulty)
}

// TestForwardChooses: queries are forwarded to a node that finishes queries, has all missing partitions, and is neither
// slow nor declining; other queries are answered here.
func TestForwardChooses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fault := ""
		g := three(t, func() string { return fault })
		s, n := g.scatters["n0"], 0
		q := &api.Query{Model: "m", Hashes: g.nodes["n0"].workers[0].blocks(make([]uint32, 16), &api.Query{})}
		ask := func(why string, q *api.Query, forwarded bool) {
			t.Helper()
			n++
			is, got, err := g.query(t, "n0", q, fmt.Sprint(n))
			if is != forwarded || len(got) == 0 != (err != nil) {
				t.Errorf("%s: forwarded %v, %d answers, %v", why, is, len(got), err)
			}
			for _, a := range got {
				if !a.Complete || len(a.Workers) != 3 || a.Workers[0].Device != 3 {
					t.Errorf("%s: %+v", why, a)
				}
			}
		}
		ask("hashes", q, true)
		ask("tokens, first", &api.Query{Model: "m", Tokens: make([]uint32, 16)}, false)
		ask("tokens", &api.Query{Model: "m", Tokens: make([]uint32, 16)}, true)
		for why, change := range map[string]func(*api.Query){
			"explain": func(q *api.Query) { q.Explain = true },
			"raw":     func(q *api.Query) { q.Raw = true },
			"min_seq": func(q *api.Query) { q.MinSeq = []api.PartitionSeq{{Partition: 1, Seq: 1}} },
			"model":   func(q *api.Query) { q.Model = "other" },
			"size":    func(q *api.Query) { q.BlockSize = 8 },
		} {
			other := *q
			change(&other)
			ask(why, &other, false)
		}
		named := *q
		named.Partitions = []events.Partition{0, 1, 2}
		ask("partitions", &named, false)
		g.finishes = false
		ask("nobody finishes", q, false)
		g.finishes = true
		s.cfg.Store = func(*api.Query, uint32) Question { return available{} }
		ask("a shared store", q, false)
		s.cfg.Store = nil
		g.fit[1] = 0
		ask("nobody is fit", q, false)
		g.fit[1] = 2
		fault = "lost"
		ask("it is lost", q, true)
		fault = ""
		time.Sleep(2 * penaltyTime)
		one, two := s.peers.finishes("n1", s.now()), s.peers.finishes("n2", s.now())
		if one == two {
			t.Errorf("after a forward was lost n1 may finish queries: %v, n2: %v", one, two)
		}
		ask("one is penalised", q, true)
		for _, node := range []string{"n1", "n2"} {
			s.peers.Answered(node, ms) // to a request
			s.peers.Declined(node, s.now())
		}
		ask("both have declined", q, false)
		time.Sleep(penaltyTime)
		ask("a while ago", q, true)
	})
}

// available is a question to an available store.
type available struct{}

func (available) Asked() bool                        { return true }
func (available) Merge(context.Context, *api.Answer) {}

// TestForwardsAreBounded: queries beyond the bound are answered here.
func TestForwardsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := three(t, func() string { return "lost" })
		s := g.scatters["n0"]
		for i := range uint64(maxForwards) {
			s.forwards.list[1<<40+i] = &Forward{}
		}
		if f := s.Forward(t.Context(), api.JSON, &api.Query{Model: "m", Hashes: api.Hashes{1}}); f != nil {
			t.Error("there was room for a further forward")
		}
	})
}

// TestForwardedCodec: a truncated message is neither a forwarded query nor a report.
func TestForwardedCodec(t *testing.T) {
	in := &Forwarded{Origin: "a", ID: 1 << 60, ContentType: api.JSON, hashedFor: 16}
	body, err := appendForwarded(in, &api.Query{Model: "m", Hashes: api.Hashes{1, 2}}, &api.Answer{Blocks: 2})
	if err != nil {
		t.Fatal(err)
	}
	out, err := ReadForwarded(body)
	if err != nil {
		t.Fatal(err)
	}
	if out.query, out.share = nil, nil; !reflect.DeepEqual(in, out) {
		t.Errorf("got %+v, not %+v", out, in)
	}
	for n := range body {
		if _, err := ReadForwarded(body[:n]); err == nil {
			t.Errorf("%d of %d bytes were read", n, len(body))
		}
	}
	s := New(Config{Partitions: 1})
	var reports []byte
	r := NewReports(func(origin string, b []byte) { reports = append(reports, b...) })
	r.Add(in, &api.Answer{Blocks: 2}, nil)
	r.Flush()
	for n := range reports {
		ended := 0
		s.forwards.list[in.ID] = &Forward{s: s, ended: func(*api.Answer, time.Duration) { ended++ }}
		if s.Finished(reports[:n]); ended > 0 || s.forwards.remove(in.ID) == nil {
			t.Errorf("%d of %d bytes of a report were read", n, len(reports))
		}
	}
	var got *api.Answer
	s.forwards.list[in.ID] = &Forward{s: s, ended: func(a *api.Answer, _ time.Duration) { got = a }}
	s.Finished(slices.Concat(reports, reports, []byte{0xc1}))
	if got == nil || got.Blocks != 2 {
		t.Errorf("the report says %+v", got)
	}
	if failure(errors.New("x")).Code != api.CodeInternal {
		t.Error("an error is none")
	}
}

// TestReportsTravelTogether: reports to an origin within five milliseconds are one message, unless they are large or
// the origin must answer. Each report has its wait.
func TestReportsTravelTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type message struct {
			origin string
			at     time.Duration
			ids    []uint64
			waited []time.Duration
		}
		var mu sync.Mutex
		var sent []message
		begun := time.Now()
		r := NewReports(func(origin string, reports []byte) {
			m := message{origin: origin, at: time.Since(begun)}
			for in := (msgp.Reader{Data: reports}); in.Left() > 0; {
				one, ok := readReport(&in)
				if !ok {
					t.Fatal("a report is not whole")
				}
				m.ids, m.waited = append(m.ids, one.id), append(m.waited, one.waited)
			}
			mu.Lock()
			defer mu.Unlock()
			sent = append(sent, m)
		})
		add := func(origin string, id uint64, failure *api.Error) {
			r.Add(&Forwarded{Origin: origin, ID: id}, &api.Answer{}, failure)
		}
		add("a", 1, nil)
		time.Sleep(reportWithin / 2)
		add("a", 2, nil)
		add("b", 3, nil)
		time.Sleep(2 * reportWithin)
		add("a", 4, nil)
		add("a", 5, api.Errorf(api.CodeNotReady, "no"))
		for i := range uint64(maxReports) {
			add("b", 10+i, nil)
		}
		add("b", 6, nil)
		r.Flush()
		time.Sleep(10 * reportWithin)
		synctest.Wait()
		half := reportWithin / 2
		want := []message{
			{"a", reportWithin, []uint64{1, 2}, []time.Duration{reportWithin, half}},
			{"b", reportWithin + half, []uint64{3}, []time.Duration{reportWithin}},
			{"a", 5 * half, []uint64{4, 5}, []time.Duration{0, 0}},
			{"b", 5 * half, nil, nil},
			{"b", 5 * half, []uint64{6}, []time.Duration{0}},
		}
		for i := range uint64(maxReports) {
			want[3].ids, want[3].waited = append(want[3].ids, 10+i), append(want[3].waited, 0)
		}
		if !reflect.DeepEqual(sent, want) {
			t.Errorf("sent\n%v, not\n%v", sent, want)
		}
	})
}

// TestNotForwardedInAHurry: a query with little time is not forwarded, because this node might answer too before the
// report. A query with more time is forwarded, and answered once.
func TestNotForwardedInAHurry(t *testing.T) {
	for _, left := range []time.Duration{5 * ms, 20 * ms, 100 * ms} {
		synctest.Test(t, func(t *testing.T) {
			g := three(t, func() string { return "" })
			g.delay = func() time.Duration { return 200 * time.Microsecond }
			s := g.scatters["n0"]
			q := &api.Query{Model: "m", Hashes: g.nodes["n0"].workers[0].blocks(make([]uint32, 16), &api.Query{})}
			ctx, cancel := context.WithTimeout(t.Context(), left)
			defer cancel()
			f := s.Forward(ctx, api.MsgPack, q)
			if hurry := left < 10*reportWithin; (f == nil) != hurry {
				t.Fatalf("%v are left, forwarded: %v", left, f != nil)
			}
			if f != nil {
				f.Send("reply", func(a *api.Answer, _ time.Duration) {
					if a == nil {
						t.Errorf("%v were left, and the finisher's answer came in time", left)
					}
				})
			}
			time.Sleep(10 * time.Second)
		})
	}
}
