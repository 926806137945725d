package scatter

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

const ms = time.Millisecond

// network is the behaviour of nodes: decided in advance, and independent of the sender.
type network struct {
	rng    *rand.Rand
	silent map[string]bool                      // receive requests and do not answer
	refuse map[string]bool                      // answer with an error
	holds  map[string]map[events.Partition]bool // actually served partitions
	delay  func() time.Duration                 // of an answer
	late   []due                                // answers to finished rounds
}

// due is a future reply of a node.
type due struct {
	sent, at time.Duration
	ask      Request
}

// deliver passes late replies to Peers.
func (w *network) deliver(peers *Peers, now time.Duration) {
	w.late = slices.DeleteFunc(w.late, func(d due) bool {
		if d.at <= now && !w.refuse[d.ask.Node] {
			peers.Answered(d.ask.Node, d.at-d.sent)
		}
		return d.at <= now
	})
}

// play steps a round to its end on a network. It returns the source of each partition, and the end.
func (w *network) play(t *testing.T, r *Round, now time.Duration, wanted []Wanted,
	count func(Request)) (taken map[events.Partition]string, end time.Duration) {
	t.Helper()
	taken = map[events.Partition]string{}
	asked := map[string]bool{}
	var coming []due
	send := func(asks []Request) {
		for _, a := range asks {
			if len(a.Partitions) == 0 {
				t.Fatalf("an empty request: %+v", a)
			}
			for _, p := range a.Partitions {
				if key := fmt.Sprint(a.Node, p); asked[key] {
					t.Fatalf("node %s got two requests for partition %d", a.Node, p)
				} else {
					asked[key] = true
				}
			}
			if count != nil {
				count(a)
			}
			if !w.silent[a.Node] {
				coming = append(coming, due{now, now + w.delay(),
					Request{ID: a.ID, Node: a.Node, Partitions: slices.Clone(a.Partitions)}})
			}
		}
	}
	send(r.Begin(now, wanted))
	for steps := 0; !r.Done(); steps++ {
		if steps > 10_000 {
			t.Fatal("the round does not end")
		}
		i := -1
		for k := range coming {
			if i < 0 || coming[k].at < coming[i].at {
				i = k
			}
		}
		if i < 0 || coming[i].at > r.Next() {
			now = max(now, r.Next())
			w.deliver(r.peers, now)
			send(r.Tick(now))
			continue
		}
		d := coming[i]
		coming = slices.Delete(coming, i, i+1)
		now = d.at
		w.deliver(r.peers, now)
		if w.refuse[d.ask.Node] {
			send(r.Fail(now, d.ask.ID, true))
			continue
		}
		var not []events.Partition
		for _, p := range d.ask.Partitions {
			if !w.holds[d.ask.Node][p] {
				not = append(not, p)
			}
		}
		got, asks := r.Answer(now, d.ask.ID, not)
		for _, p := range got {
			if _, twice := taken[p]; twice || !slices.Contains(d.ask.Partitions, p) || slices.Contains(not, p) {
				t.Fatalf("partition %d came from %s, with requests for %v, not serving %v; earlier from %q", p,
					d.ask.Node, d.ask.Partitions, not, taken[p])
			}
			taken[p] = d.ask.Node
		}
		send(asks)
	}
	r.End(now)
	w.late = append(w.late, coming...)
	return taken, now
}

// TestRoundsTakeWhatCanBeHad plays random rounds on random networks: the answered partitions equal the reachable ones,
// and the rest is missing.
func TestRoundsTakeWhatCanBeHad(t *testing.T) {
	seeds := uint64(testkit.Rounds(4000))
	if testing.Short() {
		seeds = 400
	}
	incomplete := 0
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 7))
		w := &network{
			rng: rng, silent: map[string]bool{}, refuse: map[string]bool{},
			holds: map[string]map[events.Partition]bool{},
			delay: func() time.Duration { return time.Duration(rng.Int64N(int64(10 * ms))) },
		}
		nodes := make([]string, 1+rng.IntN(7))
		for i := range nodes {
			nodes[i] = fmt.Sprint("n", i)
			w.holds[nodes[i]] = map[events.Partition]bool{}
			switch rng.IntN(5) {
			case 0:
				w.silent[nodes[i]] = i > 0
			case 1:
				w.refuse[nodes[i]] = i > 0
			}
		}
		peers := NewPeers(&rpc.Budget{})
		for i := range 3 { // later rounds have penalties
			wanted := make([]Wanted, rng.IntN(20))
			can := map[events.Partition]bool{}
			for k := range wanted {
				p := events.Partition(k * 3)
				wanted[k] = Wanted{Partition: p, Fit: rng.IntN(4)}
				for _, at := range rng.Perm(len(nodes))[:rng.IntN(min(4, len(nodes)+1))] {
					wanted[k].Serving = append(wanted[k].Serving, nodes[at]) // by the view
					holds := rng.IntN(5) > 0
					w.holds[nodes[at]][p] = holds // actually
					can[p] = can[p] || holds && !w.silent[nodes[at]] && !w.refuse[nodes[at]]
				}
			}
			begin := time.Duration(i) * 300 * ms
			r := NewRound(peers, "n0", begin+time.Second, rng.IntN(8) == 0)
			taken, end := w.play(t, r, begin, wanted, nil)
			missing := r.Missing()
			for k := range wanted {
				p := wanted[k].Partition
				if _, has := taken[p]; has != can[p] || has == slices.Contains(missing, p) {
					t.Fatalf("seed %d, round %d: partition %d of %v: reachable: %v, answered: %v, missing: %v", seed, i,
						p, wanted[k].Serving, can[p], has, missing)
				}
			}
			if len(missing) > 0 {
				incomplete++
			}
			if len(missing)+len(taken) != len(wanted) || end > begin+time.Second {
				t.Fatalf("seed %d: %d wanted, %d answered, missing %v, at %v", seed, len(wanted), len(taken), missing, end)
			}
		}
	}
	if incomplete == 0 || incomplete == int(3*seeds) {
		t.Errorf("%d of %d rounds are incomplete: the test does not try both", incomplete, 3*seeds)
	}
}

// full is a view in which every partition is served by the same nodes.
func full(partitions int, nodes ...string) (wanted []Wanted) {
	for p := range partitions {
		wanted = append(wanted, Wanted{Partition: events.Partition(p), Serving: nodes, Fit: len(nodes)})
	}
	return wanted
}

func all(partitions int, nodes ...string) map[string]map[events.Partition]bool {
	out := map[string]map[events.Partition]bool{}
	for _, n := range nodes {
		out[n] = map[events.Partition]bool{}
		for p := range partitions {
			out[n][events.Partition(p)] = true
		}
	}
	return out
}

// TestHedgesKeepToTheirBudget makes a node slow at times, and then for ever: other nodes get the requests within the
// budget, and the slow node is avoided.
func TestHedgesKeepToTheirBudget(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	slow := 0.02
	w := &network{rng: rng, holds: all(8, "a", "b", "c"), delay: func() time.Duration {
		if rng.Float64() < slow {
			return 100 * ms
		}
		return ms/2 + time.Duration(rng.Int64N(int64(ms/2)))
	}}
	now := time.Duration(0)
	hedges := &rpc.Budget{Now: func() time.Time { return time.Unix(1, 0).Add(now) }}
	peers := NewPeers(hedges)
	kinds := map[Kind]int{}
	var took []time.Duration
	run := func(n int) {
		clear(kinds)
		took = took[:0]
		for range n {
			r := NewRound(peers, "me", now+5*time.Second, false)
			taken, end := w.play(t, r, now, full(8, "a", "b", "c"), func(a Request) { kinds[a.Kind]++ })
			if len(taken) != 8 {
				t.Fatal("incomplete")
			}
			took = append(took, end-now)
			now = end + 100*time.Microsecond
		}
		slices.Sort(took)
	}
	run(5000)
	t.Logf("2%% of answers take 100 ms: %v, p50 %v, p99 %v, p99.9 %v", kinds, took[2500], took[4950], took[4995])
	if kinds[Hedge] < 50 || kinds[Hedge] > 5000/rpc.HedgeRatio+rpc.HedgeBurst {
		t.Errorf("%d hedges in %d requests", kinds[Hedge], kinds[First])
	}
	if took[4950] > 10*ms {
		t.Errorf("p99 is %v although a hedge would be answered in %v", took[4950], ms)
	}
	for hedges.Spend() { // none at the begin
	}
	before, denied, asked := kinds[Hedge], 0, 0
	for i := range 400 { // fast nodes become slow all at once, and fast again for as long
		slow = float64((i/20 + 1) % 2)
		for range 10 {
			r := NewRound(peers, "me", now+5*time.Second, false)
			w.play(t, r, now, full(8, "a", "b", "c"), func(a Request) {
				if asked++; a.Kind == Hedge {
					kinds[Hedge]++
				}
			})
			denied += r.HedgesDenied
			now += 200 * time.Microsecond
		}
	}
	t.Logf("fast and slow in turns: %d hedges, %d denied, %d requests", kinds[Hedge], denied, asked)
	if kinds[Hedge]-before > asked/rpc.HedgeRatio || denied == 0 {
		t.Errorf("%d hedges in %d requests, %d denied", kinds[Hedge], asked, denied)
	}
}

// TestASilentNodeIsLeftAlone: a node that stops answering slows a few queries, not all of them.
func TestASilentNodeIsLeftAlone(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	w := &network{rng: rng, silent: map[string]bool{}, holds: all(4, "a", "b"),
		delay: func() time.Duration { return ms }}
	peers := NewPeers(&rpc.Budget{})
	now := time.Duration(0)
	run := func(n int) (slow int, asked int) {
		for range n {
			r := NewRound(peers, "me", now+5*time.Second, false)
			taken, end := w.play(t, r, now, full(4, "a", "b"), func(a Request) {
				if a.Node == "a" {
					asked++
				}
			})
			if len(taken) != 4 {
				t.Fatal("incomplete")
			}
			if end-now > 2*ms {
				slow++
			}
			now = end + ms
		}
		return slow, asked
	}
	run(1000)
	w.silent["a"] = true
	slow, asked := run(5000) // some 10 s
	t.Logf("a is silent: %d of 5000 queries were slower than usual; a got %d requests", slow, asked)
	if slow > 20 || asked > 20 || asked < 5 {
		t.Errorf("%d queries were slow, and the silent node got %d requests", slow, asked)
	}
	w.silent["a"] = false
	if _, asked := run(3000); asked < 1000 {
		t.Errorf("it answers again and got %d requests in 3000 queries", asked)
	}
}

// TestPatience: a node that waits for an event is not slow.
func TestPatience(t *testing.T) {
	peers := NewPeers(&rpc.Budget{})
	r := NewRound(peers, "me", time.Second, true)
	r.Begin(0, full(1, "a", "b"))
	if r.Next() != 250*ms {
		t.Errorf("the first step is due at %v", r.Next())
	}
	asks := r.Tick(250 * ms)
	if len(asks) != 1 || asks[0].Node != "b" || asks[0].Kind != Next || peers.penalised("a", 251*ms) {
		t.Errorf("after the time to give up: %+v; penalised: %v", asks, peers.penalised("a", 251*ms))
	}
	if taken, _ := r.Answer(400*ms, 0, nil); len(taken) != 1 || !r.Done() {
		t.Error("the answer after the timeout was not taken")
	}
}

// TestPartitionsOfOneNodeGoTogether: the number of requests is minimal for the order of preference.
func TestPartitionsOfOneNodeGoTogether(t *testing.T) {
	peers := NewPeers(&rpc.Budget{})
	wanted := []Wanted{
		{0, []string{"me", "a"}, 2}, {1, []string{"a", "b"}, 2}, {2, []string{"b", "a"}, 2}, {3, []string{"a", "me"},
			2}, {4, []string{"b", "a"}, 1},
	}
	for range 5 {
		r := NewRound(peers, "me", time.Second, false)
		asks := r.Begin(0, wanted)
		at := map[string][]events.Partition{}
		for _, a := range asks {
			at[a.Node] = append(at[a.Node], a.Partitions...)
			slices.Sort(at[a.Node])
		}
		if len(asks) > 3 || !slices.Equal(at["me"], []events.Partition{0, 3}) || !slices.Contains(at["b"], 4) {
			t.Errorf("%+v", asks)
		}
	}
}
