//go:build judges

package whatif

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/whatif"
)

var (
	requests = flag.Int("requests", 1500, "requests of each run")
	rate     = flag.Float64("rate", 45, "requests per second")
	seedFlag = flag.Uint64("seed", 1, "seed of the requests")
)

// The constants of the engines. A step has at most batch tokens, and lasts stepBase plus the time of the tokens.
const (
	batch    = 2048
	stepBase = 12 * time.Millisecond
	speed    = 9000.0 // tokens per second
)

// job is a request at an engine.
type job struct {
	tokens []uint32
	hit    int // tokens
	left   int
	done   chan struct{}
}

// stepper serves requests in steps of real time, in order of arrival.
type stepper struct {
	sim  *enginesim.Engine
	jobs chan *job
}

func (s *stepper) run(t *testing.T, ctx context.Context) {
	var list []*job
	for {
		if len(list) == 0 {
			select {
			case <-ctx.Done():
				return
			case j := <-s.jobs:
				list = append(list, j)
			}
		}
		for more := true; more; {
			select {
			case j := <-s.jobs:
				list = append(list, j)
			default:
				more = false
			}
		}
		budget := batch
		for _, j := range list {
			if budget == 0 {
				break
			}
			if j.left < 0 { // not admitted yet
				hit, err := s.sim.Serve(j.tokens, nil)
				if err != nil {
					t.Error(err)
				}
				j.hit = min(hit, (len(j.tokens)-1)/harness.BlockSize) * harness.BlockSize
				j.left = len(j.tokens) - j.hit
			}
			n := min(j.left, budget)
			j.left, budget = j.left-n, budget-n
		}
		time.Sleep(stepBase + time.Duration(float64(batch-budget)/speed*float64(time.Second)))
		for len(list) > 0 && list[0].left == 0 {
			close(list[0].done)
			list = list[1:]
		}
	}
}

// arrival is a request of the workload.
type arrival struct {
	at      time.Duration
	session string
	tokens  []uint32
}

// workload returns conversations with one of three system prompts, at random moments.
func workload() (list []arrival) {
	r := rand.New(rand.NewPCG(*seedFlag, 1))
	type conversation struct {
		id     string
		tokens []uint32
		turns  int
	}
	var open []*conversation
	at := 0.0
	for i := range *requests {
		c := r.IntN(len(open) + 4)
		if c >= len(open) {
			c = len(open)
			open = append(open, &conversation{id: fmt.Sprint("s", i), tokens: harness.Tokens(1+10_000*r.IntN(3), 700),
				turns: 3 + r.IntN(8)})
		}
		x := open[c]
		x.tokens = append(x.tokens[:len(x.tokens):len(x.tokens)], harness.Tokens(100_000+3000*i, 150+r.IntN(700))...)
		at += r.ExpFloat64() / *rate
		list = append(list, arrival{time.Duration(at * float64(time.Second)), x.id, x.tokens})
		if x.turns--; x.turns == 0 {
			open = append(open[:c], open[c+1:]...)
		}
	}
	return list
}

// serve runs the workload on a fleet with the given workers and blocks, and returns the report for each list of flags.
func serve(t *testing.T, workers, blocks int, changes ...[]string) (reports []*whatif.Report) {
	t.Helper()
	fleet := harness.StartFleet(t, harness.FleetConfig{Nodes: 3, Workers: workers, Capacity: blocks,
		Serve: []string{"--record"}, Shim: []string{"--max-num-batched-tokens", fmt.Sprint(batch)}})
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	steppers := map[events.WorkerID]*stepper{}
	var engines, under sync.WaitGroup
	stop, stopEngines := context.WithCancel(ctx)
	for worker, e := range fleet.Engines {
		s := &stepper{e, make(chan *job, *requests)}
		steppers[worker] = s
		engines.Go(func() { s.run(t, stop) })
	}
	begin := time.Now()
	for i, a := range workload() {
		node := fleet.Asks[i%len(fleet.Asks)]
		time.Sleep(time.Until(begin.Add(a.at)))
		under.Go(func() {
			id := fmt.Sprint("r", i)
			s, err := node.Select(ctx, &client.SelectRequest{RequestID: id, Book: true, SessionID: a.session,
				ExpectedOutputTokens: 1, Query: client.Query{Model: "m", BlockSize: harness.BlockSize, Tokens: a.tokens}})
			if err != nil {
				t.Error(err)
				return
			}
			j := &job{tokens: a.tokens, left: -1, done: make(chan struct{})}
			steppers[s.Worker].jobs <- j
			<-j.done
			for _, err := range []error{node.PrefillComplete(ctx, "m", id),
				node.Report(ctx, &api.Report{RequestID: id, CachedTokens: uint64(j.hit)}), node.Free(ctx, "m", id)} {
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	under.Wait()
	stopEngines()
	engines.Wait()
	fleet.AwaitRecords(t, uint64(3**requests))
	for _, args := range changes {
		out := harness.Run(t, "indexer", append([]string{"what-if", "--json", "--nats", fleet.NATS}, args...)...)
		rep := &whatif.Report{}
		if err := json.Unmarshal([]byte(out.Stdout), rep); err != nil || out.Code != 0 {
			t.Fatalf("%q: %+v, %v", args, out, err)
		}
		reports = append(reports, rep)
	}
	return reports
}

// TestPredictions replays the recording of a fleet, and predicts the effect of two more workers and of twice the
// memory. Then it makes both changes for real, with the same requests.
func TestPredictions(t *testing.T) {
	const workers, blocks = 8, 700
	base := serve(t, workers, blocks, nil, []string{"--workers", "+2"}, []string{"--capacity", "2x"})
	show := func(name string, f *whatif.Figures) {
		t.Logf("%-26s %5.1f %%  TTFT mean %4.0f ms, p50 %4.0f ms, p99 %4.0f ms", name, 100*f.HitRate, 1000*f.TTFTMean,
			1000*f.TTFTP50, 1000*f.TTFTP99)
	}
	// near has no limit of the p99: the engines run in real time, so pauses of the machine determine it.
	near := func(name string, got, want, points, mean float64, a, b *whatif.Figures) {
		t.Helper()
		if math.Abs(got-want) > points {
			t.Errorf("%s: the hit rate is %.4f, measured %.4f", name, got, want)
		}
		if d := a.TTFTMean/b.TTFTMean - 1; math.Abs(d) > mean {
			t.Errorf("%s: the mean TTFT is %+.0f %% of the measured one", name, 100*d)
		}
	}
	for _, x := range []struct {
		name string
		f    *whatif.Figures
		most float64
	}{{"history", &base[0].History, 0.01}, {"today's fleet", &base[0].Baseline, 0.02}} {
		show(x.name, x.f)
		near(x.name, x.f.HitRate, base[0].Measured.HitRate, x.most, 0.25, x.f, &base[0].Measured)
	}
	show("measured", &base[0].Measured)
	t.Logf("notes: %q, engine %+v", base[0].Notes, base[0].Engine)
	for i, real := range []*whatif.Report{serve(t, workers+2, blocks, nil)[0], serve(t, workers, 2*blocks, nil)[0]} {
		name := []string{"two more workers", "twice the memory"}[i]
		show(name+", replay", base[i+1].Changed)
		show(name+", expected", base[i+1].Expected)
		show(name+", measured", &real.Measured)
		near(name, base[i+1].Expected.HitRate, real.Measured.HitRate, 0.03, 0.35, base[i+1].Expected, &real.Measured)
	}
}
