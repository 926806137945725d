//go:build judges

package torture

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestTortureCluster does to a cluster what TestTorture does to one indexer: three NATS servers, three indexers that
// each keep a part, four engines with their shims, all of them processes that are killed, held, cut off from each
// other, restarted one by one, doubled in number and left without a quorum, while clients ask. An answer that calls
// itself complete must say of every worker what was true of it at some moment of the round, and none may say that the
// model is unknown. After each round all runs again; then the replicas of each partition must be equal, and every node
// must answer what the engines announced.
//
// How many answers came, how many were complete and how long they took is counted, for what was done to the cluster
// meanwhile; and how many were not complete though no two indexers, no way to one, and no NATS server that goes on
// standing still could be the reason.
func TestTortureCluster(t *testing.T) {
	pyenv.Python(t)
	seed, rounds := scheduleSeed(), roundsOr(3)
	r := &clusterTorture{T: t, mayhem: newMayhem(rand.New(rand.NewPCG(seed, 2))), prompts: allPaths(),
		tallies: map[string]*harness.Tally{}, programs: func(name string) string { return harness.Program(t, name) }}
	if *tortureRace {
		r.programs = racingPrograms(t)
	}
	begun := time.Now()
	defer func() {
		if r.asking != nil {
			r.asking.end()
		}
		if t.Failed() {
			t.Logf("seed %d, round %d; what was done in it:\n%s", seed, r.round, strings.Join(r.transcript, "\n"))
			if r.w != nil {
				for _, d := range r.w.daemons() {
					t.Logf("the end of what %s said (all of it is in %s):\n%s", d.name, d.said, d.tail(40))
				}
			}
		}
		if r.w != nil {
			r.w.end()
		}
		t.Logf("seed %d, %d rounds in %v", seed, r.round, time.Since(begun).Round(time.Second))
		for _, name := range slices.Sorted(maps.Keys(r.counts)) {
			t.Logf("%7d %s", r.counts[name], name)
		}
		for _, what := range slices.Sorted(maps.Keys(r.tallies)) {
			t.Logf("%s: %s", what, r.tallies[what])
		}
	}()
	for r.round = 1; r.round <= rounds; r.round++ {
		r.play()
		t.Logf("round %d ended after %v in all: %s; the longest time without an answer was %v", r.round,
			time.Since(begun).Round(time.Second), r.what, r.gap.Round(time.Millisecond))
	}
	r.round--
}

type clusterTorture struct {
	*testing.T
	mayhem
	programs func(string) string
	w        *clusterWorld
	round    int
	prompts  []path
	tallies  map[string]*harness.Tally // by what was done

	what   string        // is done in this round
	gap    time.Duration // the longest one of it
	asking *asking
	hurt   map[*daemon]bool // in this round without a quorum
}

// play plays one round: a settled cluster, something that is done to it under load, and the cluster settled again.
func (r *clusterTorture) play() {
	r.transcript, r.begun = nil, time.Now()
	if r.w == nil || r.rng.IntN(15) == 0 {
		r.what = "a new deployment"
		if r.w != nil {
			r.w.end()
		}
		r.counts["deployments"]++
		r.w = startClusterWorld(r.T, r.rng, r.programs, r.counts, clusterEngines)
		r.stage = r.w.stage
		r.note("a new deployment in %s", r.w.dir)
		r.settle()
	}
	r.asking = startAsking(r.T, r.w, r.rng, r.prompts)
	r.hurts = r.asking.hurts
	kind, lives := r.round, r.lives()
	if kind > 3 { // the first rounds are of each rare kind
		kind = 1 + r.rng.IntN(10)
	}
	var do func()
	switch kind {
	case 1:
		r.what, do = "twice the nodes", r.double
	case 2:
		r.what, do = "everything restarts, one by one", r.rollingRestart
	case 3:
		r.what, do = "no quorum", r.noQuorum
	default:
		r.what, do = "faults", r.faults
	}
	for range 20 {
		r.load()
	}
	r.asking.during(r.what)
	do()
	r.asking.during("after " + r.what)
	r.settle()
	asking := r.asking
	r.asking = nil
	asking.end()
	r.gap = asking.judge(r.tallies)
	for d, life := range lives {
		if r.what == "no quorum" && d.running != life && !r.hurt[d] {
			r.Fatalf("%s had to be started again after there was no quorum", d.name)
		}
	}
	r.verify()
	r.counts["rounds: "+r.what]++
}

// load has an engine announce something. In a round, every other engine never lets all go: its worker may at no time
// seem to hold nothing.
func (r *clusterTorture) load() {
	i := r.rng.IntN(len(r.w.engines))
	e, n := r.w.engines[i], r.rng.IntN(40)
	if steady := (i+r.round)%2 == 0; steady {
		n += 2
	}
	switch n {
	case 0:
		r.note("%s clears", e.name)
		e.clear()
	case 1:
		seen := r.rng.IntN(2) == 0
		r.note("%s begins a new life; its connections end: %v", e.name, seen)
		r.counts["engine restarts"]++
		e.restart(seen)
	case 2:
		k := 1 + r.rng.IntN(5)
		r.note("the next %d messages of %s are dropped; they can be replayed", k, e.name)
		r.counts["messages dropped, to be replayed"] += k
		e.drop(k, true)
	default:
		e.announce()
	}
}

// lives are the lives of all indexers and shims.
func (r *clusterTorture) lives() map[*daemon]*running {
	all := map[*daemon]*running{}
	for _, d := range append(slices.Clone(r.w.nodes), r.w.shims...) {
		all[d] = d.running
	}
	return all
}

// while lets load go on until something has come about.
func (r *clusterTorture) while(what string, check func() error) {
	r.Helper()
	r.w.until(what, func() error {
		r.load()
		return check()
	})
}

// faults does one thing after another.
func (r *clusterTorture) faults() {
	for range 30 + r.rng.IntN(50) {
		r.step()
	}
}

func (r *clusterTorture) step() {
	r.undo(false)
	switch n := r.rng.IntN(100); {
	case n < 50:
		for range 1 + r.rng.IntN(8) {
			r.load()
		}
	case n < 65:
		d := 300 // so that faults meet work of every kind, and some last
		if r.rng.IntN(4) == 0 {
			d = 3000
		}
		time.Sleep(time.Duration(r.rng.IntN(d)) * time.Millisecond)
	case n < 75:
		r.kill(r.victim())
	case n < 82:
		r.hold(r.victim())
	case n < 92:
		r.spoilConnection()
	default:
		r.startAll()
	}
}

// victim is a process that something is done to. Of NATS servers one at a time is hurt: two are needed to agree.
func (r *clusterTorture) victim() *daemon {
	all := append(slices.Clone(r.w.nodes), r.w.nodes...)
	all = append(all, r.w.shims...)
	if !slices.ContainsFunc(r.w.servers, func(d *daemon) bool { return !d.alive() || r.held[d] }) {
		all = append(all, r.w.servers...)
	}
	return all[r.rng.IntN(len(all))]
}

// rollingRestart restarts every process in good order, each when the one before is back, while load goes on.
func (r *clusterTorture) rollingRestart() {
	for _, d := range slices.Concat(r.w.servers, r.w.nodes, r.w.shims) {
		r.note("%s restarts", d.name)
		r.counts["restarts, one by one"]++
		d.stop()
		d.start()
		r.while(d.name+" is back", func() error { return r.w.back(d) })
	}
}

// noQuorum takes two of the three NATS servers away under load: no event, no lease and no node's record can be written.
// Queries go on from what nodes have in memory, and whole, even if one of the nodes is killed besides. When the servers
// are back everything is, with nothing started again.
func (r *clusterTorture) noQuorum() {
	r.hurt = map[*daemon]bool{}
	kill := r.rng.IntN(4) > 0
	for _, i := range r.rng.Perm(len(r.w.servers))[:2] {
		d := r.w.servers[i]
		if kill {
			r.note("%s is killed", d.name)
			r.count("kill -9 of nats-server")
			d.kill()
		} else {
			r.note("%s is held", d.name)
			r.count("SIGSTOP of nats-server")
			r.hurts(d.name, false)
			d.signal(syscall.SIGSTOP)
			defer func() {
				r.note("%s goes on", d.name)
				d.signal(syscall.SIGCONT)
			}()
		}
	}
	r.count("quorums lost")
	if some := append(slices.Clone(r.w.nodes), r.w.shims...); r.rng.IntN(2) == 0 {
		d := some[r.rng.IntN(len(some))]
		r.note("%s is killed", d.name)
		r.count("kill -9 of " + strings.Fields(d.name)[0])
		r.hurt[d] = true
		r.hurts(d.name, true)
		d.kill()
	}
	lasts := time.Duration(1000+r.rng.IntN(9000)) * time.Millisecond
	begun := time.Now()
	r.w.await("there are whole answers without a quorum", func() error {
		r.load()
		time.Sleep(time.Duration(r.rng.IntN(50)) * time.Millisecond)
		if left := lasts - time.Since(begun); left > 0 {
			return fmt.Errorf("it lasts another %v", left)
		}
		return r.asking.wholeSince(begun.Add(lasts / 2))
	})
	r.note("without a quorum for %v", time.Since(begun).Round(time.Millisecond))
}

// double adds as many nodes as there are, with faults meanwhile or without, waits until they have their share, and
// takes as many away again, whichever.
func (r *clusterTorture) double() {
	faults := r.round == 1 || r.rng.IntN(2) == 0
	r.note("%d nodes are added", len(r.w.spare))
	r.w.nodes, r.w.spare = append(r.w.nodes, r.w.spare...), nil
	if faults {
		r.asking.during(r.what + " come, with faults")
	} else {
		r.asking.during(r.what + " come")
	}
	r.startAll()
	if faults {
		for range 15 {
			r.step()
		}
	}
	r.settle()
	killed := 0
	r.asking.during("half of the nodes go, none killed")
	r.rng.Shuffle(len(r.w.nodes), func(i, j int) { r.w.nodes[i], r.w.nodes[j] = r.w.nodes[j], r.w.nodes[i] })
	for range clusterNodes {
		d := r.w.nodes[len(r.w.nodes)-1]
		r.w.nodes, r.w.spare = r.w.nodes[:len(r.w.nodes)-1], append(r.w.spare, d)
		if r.rng.IntN(3) == 0 {
			r.note("%s is killed for good", d.name)
			killed++
			r.asking.during(fmt.Sprintf("half of the nodes go, %d killed", killed))
			r.hurts(d.name, true)
			d.kill()
			r.counts["nodes killed for good"]++
		} else {
			r.note("%s leaves", d.name)
			d.stop()
			r.counts["nodes that left"]++
		}
		for range 5 {
			r.load()
		}
	}
}

// settle ends every fault and waits until all nodes have what all engines have said, and no partition moves.
func (r *clusterTorture) settle() {
	r.undo(true)
	r.note("all faults end")
	r.w.mend()
	r.w.awaitMarks()
	r.w.until("the cluster is in order", r.w.settled)
	r.w.marked = r.w.awaitMarks() // what shims were asked to say again is there too
	r.note("settled")
}

// verify compares the replicas, asks every node for every prompt, and reads what the programs said.
func (r *clusterTorture) verify() {
	r.w.until("all replicas are compared", r.w.replicas)
	for _, d := range r.w.nodes {
		r.counts["answers judged at rounds' ends"] += r.w.judge(d, r.prompts)
	}
	for _, e := range r.w.engines {
		r.counts["events announced"] += e.events
		e.events = 0
	}
	r.listen(r.T)
}
