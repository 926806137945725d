//go:build judges

package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

const (
	askers     = 3
	askedOften = 12 // prompts
)

type tierDepths = [events.NumTiers]uint32

// said is a complete answer's data of a worker.
type said struct {
	prompt, engine int
	depth          tierDepths
}

// asking is a group of clients that query a few prompts all the time, with the true states of the prompts since the
// start.
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
	answers  map[said]time.Time        // time of the last such answer
	wrong    []string                  // impossible answers
	tallies  map[string]*harness.Tally // by the current fault
	what     string                    // is being done
	spans    []string                  // current faults since the last answer
	answered time.Time                 // last
	hurt     map[string]bool           // indexers killed or paused since the start of the round
	spoiled  bool                      // a NATS server was held, or connections were spoiled
	whole    time.Time                 // start of the last query with a complete answer
}

func startAsking(t testing.TB, w *clusterWorld, rng *rand.Rand, prompts []path) *asking {
	a := &asking{t: t, w: w, true: map[said]bool{}, answers: map[said]time.Time{}, answered: time.Now(),
		tallies: map[string]*harness.Tally{}, hurt: map[string]bool{}}
	a.during("before")
	for range askedOften {
		p := prompts[rng.IntN(len(prompts))]
		a.names, a.prompts = append(a.names, p), append(a.prompts,
			w.engines[0].hasher.Hash(nil, p.tokens(0, p.blocks())))
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
		conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: urls, Wait: true})
		if err != nil {
			t.Fatal(err)
		}
		a.conns = append(a.conns, conn)
		client := harness.Client(t, conn, "default", client.Options{})
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

// during sets the current fault.
func (a *asking) during(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.what, a.spans = what, append(a.spans, what)
	a.tallies[what] = &harness.Tally{Failures: map[string]int{}}
}

// hurts reports a coming fault of a process, by name, or of connections.
func (a *asking) hurts(what string, killed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch kind, _, _ := strings.Cut(what, " "); kind {
	case "indexer":
		a.hurt[what] = true
	case "nats-server":
		a.spoiled = a.spoiled || !killed
	case "connections":
		a.spoiled = true
	}
}

// excused reports whether an answer may be incomplete: both owners of a partition may be affected or unreachable. The
// caller holds a.mu.
func (a *asking) excused() bool { return a.spoiled || len(a.hurt) >= clusterCopies }

// wholeSince returns an error if no query since then had a complete answer.
func (a *asking) wholeSince(since time.Time) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.whole.Before(since) {
		return fmt.Errorf("the last query with a complete answer was sent %v too early; %s",
			since.Sub(a.whole), a.tallies[a.what])
	}
	return nil
}

// one sends a query for a prompt.
func (a *asking) one(client *client.Client, prompt int) {
	q := api.Query{Model: "m"}
	for _, l := range a.prompts[prompt] {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	a.mu.Lock()
	sum := a.tallies[a.what]
	a.mu.Unlock()
	begun := time.Now()
	answer, err := client.Find(ctx, &q)
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	sum.Asked++
	if err != nil {
		var verdict *api.Error
		if errors.As(err, &verdict) && (verdict.Code == api.CodeUnknownModel ||
			verdict.Code == api.CodeBlockSizeMismatch) {
			a.wrong = append(a.wrong, fmt.Sprintf("at %v: %v", now.Format("15:04:05.000"), err))
		}
		sum.Failures[fmt.Sprintf("%.100s", numbers.ReplaceAllString(err.Error(), "…"))]++
		return
	}
	sum.Answered++
	sum.Took = append(sum.Took, now.Sub(begun))
	for _, what := range a.spans {
		a.tallies[what].Gap = max(a.tallies[what].Gap, now.Sub(a.answered))
	}
	a.answered, a.spans = now, append(a.spans[:0], a.what)
	if !answer.Complete {
		if !a.excused() {
			sum.Unexcused++
			a.t.Logf("at %s, sent %v before: partitions %v are missing, without excuse", now.Format("15:04:05.000"),
				now.Sub(begun).Round(time.Millisecond), answer.Missing)
		}
		return
	}
	sum.Complete++
	if begun.After(a.whole) {
		a.whole = begun
	}
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

// numbers matches the different parts of messages of the same kind.
var numbers = regexp.MustCompile(`[0-9][0-9., :]*`)

// judge fails the test after an impossible answer, and adds the counts. It returns the longest time without an answer.
func (a *asking) judge(sums map[string]*harness.Tally) (gap time.Duration) {
	if len(a.wrong) > 0 {
		a.t.Fatalf("%d answers were wrong, although all workers were registered all the time; the first, %s", len(a.wrong),
			a.wrong[0])
	}
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
		a.t.Fatalf(
			"an answer at %v, marked as complete, had %s with %v of the prompt %q; the true values in this round were only %v",
			when.Format("15:04:05.000"), a.w.engines[s.engine].name, s.depth, a.names[s.prompt], ever)
	}
	for what, t := range a.tallies {
		if sums[what] == nil {
			sums[what] = &harness.Tally{Failures: map[string]int{}}
		}
		sums[what].Add(t)
		gap = max(gap, t.Gap)
	}
	return gap
}
