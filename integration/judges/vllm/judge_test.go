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
	requests = flag.Int("vllm.requests", 300, "requests in sequence, and the same number four at a time, to every model")
	probes   = flag.Int("vllm.probes", 40, "requests after each failure")
	restarts = flag.Int("vllm.restarts", 2, "number of kills and restarts of every model's engine")
	seed     = flag.Uint64("vllm.seed", 1, "seed of the requests")
)

func TestMain(m *testing.M) { harness.Main(m) }

// TestRealVLLM sends requests to real engines, queries kvatlas before every request, and compares the results. Between
// requests, all parts are killed.
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

// oneAtATime sends requests in sequence. kvatlas has all earlier events before every request.
func (s *stage) oneAtATime(part string, g *generator, n int) {
	s.t.Helper()
	into := s.table.row(s.engine.model.name, part)
	into.heldBack += s.settle()
	for range n {
		into.heldBack += s.observe(into, g, g.next(), alone)
	}
	s.check()
}

// observe sends a request, and settles. It returns the number of removals that the engine held back.
func (s *stage) observe(into *row, g *generator, r request, under circumstances) (heldBack int) {
	s.t.Helper()
	o := observation{request: r, under: under}
	var messages int
	o.from, messages, _ = s.twin.now()
	s.ask(&o)
	if want := s.twin.reusable(r.prompt.reusable()); o.predicted != want {
		s.t.Errorf("%s, %s: kvatlas has %d blocks, the twin %d\n%s",
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

// knowledge describes the twin's and kvatlas's state of a prompt.
func (s *stage) knowledge(p prompt) string {
	_, _, events := s.twin.now()
	w, err := s.worker()
	q := api.Query{Model: s.engine.model.name, Tokens: p.tokens, LoRA: p.lora, CacheSalt: p.salt, Explain: true}
	var explained string
	errFind := harness.HTTPDo(s.indexer.HTTP, "POST", "/v1/find", q, &explained)
	return fmt.Sprintf("the twin has %d events:\n%skvatlas: %+v, %v\n%s, %v",
		events, s.twin.describe(p), w, err, explained, errFind)
}

// ask queries kvatlas for an observation's prompt.
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
		s.t.Errorf("the engine reused %d tokens, not whole blocks", c.reused)
	}
	o.reused = c.reused / blockSize
	g.answered(o.request, c.generated)
}

// judge counts an observation, and fails the test for a difference without a class.
func (s *stage) judge(into *row, o *observation) {
	s.t.Helper()
	c := classify(s.twin, o)
	into.add(c, o)
	if c == unexplained {
		s.t.Errorf("%s, %s: kvatlas has %d blocks, the engine reused %d, of %d tokens (adapter %q, salt %q)",
			into.part, o.request.kind, o.predicted, o.reused, len(o.request.prompt.tokens),
			o.request.prompt.lora, o.request.prompt.salt)
	}
	if c == concurrent && s.twin.usableAtStep(o.request, o.from, o.to, o.reused) {
		into.atStep++
	}
}

// fourAtATime sends requests of four concurrent clients. kvatlas's answer must be the engine's announced state at a
// moment between kvatlas's events before the query and after the answer.
func (s *stage) fourAtATime(part string, n int) {
	s.t.Helper()
	const clients = 4
	into := s.table.row(s.engine.model.name, part)
	into.heldBack += s.settle()
	type asked struct {
		observation
		from, to int // kvatlas's events before the query and after the answer
	}
	all := make([][]asked, clients)
	errs := make([]error, clients)
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			// An engine with adapters crashes if prompt_logprobs meets other requests in a batch.
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
					"%s: kvatlas has %d blocks, but the engine did not announce them with events %d to %d",
					a.request.kind, a.predicted, a.from, a.to)
			}
			// The reply may be here before the last step's message.
			a.observation.to = s.twin.versionAfter(a.observation.to, afterReply)
			s.judge(into, &a.observation)
		}
	}
	s.check()
}

// afterReply is the number of messages that may arrive after a reply, although the engine sent them before: a message
// for each of the last steps.
const afterReply = 2

// killShim kills the shim, sends requests without the shim, and restarts the shim.
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

// killShimThatKnowsASalt kills the shim between two requests. The second request continues the blocks of the first. The
// engine announces the salt of both only with the first request.
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

// killIndexer kills the indexer with the NATS server, sends requests without the indexer, and restarts the indexer.
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

// unseen sends requests without queries to kvatlas.
func (s *stage) unseen(g *generator) {
	s.t.Helper()
	for range *probes {
		o := observation{request: g.next()}
		s.make(&o, g)
	}
	// Wait for the twin, to know the final state of kvatlas.
	s.fence()
}

// resetCache empties the engine's cache several times, and queries kvatlas before the engine has announced the reset.
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
		s.t.Errorf("of 3 resets, %d were missing before the next step: by docs/engines/vllm.md all are missing",
			into.counts[resetHeldBack])
	}
	s.check()
}

// killEngine kills and restarts the engine. kvatlas must drop the dead engine's blocks, and must not credit the new
// engine with them.
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
		s.t.Errorf("the new engine is credited with %d blocks of the dead engine: %v", n, err)
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
		s.t.Fatalf("the index does not receive the new engine's blocks: %v", err)
	}
	s.table.note("%s: engine killed: nothing held after %s; ready again after %.0f s; "+
		"first blocks in the index %s after the first reply, %s after readiness",
		name, gone.Round(time.Millisecond), ready.Sub(killed).Seconds(),
		time.Since(replied).Round(time.Millisecond), time.Since(ready).Round(time.Millisecond))
	s.oneAtATime("engine killed", g, *probes)
}

// longestHeld returns the past prompt with the most blocks on the engine.
func (s *stage) longestHeld(g *generator) (best prompt) {
	s.t.Helper()
	most := 0
	for _, p := range g.past {
		if n := s.twin.reusable(p.reusable()); n > most {
			best, most = p, n
		}
	}
	if n, err := s.find(best); err != nil || n != most || most == 0 {
		s.t.Fatalf("the engine holds %d blocks of the best prompt, kvatlas has %d: %v", most, n, err)
	}
	return best
}
