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

// TestTortureCluster applies the faults of TestTorture to a cluster: three NATS servers, three indexers with a part of
// the partitions each, and four engines with shims. All of them are processes, which are killed, paused, disconnected,
// restarted in sequence, doubled in number and left without a quorum, during queries of clients. An answer marked as
// complete must have, for every worker, a true state of some moment of the round, and no answer may report the model as
// unknown. After a round all processes run again. Then the replicas of every partition must be equal, and every node
// must answer with the announced blocks.
//
// The test counts the answers, the complete answers and their latencies by fault. It also counts incomplete answers
// without an excuse: an excuse is two affected indexers, an unreachable indexer, or a paused NATS server.
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
			t.Logf("seed %d, round %d; transcript:\n%s", seed, r.round, strings.Join(r.transcript, "\n"))
			if r.w != nil {
				for _, d := range r.w.daemons() {
					t.Logf("the end of the output of %s (full output in %s):\n%s", d.name, d.said, d.tail(40))
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
	tallies  map[string]*harness.Tally // by fault

	what   string        // the fault of this round
	gap    time.Duration // the longest gap of the round
	asking *asking
	hurt   map[*daemon]bool // in a round without a quorum
}

// play plays a round: a settled cluster, a fault under load, and the settled cluster again.
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
	if kind > 3 { // the first rounds play every rare kind
		kind = 1 + r.rng.IntN(10)
	}
	var do func()
	switch kind {
	case 1:
		r.what, do = "twice the nodes", r.double
	case 2:
		r.what, do = "all processes restart in sequence", r.rollingRestart
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

// load announces events of an engine. In a round, every second engine never becomes empty, because its worker must
// never appear empty.
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

// faults plays faults in sequence.
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
		d := 300 // long enough for faults during all kinds of work; some faults last
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

// victim returns a process for a fault. Only a single NATS server is affected at a time, because a quorum needs two.
func (r *clusterTorture) victim() *daemon {
	all := append(slices.Clone(r.w.nodes), r.w.nodes...)
	all = append(all, r.w.shims...)
	if !slices.ContainsFunc(r.w.servers, func(d *daemon) bool { return !d.alive() || r.held[d] }) {
		all = append(all, r.w.servers...)
	}
	return all[r.rng.IntN(len(all))]
}

// rollingRestart restarts every process gracefully under load. A process restarts after the process before is ready.
func (r *clusterTorture) rollingRestart() {
	for _, d := range slices.Concat(r.w.servers, r.w.nodes, r.w.shims) {
		r.note("%s restarts", d.name)
		r.counts["restarts in sequence"]++
		d.stop()
		d.start()
		r.while(d.name+" is back", func() error { return r.w.back(d) })
	}
}

// noQuorum stops two of the three NATS servers under load: no event, no lease and no node's record can be written.
// Nodes continue to answer queries completely from memory, also after the kill of a node. The cluster recovers with the
// servers, without restarts.
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
			return fmt.Errorf("another %v remain", left)
		}
		return r.asking.wholeSince(begun.Add(lasts / 2))
	})
	r.note("without a quorum for %v", time.Since(begun).Round(time.Millisecond))
}

// double doubles the number of nodes, with or without faults, waits until the new nodes have their share, and removes
// random nodes.
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

// settle ends all faults and waits until all nodes have all announced events and no partition moves.
func (r *clusterTorture) settle() {
	r.undo(true)
	r.note("all faults end")
	r.w.mend()
	r.w.awaitMarks()
	r.w.until("the cluster is in order", r.w.settled)
	r.w.marked = r.w.awaitMarks() // the index then has the shims' resyncs too
	r.note("settled")
}

// verify compares the replicas, queries every prompt on every node, and reads the programs' output.
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
