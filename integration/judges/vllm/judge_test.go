//go:build realvllm

package vllm

import (
	"flag"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
)

var (
	requests = flag.Int("vllm.requests", 300, "requests one at a time, and as many four at a time, to each model")
	probes   = flag.Int("vllm.probes", 40, "requests after each failure")
	restarts = flag.Int("vllm.restarts", 2, "how often each model's engine is killed and started again")
	seed     = flag.Uint64("vllm.seed", 1, "seed of the requests")
)

func TestMain(m *testing.M) { harness.Main(m) }

// TestRealVLLM makes requests to real engines, asks kvatlas before each, and compares. Between them, everything that
// can die does.
func TestRealVLLM(t *testing.T) {
	into := &table{}
	t.Cleanup(func() { t.Logf("\n%s", into) })
	for _, m := range models {
		t.Run(m.name, func(t *testing.T) {
			began := time.Now()
			s := newStage(t, m, into)
			s.table.note("%s: the engine's first start took %.0f s", m.name, time.Since(began).Seconds())
			g := newGenerator(*seed, *seed, blockSize, true)
			s.oneAtATime("one at a time", g, *requests)
			s.fourAtATime("four at a time", *requests)
			s.oneAtATime("after four at a time", g, *probes)
			s.killShim(g)
			s.killShimThatKnowsASalt(g)
			s.killIndexer(g)
			s.resetCache(g)
			for range *restarts {
				s.killEngine(g)
			}
			s.table.note("%s: %.0f s in all", m.name, time.Since(began).Seconds())
		})
	}
}

// oneAtATime makes requests one at a time, each when kvatlas knows all that the engine announced before.
func (s *stage) oneAtATime(part string, g *generator, n int) {
	s.t.Helper()
	into := s.table.row(s.engine.model.name, part)
	into.heldBack += s.settle()
	for range n {
		into.heldBack += s.observe(into, g, g.next(), alone)
	}
	s.check()
}

// observe makes one request, and settles. It returns how many removals the engine had held back.
func (s *stage) observe(into *row, g *generator, r request, under circumstances) (heldBack int) {
	s.t.Helper()
	o := observation{request: r, under: under}
	var messages int
	o.from, messages, _ = s.twin.now()
	s.ask(&o)
	if want := s.twin.reusable(r.prompt.reusable()); o.predicted != want {
		s.t.Errorf("%s, %s: kvatlas says %d blocks, the twin %d\n%s",
			into.part, r.kind, o.predicted, want, s.knowledge(r.prompt.reusable()))
	}
	if s.twin.reusable(r.prompt.reusable()) < s.twin.fullyHeld(r.prompt.reusable()) {
		into.windows++
	}
	s.make(&o, g)
	heldBack = s.settle()
	o.to, _, _ = s.twin.now()
	o.messages = s.twin.messagesFrom(messages)
	s.judge(into, &o)
	return heldBack
}

// knowledge is what the twin and kvatlas know of a prompt, for people.
func (s *stage) knowledge(p prompt) string {
	_, _, events := s.twin.now()
	w, err := s.worker()
	q := api.Query{Model: s.engine.model.name, Tokens: p.tokens, LoRA: p.lora, CacheSalt: p.salt, Explain: true}
	var explained string
	errFind := harness.HTTPDo(s.indexer.HTTP, "POST", "/v1/find", q, &explained)
	return fmt.Sprintf("the twin knows %d events:\n%skvatlas: %+v, %v\n%s, %v",
		events, s.twin.describe(p), w, err, explained, errFind)
}

// ask asks kvatlas for an observation's prompt.
func (s *stage) ask(o *observation) {
	s.t.Helper()
	var err error
	if o.predicted, err = s.find(o.request.prompt); err != nil {
		s.t.Fatal(err)
	}
}

// make makes an observation's request.
func (s *stage) make(o *observation, g *generator) {
	s.t.Helper()
	c, err := s.engine.complete(o.request)
	if err != nil {
		s.t.Fatal(err)
	}
	if c.reused%blockSize != 0 {
		s.t.Errorf("the engine reused %d tokens, which are no whole blocks", c.reused)
	}
	o.reused = c.reused / blockSize
	g.answered(o.request, c.generated)
}

// judge counts an observation, and fails the test if its difference is of no class.
func (s *stage) judge(into *row, o *observation) {
	s.t.Helper()
	c := classify(s.twin, o)
	into.add(c, o)
	if c == unexplained {
		s.t.Errorf("%s, %s: kvatlas said %d blocks, the engine reused %d, of %d tokens (adapter %q, salt %q)",
			into.part, o.request.kind, o.predicted, o.reused, len(o.request.prompt.tokens),
			o.request.prompt.lora, o.request.prompt.salt)
	}
	if c == concurrent && s.twin.usableAtStep(o.request, o.from, o.to, o.reused) {
		into.atStep++
	}
}

// fourAtATime makes requests from four clients at the same time. What kvatlas says must be what the engine had
// announced at some time between the events that kvatlas knew before the question and after it.
func (s *stage) fourAtATime(part string, n int) {
	s.t.Helper()
	const clients = 4
	into := s.table.row(s.engine.model.name, part)
	into.heldBack += s.settle()
	type asked struct {
		observation
		from, to int // events that kvatlas knew before the question and after it
	}
	all := make([][]asked, clients)
	errs := make([]error, clients)
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			// An engine with adapters ends when prompt_logprobs meets other requests in a batch.
			g := newGenerator(*seed+uint64(i)+100, *seed, blockSize, false)
			for range n / clients {
				a := asked{observation: observation{request: g.next(), under: among}}
				errs[i] = func() (err error) {
					if a.from, err = s.known(); err != nil {
						return err
					}
					var told int
					a.observation.from, _, told = s.twin.now()
					if a.predicted, err = s.find(a.request.prompt); err != nil {
						return err
					}
					if a.to, err = s.known(); err != nil {
						return err
					}
					into.notBehind(told - a.from)
					c, err := s.engine.complete(a.request)
					if err != nil {
						return err
					}
					a.reused = c.reused / blockSize
					a.observation.to, _, _ = s.twin.now()
					g.answered(a.request, c.generated)
					return nil
				}()
				if errs[i] != nil {
					return
				}
				all[i] = append(all[i], a)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			s.t.Fatal(err)
		}
	}
	into.heldBack += s.settle()
	for _, list := range all {
		for _, a := range list {
			from, to := s.twin.versionAt(a.from), s.twin.versionAt(a.to)
			if !s.twin.everUsable(a.request.prompt.reusable(), from, to, a.predicted) {
				s.t.Errorf(
					"%s: kvatlas said %d blocks, which is not what the engine had announced with events %d to %d",
					a.request.kind, a.predicted, a.from, a.to)
			}
			// The reply may be here before the last step's message.
			a.observation.to = s.twin.versionAfter(a.observation.to, afterReply)
			s.judge(into, &a.observation)
		}
	}
	s.check()
}

// afterReply is how many messages may come after a reply that the engine had sent before it: one for each of the last
// steps.
const afterReply = 2

// killShim kills the shim, makes requests without it, and starts it again.
func (s *stage) killShim(g *generator) {
	s.t.Helper()
	s.shim.Kill()
	s.unseen(g)
	began := time.Now()
	s.restartShim()
	s.table.note("%s: kvatlas knew all again %.1f s after the start of a killed shim",
		s.engine.model.name, time.Since(began).Seconds())
	s.oneAtATime("shim killed", g, *probes)
}

// killShimThatKnowsASalt kills the shim between two requests, of which the second goes on from blocks of the first.
// Only with the first one did the engine announce the salt of both.
func (s *stage) killShimThatKnowsASalt(g *generator) {
	s.t.Helper()
	r := request{kind: "salted", prompt: prompt{tokens: g.tokens(5 * blockSize), salt: salts[0]}, maxTokens: 1, n: 1}
	into := s.table.row(s.engine.model.name, "salted, shim killed")
	s.settle()
	s.observe(into, g, r, alone)
	s.shim.Kill()
	r.prompt.tokens = append(r.prompt.tokens, g.tokens(5*blockSize)...)
	s.make(&observation{request: r}, g)
	s.fence()
	s.restartShim()
	s.observe(into, g, r, alone)
	s.check()
}

// killIndexer kills the indexer with the NATS server in it, makes requests without it, and starts it again.
func (s *stage) killIndexer(g *generator) {
	s.t.Helper()
	s.indexer.Kill()
	s.unseen(g)
	began := time.Now()
	s.startIndexer()
	s.catchUp()
	s.table.note("%s: kvatlas knew all again %.1f s after the start of a killed indexer",
		s.engine.model.name, time.Since(began).Seconds())
	s.oneAtATime("indexer killed", g, *probes)
}

// unseen makes requests of which kvatlas is not asked.
func (s *stage) unseen(g *generator) {
	s.t.Helper()
	for range *probes {
		o := observation{request: g.next()}
		s.make(&o, g)
	}
	// The twin is waited for, so that one knows what kvatlas is to come to.
	s.fence()
}

// resetCache empties the engine's cache some times, and asks before the engine has announced that.
func (s *stage) resetCache(g *generator) {
	s.t.Helper()
	into := s.table.row(s.engine.model.name, "cache reset")
	for range 3 {
		into.heldBack += s.settle()
		held := s.longestHeld(g)
		if err := s.engine.post("/reset_prefix_cache", nil, nil); err != nil {
			s.t.Fatal(err)
		}
		s.observe(into, g, request{kind: "after a reset", prompt: held, maxTokens: 1, n: 1}, afterReset)
		for range *probes / 4 {
			into.heldBack += s.observe(into, g, g.next(), alone)
		}
	}
	if into.counts[resetHeldBack] != 3 {
		s.t.Errorf("of 3 resets, %d were not known before the next step: docs/engines/vllm.md says that all are",
			into.counts[resetHeldBack])
	}
	s.check()
}

// killEngine kills the engine and starts it again. kvatlas must give up the dead engine's blocks, and must not credit
// the new one with them.
func (s *stage) killEngine(g *generator) {
	s.t.Helper()
	name := s.engine.model.name
	held := s.longestHeld(g)
	killed := time.Now()
	s.engine.kill()
	if err := s.await(func() (bool, error) {
		n, err := s.find(held)
		return n == 0, err
	}); err != nil {
		s.t.Fatalf("the dead engine is still credited with blocks: %v", err)
	}
	gone := time.Since(killed)

	ready := s.startEngine()
	if n, err := s.find(held); err != nil || n != 0 {
		s.t.Errorf("the new engine is credited with %d blocks of the dead one's: %v", n, err)
	}
	o := observation{request: request{kind: "first", prompt: held, maxTokens: 1, n: 1}}
	s.make(&o, g)
	replied := time.Now()
	if o.reused != 0 {
		s.t.Errorf("the new engine reused %d blocks", o.reused)
	}
	if err := s.await(func() (bool, error) {
		n, err := s.find(held)
		return n > 0, err
	}); err != nil {
		s.t.Fatalf("the new engine's blocks do not become known: %v", err)
	}
	s.table.note("%s: engine killed: nothing held after %s; ready again after %.0f s; "+
		"its first blocks known %s after its first reply, %s after it was ready",
		name, gone.Round(time.Millisecond), ready.Sub(killed).Seconds(),
		time.Since(replied).Round(time.Millisecond), time.Since(ready).Round(time.Millisecond))
	s.oneAtATime("engine killed", g, *probes)
}

// longestHeld is the past prompt of which the engine holds most.
func (s *stage) longestHeld(g *generator) (best prompt) {
	s.t.Helper()
	most := 0
	for _, p := range g.past {
		if n := s.twin.reusable(p.reusable()); n > most {
			best, most = p, n
		}
	}
	if n, err := s.find(best); err != nil || n != most || most == 0 {
		s.t.Fatalf("of the prompt of which the engine holds most, %d blocks, kvatlas says %d: %v", most, n, err)
	}
	return best
}
