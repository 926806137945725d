package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/wire"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

const (
	askers     = 3
	askedOften = 12 // prompts
)

type tierDepths = [events.NumTiers]uint32

// said is what a complete answer said of one worker.
type said struct {
	prompt, engine int
	depth          tierDepths
}

// asking is clients that ask for a few prompts all the time, and what was true of these prompts since they began.
type asking struct {
	t       testing.TB
	w       *clusterWorld
	prompts [][]events.LocalHash
	names   []path
	conns   []*jetstream.Conn
	stop    context.CancelFunc
	done    sync.WaitGroup

	true map[said]bool // by the test's goroutine alone

	mu       sync.Mutex
	answers  map[said]time.Time // when it was said last
	tally    tally
	answered time.Time // last
}

// tally counts answers.
type tally struct {
	asked, answered, complete int
	took                      []time.Duration // of those that came
	gap                       time.Duration   // the longest time without any
	failures                  map[string]int
}

func (t *tally) String() string {
	slices.Sort(t.took)
	if len(t.took) == 0 {
		return fmt.Sprintf("%d asked, none answered: %v", t.asked, t.failures)
	}
	share := func(n int) float64 { return 100 * float64(n) / float64(t.asked) }
	return fmt.Sprintf("%d asked, %.2f %% answered, %.2f %% complete, p50 %v, p99 %v, longest gap %v; others: %v", t.asked, share(t.answered), share(t.complete),
		t.took[len(t.took)/2].Round(10*time.Microsecond), t.took[len(t.took)*99/100].Round(10*time.Microsecond), t.gap.Round(time.Millisecond), t.failures)
}

func startAsking(t testing.TB, w *clusterWorld, rng *rand.Rand, prompts []path) *asking {
	a := &asking{t: t, w: w, true: map[said]bool{}, answers: map[said]time.Time{}, answered: time.Now()}
	a.tally.failures = map[string]int{}
	for range askedOften {
		p := prompts[rng.IntN(len(prompts))]
		a.names, a.prompts = append(a.names, p), append(a.prompts, w.engines[0].hasher.Hash(nil, p.tokens(0, p.blocks())))
	}
	for _, mark := range w.marked {
		a.names, a.prompts = append(a.names, "mark"), append(a.prompts, []events.LocalHash{mark})
	}
	for i, e := range w.engines {
		e.changed = func() {
			for j, locals := range a.prompts {
				a.true[said{j, i, e.truth.Match(locals)}] = true
			}
		}
		e.changed()
	}
	ctx, stop := context.WithCancel(context.Background())
	a.stop = stop
	for i := range askers {
		var urls []string
		for j := range w.addrs {
			urls = append(urls, "nats://"+w.addrs[(i+j)%len(w.addrs)])
		}
		conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: urls})
		if err != nil {
			t.Fatal(err)
		}
		a.conns = append(a.conns, conn)
		client := wire.NewClient(conn, "default")
		seed := rng.Uint64()
		a.done.Go(func() {
			rng := rand.New(rand.NewPCG(seed, 3))
			for ctx.Err() == nil {
				a.one(client, rng.IntN(len(a.prompts)))
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	return a
}

// one asks for one prompt.
func (a *asking) one(client *api.Client, prompt int) {
	q := api.Query{Model: "m"}
	for _, l := range a.prompts[prompt] {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	begun := time.Now()
	answer, err := client.Find(ctx, &q)
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tally.asked++
	if err != nil {
		a.tally.failures[fmt.Sprintf("%.80s", err)]++
		return
	}
	a.tally.answered++
	a.tally.took = append(a.tally.took, now.Sub(begun))
	a.tally.gap = max(a.tally.gap, now.Sub(a.answered))
	a.answered = now
	if !answer.Complete {
		return
	}
	a.tally.complete++
	for i, e := range a.w.engines {
		s := said{prompt: prompt, engine: i}
		for _, o := range answer.Workers {
			if string(o.Instance) == e.name {
				s.depth = tierDepths{o.Device, o.Host, o.Disk, o.External}
			}
		}
		a.answers[s] = now
	}
}

// end ends the clients.
func (a *asking) end() {
	a.stop()
	a.done.Wait()
	for _, c := range a.conns {
		c.Close()
	}
	for _, e := range a.w.engines {
		e.changed = nil
	}
}

// judge fails the test if a complete answer said what was never true, and adds what was counted.
func (a *asking) judge(sum *tally) {
	for s, when := range a.answers {
		if a.true[s] {
			continue
		}
		var ever []tierDepths
		for was := range a.true {
			if was.prompt == s.prompt && was.engine == s.engine {
				ever = append(ever, was.depth)
			}
		}
		a.t.Fatalf("an answer at %v, complete by its own word, said that %s holds %v of the prompt %q; true was, at some time in this round, only %v",
			when.Format("15:04:05.000"), a.w.engines[s.engine].name, s.depth, a.names[s.prompt], ever)
	}
	sum.asked, sum.answered, sum.complete = sum.asked+a.tally.asked, sum.answered+a.tally.answered, sum.complete+a.tally.complete
	sum.took, sum.gap = append(sum.took, a.tally.took...), max(sum.gap, a.tally.gap)
	if sum.failures == nil {
		sum.failures = map[string]int{}
	}
	for why, n := range a.tally.failures {
		sum.failures[why] += n
	}
}
