//go:build judges && soak

package torture

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var soakFor = flag.Duration("soak.for", time.Hour, "how long TestSoak runs")

const (
	soakEngines = 8
	soakSample  = 5 * time.Second
	soakKill    = 20 * time.Second // between two of them
	soakBookers = 4
	soakRest    = 20 * time.Millisecond // of each between two requests, and between two announcements

	// flatShare is how much of its mean a quantity may grow over the time that is judged, where it is steadier than
	// that; else it may grow by twice its own spread around the line.
	flatShare = 0.05
)

// TestSoak is a cluster under load for a long time: three NATS servers, three indexers, eight engines whose small
// caches churn, queries, choices that are booked and freed, and every twenty seconds a process that is killed and
// started again. One of each kind of process is never touched. Of these, memory, goroutines and descriptors are
// sampled, and of the cluster how much log and snapshots take. After a third of the time, in which caches fill, each
// may not grow: a line through its samples is judged by flatShare. At the end every answer must be what the engines
// say.
func TestSoak(t *testing.T) {
	pyenv.Python(t)
	seed := scheduleSeed()
	program := func(name string) string { return harness.Program(t, name) }
	r := &soak{clusterTorture{T: t, mayhem: newMayhem(rand.New(rand.NewPCG(seed, 6))), prompts: allPaths(),
		tallies: map[string]*harness.Tally{}, programs: program}, map[string]*series{}}
	r.begun = time.Now()
	r.w = startClusterWorld(t, r.rng, r.programs, r.counts, soakEngines, "--log-level", "info", "--request-expiry",
		"30s")
	r.stage = r.w.stage
	defer func() {
		if t.Failed() {
			for _, d := range r.w.daemons() {
				t.Logf("the end of what %s said (all of it is in %s):\n%s", d.name, d.said, d.tail(20))
			}
		}
		r.w.end()
		for _, name := range slices.Sorted(maps.Keys(r.counts)) {
			t.Logf("%7d %s", r.counts[name], name)
		}
	}()
	r.settle()
	r.run()
	r.settle()
	r.verify()
	r.judge()
}

type soak struct {
	clusterTorture
	series map[string]*series
}

// series are samples of one quantity.
type series struct {
	unit   string
	at     []float64 // hours
	values []float64
}

// run keeps everything under load until the time is over.
func (r *soak) run() {
	asking := startAsking(r.T, r.w, r.rng, r.prompts)
	r.hurts = asking.hurts
	ctx, stop := context.WithCancel(context.Background())
	var bookers sync.WaitGroup
	booked := make([]map[string]int, soakBookers)
	for i := range booked {
		bookers.Go(func() { booked[i] = r.book(ctx, i) })
	}
	untouched := []*daemon{r.w.servers[0], r.w.nodes[0], r.w.shims[0]}
	begun := time.Now()
	sampleAt, killAt := begun, begun.Add(soakKill)
	for time.Since(begun) < *soakFor {
		r.load()
		r.undo(false)
		if now := time.Now(); now.After(sampleAt) {
			sampleAt = now.Add(soakSample)
			r.sample(now.Sub(begun), untouched)
			r.transcript = nil
		}
		if now := time.Now(); now.After(killAt) {
			killAt = now.Add(soakKill)
			r.startAll()
			if d := r.victim(); !slices.Contains(untouched, d) {
				r.kill(d)
			}
		}
		time.Sleep(soakRest)
	}
	stop()
	bookers.Wait()
	for _, counts := range booked {
		for what, n := range counts {
			r.counts[what] += n
		}
	}
	r.undo(true)
	r.settle()
	asking.end()
	asking.judge(r.tallies)
	for _, what := range slices.Sorted(maps.Keys(r.tallies)) {
		r.Logf("%s: %s", what, r.tallies[what])
	}
}

// book chooses workers for prompts and ends the requests, again and again. It returns how often what came of it.
func (r *soak) book(ctx context.Context, number int) map[string]int {
	counts := map[string]int{}
	rng := rand.New(rand.NewPCG(uint64(number), 7))
	addr := r.w.addrs[number%len(r.w.addrs)]
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{"nats://" + addr}, Wait: true})
	if err != nil {
		return counts // ctx has ended
	}
	defer conn.Close()
	c := harness.Client(r.T, conn, "default", client.Options{})
	for n := 0; ctx.Err() == nil; n++ {
		p := r.prompts[rng.IntN(len(r.prompts))]
		id := fmt.Sprintf("soak-%d-%d", number, n)
		_, err := c.Select(ctx, &client.SelectRequest{Query: harness.LocalsQuery(r.w.engines[0].hasher.Hash(nil,
			p.tokens(0, p.blocks()))), RequestID: id, Book: true})
		if err != nil {
			counts[fmt.Sprintf("choices that failed: %s", client.CodeOf(err))]++
		} else {
			_ = c.PrefillComplete(ctx, "m", id) // a node may be away: then the request expires
			_ = c.OutputBlock(ctx, &client.RequestRef{Model: "m", RequestID: id})
			freed := client.CodeOf(c.Free(ctx, "m", id))
			counts[fmt.Sprintf("choices, freed with %q", freed)]++
		}
		time.Sleep(soakRest)
	}
	return counts
}

func (r *soak) add(name, unit string, at time.Duration, value float64) {
	s := r.series[name]
	if s == nil {
		s = &series{unit: unit}
		r.series[name] = s
	}
	s.at, s.values = append(s.at, at.Hours()), append(s.values, value)
}

// sample reads what processes take, and what the cluster stores. A node that does not answer is read the next time.
func (r *soak) sample(at time.Duration, list []*daemon) {
	for _, d := range list {
		if !d.alive() {
			r.Fatalf("%s, which nobody has touched, does not run", d.name)
		}
		proc := fmt.Sprintf("/proc/%d", d.running.cmd.Process.Pid)
		status, err := os.ReadFile(proc + "/status")
		if err != nil {
			r.Fatal(err)
		}
		kind := strings.Fields(d.name)[0]
		if m := residentSet.FindSubmatch(status); m != nil {
			kb, _ := strconv.ParseFloat(string(m[1]), 64)
			r.add(kind+": resident", "MiB", at, kb/1024)
		}
		if open, err := os.ReadDir(proc + "/fd"); err == nil {
			r.add(kind+": descriptors", "", at, float64(len(open)))
		}
	}
	node := r.w.nodes[0]
	if n, err := r.goroutines(node); err == nil {
		r.add("indexer: goroutines", "", at, n)
	}
	var status api.Status
	if err := r.w.ask(node, "GET", "/v1/status", nil, &status); err != nil {
		return
	}
	log := int64(0)
	for _, p := range status.Partitions {
		log += p.Log.Bytes
	}
	r.add("log of the node's partitions", "MiB", at, float64(log)/(1<<20))
	r.add("bucket of snapshots", "MiB", at, float64(status.SnapshotBucket.Bytes)/(1<<20))
	if status.Load != nil {
		requests := uint64(0)
		for _, m := range status.Load.Models {
			requests += uint64(m.Requests)
		}
		r.add("requests under way", "", at, float64(requests))
	}
}

var (
	residentSet = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)
	goroutines  = regexp.MustCompile(`(?m)^go_goroutines (\S+)$`)
)

func (r *soak) goroutines(d *daemon) (float64, error) {
	addr, err := d.served()
	if err != nil {
		return 0, err
	}
	reply, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	text := new(strings.Builder)
	if err := reply.Write(text); err != nil {
		return 0, err
	}
	m := goroutines.FindStringSubmatch(strings.ReplaceAll(text.String(), "\r\n", "\n"))
	if m == nil {
		return 0, fmt.Errorf("%s says no number of goroutines", d.name)
	}
	return strconv.ParseFloat(m[1], 64)
}

// line is the least squares line through the samples after the first third: by how much it rises over them, their mean,
// and their spread around it.
func (s *series) line() (rise, mean, spread float64) {
	from := len(s.at) / 3
	at, values := s.at[from:], s.values[from:]
	n := float64(len(at))
	var sx, sy, sxx, sxy float64
	for i := range at {
		sx, sy, sxx, sxy = sx+at[i], sy+values[i], sxx+at[i]*at[i], sxy+at[i]*values[i]
	}
	slope := 0.0
	if d := n*sxx - sx*sx; d > 0 {
		slope = (n*sxy - sx*sy) / d
	}
	mean = sy / n
	for i := range at {
		off := values[i] - mean - slope*(at[i]-sx/n)
		spread += off * off
	}
	return slope * (at[len(at)-1] - at[0]), mean, math.Sqrt(spread / n)
}

// judge prints all series, and fails for each that grows.
func (r *soak) judge() {
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "WHAT\tUNIT\tSAMPLES\tFIRST\tMEAN\tLAST\tRISE\tSPREAD\n")
	var grown []string
	for _, name := range slices.Sorted(maps.Keys(r.series)) {
		s := r.series[name]
		if len(s.at) < 12 {
			r.Fatalf("%s has only %d samples: let it run for longer", name, len(s.at))
		}
		rise, mean, spread := s.line()
		fmt.Fprintf(table, "%s\t%s\t%d\t%.4g\t%.4g\t%.4g\t%+.3g\t%.3g\n", name, s.unit, len(s.at),
			s.values[len(s.at)/3], mean, s.values[len(s.at)-1], rise, spread)
		if rise > max(flatShare*mean, 2*spread) {
			grown = append(grown, name)
		}
	}
	_ = table.Flush()
	r.Logf("after the first third of %v:\n%s", *soakFor, text.String())
	if len(grown) > 0 {
		r.Errorf("not flat: %s", strings.Join(grown, "; "))
	}
}
