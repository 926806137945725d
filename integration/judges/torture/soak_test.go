//go:build judges && soak

package torture

import (
	"context"
	"flag"
	"fmt"
	"iter"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
	soakSample  = 2 * time.Second
	soakKill    = 20 * time.Second // between two kills
	soakBookers = 4
	soakFunnel  = 4096                  // kept blocks of a node's funnel; the default of 524,288 would not fill in an hour
	soakRest    = 20 * time.Millisecond // between two requests, and between two announcements

	// soakIndex is the permitted variation of a small index in MiB: removals are kept for a while, and arrays grow by a
	// quarter at a new maximum of held blocks.
	soakIndex = 1.0 / 16

	soakMedians = 60      // so many medians of samples are judged and printed
	soakSettle  = 1.0 / 3 // of the time passes before anything is judged: caches fill
	soakPages   = 1.0 / 2 // of the time passes before resident memory is judged

	// flatShare is the permitted rise of a quantity over the judged time, as a share of the median. For a less steady
	// quantity, the permitted rise is spreadTimes the interquartile range of the medians around the line.
	flatShare   = 0.02
	spreadTimes = 1.5
)

// TestSoak runs a cluster under load for a long time: three NATS servers, three indexers, eight engines with small
// caches, queries, bookings with ends, and a kill with a restart every twenty seconds. A process of every kind is never
// killed. The test samples the live heap after the last collection, resident memory, goroutines and descriptors of
// these processes, and the size of the log and the snapshots. Caches fill in the first third of the time. After that,
// no quantity may grow. Resident memory counts after half of the time, because the collector needs time to settle.
// Growth is the slope of Theil and Sen through medians of samples, judged by flatShare and spreadTimes. At the end
// every answer must have the engines' blocks.
func TestSoak(t *testing.T) {
	pyenv.Python(t)
	seed := scheduleSeed()
	program := func(name string) string { return harness.Program(t, name) }
	r := &soak{clusterTorture{T: t, mayhem: newMayhem(rand.New(rand.NewPCG(seed, 6))), prompts: allPaths(),
		tallies: map[string]*harness.Tally{}, programs: program}, map[string]*series{}, atomic.Value{}}
	r.killed.Store("nothing")
	r.begun = time.Now()
	r.w = startClusterWorld(t, r.rng, r.programs, r.counts, soakEngines, "--log-level", "info", "--request-expiry",
		"30s", "--funnel-blocks", fmt.Sprint(soakFunnel))
	r.w.shims[0].args = append(r.w.shims[0].args, "--http-listen", "127.0.0.1:0")
	for _, d := range []*daemon{r.w.nodes[0], r.w.shims[0]} {
		d.args = append(d.args, "--debug-listen", "127.0.0.1:0")
	}
	r.stage = r.w.stage
	defer func() {
		if t.Failed() {
			for _, d := range r.w.daemons() {
				t.Logf("the end of the output of %s (full output in %s):\n%s", d.name, d.said, d.tail(20))
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
	killed atomic.Value // kind of the last killed process
}

// series has the samples of a quantity.
type series struct {
	unit   string
	least  float64 // smaller rises do not count
	from   float64 // share of the time before the judged time
	at     []time.Duration
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
	var early []string
	for time.Since(begun) < *soakFor {
		r.load()
		r.undo(false)
		if now := time.Now(); now.After(sampleAt) {
			sampleAt = now.Add(soakSample)
			r.sample(now.Sub(begun), untouched)
			r.transcript = nil
			if early == nil && now.Sub(begun) > time.Duration(soakSettle*float64(*soakFor)) {
				early = r.profile(untouched, "early")
			}
		}
		if now := time.Now(); now.After(killAt) {
			killAt = now.Add(soakKill)
			r.startAll()
			if d := r.victim(); !slices.Contains(untouched, d) {
				r.killed.Store(strings.Fields(d.name)[0])
				r.kill(d)
			}
		}
		time.Sleep(soakRest)
	}
	r.Logf("heap profiles, early and late: %v %v", early, r.profile(untouched, "late"))
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

// book selects workers for prompts and ends the requests, in a loop. It returns the counts of results. As recommended,
// the last caller has the addresses of all NATS servers. Every other caller has a single address. The server of the
// first caller is never killed.
func (r *soak) book(ctx context.Context, number int) map[string]int {
	counts := map[string]int{}
	rng := rand.New(rand.NewPCG(uint64(number), 7))
	who, addrs := "of all NATS servers", r.w.addrs
	if number < len(addrs) {
		who, addrs = "of "+r.w.servers[number].name+" alone", addrs[number:number+1]
	}
	var urls []string
	for _, addr := range addrs {
		urls = append(urls, "nats://"+addr)
	}
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: urls, Wait: true})
	if err != nil {
		return counts // ctx has ended
	}
	defer conn.Close()
	c := harness.Client(r.T, conn, "default", client.Options{})
	for n := 0; ctx.Err() == nil; n++ {
		p := r.prompts[rng.IntN(len(r.prompts))]
		id := fmt.Sprintf("soak-%d-%d", number, n)
		_, err := c.Select(ctx, &api.SelectRequest{Query: harness.LocalsQuery(r.w.engines[0].hasher.Hash(nil,
			p.tokens(0, p.blocks()))), RequestID: id, Book: true})
		if err != nil {
			counts[fmt.Sprintf("choices by a client %s that failed, after a kill of %s: %s: %.100s", who,
				r.killed.Load(), client.CodeOf(err), numbers.ReplaceAllString(err.Error(), "…"))]++
		} else {
			_ = c.PrefillComplete(ctx, "m", id) // a node may be away: then the request expires
			_ = c.OutputBlock(ctx, &api.RequestRef{Model: "m", RequestID: id})
			freed := client.CodeOf(c.Free(ctx, "m", id))
			counts[fmt.Sprintf("choices by a client %s, freed with %q", who, freed)]++
		}
		time.Sleep(soakRest)
	}
	return counts
}

func (r *soak) add(name, unit string, at time.Duration, value float64) {
	s := r.series[name]
	if s == nil {
		s = &series{unit: unit, from: soakSettle}
		switch {
		case unit == "":
			s.least = 2
		case strings.HasSuffix(name, "resident"):
			s.least, s.from = 1, soakPages
		case strings.HasSuffix(name, "heap"):
			s.least = 1
		case strings.HasSuffix(name, "index"):
			s.least = soakIndex
		}
		r.series[name] = s
	}
	s.at, s.values = append(s.at, at), append(s.values, value)
}

const mib = 1 << 20

// sample reads the resources of processes and the storage of the cluster. A process without a reply is read at the next
// time.
func (r *soak) sample(at time.Duration, list []*daemon) {
	for _, d := range list {
		if !d.alive() {
			r.Fatalf("%s has ended without a kill", d.name)
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
		if open, err := os.ReadDir(proc + "/fd"); err == nil && kind != "nats-server" {
			r.add(kind+": descriptors", "", at, float64(len(open)))
		} else if there := r.natsCounts(0); err == nil && there != nil {
			r.add(kind+": descriptors but for connections", "", at, float64(len(open)-there.Connections))
		}
		var page string
		if r.w.ask(d, "GET", "/metrics", nil, &page) == nil { // a NATS server has none
			for _, m := range runtimeFigures.FindAllStringSubmatch(page, -1) {
				value, err := strconv.ParseFloat(m[2], 64)
				switch {
				case err != nil:
					r.Fatalf("%s says %s", d.name, m[0])
				case m[1] == "go_goroutines":
					r.add(kind+": goroutines", "", at, value)
				default:
					r.add(kind+": live heap", "MiB", at, value/mib)
				}
			}
		}
	}
	var sum natsCounts
	answers := 0
	for i := range r.w.servers {
		if there := r.natsCounts(i); there != nil {
			sum.Connections, sum.Consumers = sum.Connections+there.Connections, sum.Consumers+there.Consumers
			answers++
		}
	}
	if answers == len(r.w.servers) { // clients of a dead server move to other servers and stay there
		r.add("cluster: connections to NATS", "", at, float64(sum.Connections))
		r.add("cluster: consumers", "", at, float64(sum.Consumers))
	}
	var status api.Status
	if err := r.w.ask(r.w.nodes[0], "GET", "/v1/status", nil, &status); err != nil {
		return
	}
	log := int64(0)
	for _, p := range status.Partitions {
		log += p.Log.Bytes
	}
	if n := len(status.Partitions); n > 0 { // more while another node is away
		r.add("cluster: log of a partition", "MiB", at, float64(log)/float64(n)/mib)
	}
	r.add("cluster: snapshots", "MiB", at, float64(status.SnapshotBucket.Bytes)/mib)
	r.add("cluster: all in NATS", "MiB", at, float64(status.Store.Bytes)/mib)
	r.add("indexer: index", "MiB", at, float64(status.Index.Bytes)/mib)
	r.add("indexer: decoder", "MiB", at, float64(status.Index.DecoderBytes)/mib)
	if status.Load != nil {
		requests := uint64(0)
		for _, m := range status.Load.Models {
			requests += uint64(m.Requests)
		}
		r.add("cluster: requests", "", at, float64(requests))
	}
}

// natsCounts are counters of a NATS server.
type natsCounts struct{ Connections, Consumers int }

// natsCounts reads the counters of a NATS server; nil without a reply.
func (r *soak) natsCounts(i int) *natsCounts {
	of := &natsCounts{}
	for _, path := range []string{"/varz", "/jsz"} {
		if harness.HTTPOnce(r.w.monitors[i], "GET", path, nil, of) != nil {
			return nil
		}
	}
	return of
}

// profile writes the heap and goroutine profiles of processes to files for go tool pprof -base. A failure keeps the
// files.
func (r *soak) profile(list []*daemon, when string) (files []string) {
	for _, d := range list {
		found := profiledAt.FindStringSubmatch(d.words(d.begun.Load()))
		if found == nil {
			continue // a NATS server has none
		}
		for _, what := range []string{"heap?gc=1", "goroutine"} {
			var profile string
			if err := harness.HTTPOnce(found[1], "GET", "/debug/pprof/"+what, nil, &profile); err != nil {
				r.Fatal(err)
			}
			name, _, _ := strings.Cut(what, "?")
			file := filepath.Join(r.w.dir, strings.Fields(d.name)[0]+"-"+when+"-"+name+".pprof")
			if err := os.WriteFile(file, []byte(profile), 0o644); err != nil {
				r.Fatal(err)
			}
			files = append(files, file)
		}
	}
	return files
}

var (
	profiledAt     = regexp.MustCompile(`profiles are served" listen=(\S+)`)
	residentSet    = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)
	runtimeFigures = regexp.MustCompile(`(?m)^(go_goroutines|go_gc_heap_live_bytes) (\S+)$`)
)

// medians are the medians of equal stretches of the time, NaN where there is no sample.
func (s *series) medians() []float64 {
	all := make([][]float64, soakMedians)
	for i, at := range s.at {
		k := min(int(at*soakMedians / *soakFor), soakMedians-1)
		all[k] = append(all[k], s.values[i])
	}
	out := make([]float64, soakMedians)
	for k := range all {
		out[k] = median(all[k])
	}
	return out
}

func median(values []float64) float64 { return quantile(values, 0.5) }

func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	values = slices.Sorted(slices.Values(values))
	at := q * float64(len(values)-1)
	low, part := values[int(at)], at-math.Floor(at)
	return low + part*(values[min(int(at)+1, len(values)-1)]-low)
}

// line returns the line of Theil and Sen through the judged medians: the rise, the median, and the interquartile range
// of the residuals.
func (s *series) line() (rise, middle, spread float64) {
	all := s.medians()
	from := int(s.from * soakMedians)
	var at, values, slopes, rest []float64
	for k, v := range all[from:] {
		if !math.IsNaN(v) {
			at, values = append(at, float64(k)), append(values, v)
		}
	}
	for i := range at {
		for j := range i {
			slopes = append(slopes, (values[i]-values[j])/(at[i]-at[j]))
		}
	}
	slope := median(slopes)
	for i := range at {
		rest = append(rest, values[i]-slope*at[i])
	}
	return slope * float64(soakMedians-from), median(values), quantile(rest, 0.75) - quantile(rest, 0.25)
}

// judge prints all series, and fails for every growing series.
func (r *soak) judge() {
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "WHAT\tUNIT\tSAMPLES\tMEDIAN\tRISE\tSPREAD\tBOUND OF RISE\n")
	var grown []string
	names := slices.Sorted(maps.Keys(r.series))
	for _, name := range names {
		s := r.series[name]
		if len(s.at) < 2*soakMedians {
			r.Errorf("%s has only %d samples: increase the duration", name, len(s.at))
			continue
		}
		rise, middle, spread := s.line()
		bound := max(flatShare*middle, spreadTimes*spread, s.least)
		fmt.Fprintf(table, "%s\t%s\t%d\t%.4g\t%+.3g\t%.3g\t%.3g\n", name, s.unit, len(s.at), middle, rise, spread, bound)
		if !(rise <= bound) {
			grown = append(grown, name)
		}
	}
	_ = table.Flush()
	r.Logf("lines through medians of %v, after %v, for resident memory after %v:\n%s",
		*soakFor/soakMedians, time.Duration(soakSettle*float64(*soakFor)).Round(time.Second),
		time.Duration(soakPages*float64(*soakFor)).Round(time.Second), text.String())
	for kind, list := range groups(names) {
		r.Logf("%s, medians of %v:\n%s", kind, *soakFor/soakMedians, r.course(kind, list))
	}
	if len(grown) > 0 {
		r.Errorf("not flat: %s", strings.Join(grown, "; "))
	}
}

// groups returns the series of every kind of process, in order.
func groups(names []string) iter.Seq2[string, []string] {
	return func(yield func(string, []string) bool) {
		for len(names) > 0 {
			kind, _, _ := strings.Cut(names[0], ":")
			n := 0
			for n < len(names) && strings.HasPrefix(names[n], kind+":") {
				n++
			}
			if !yield(kind, names[:n]) {
				return
			}
			names = names[n:]
		}
	}
}

// course is a table of all medians of some series.
func (r *soak) course(kind string, names []string) string {
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprint(table, "AFTER")
	var columns [][]float64
	for _, name := range names {
		s := r.series[name]
		fmt.Fprintf(table, "\t%s", strings.TrimSpace(strings.TrimPrefix(name, kind+": ")+" "+s.unit))
		columns = append(columns, s.medians())
	}
	for k := range soakMedians {
		fmt.Fprintf(table, "\n%v", time.Duration(k+1)*(*soakFor/soakMedians))
		for _, c := range columns {
			fmt.Fprintf(table, "\t%.4g", c[k])
		}
	}
	_ = table.Flush()
	return text.String()
}
