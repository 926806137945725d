//go:build judges

package engines

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestSGLangAsJudge runs random load through SGLang's own radix caches: with full attention (RadixCache), with a
// sliding window (SWARadixCache) and with Mamba states (MambaRadixCache). Every answer must be equal to the cached
// blocks of full attention. Without windows and states, the engine credits a request with these blocks. SGLang
// announces no windows and states. With them, the engine may credit fewer blocks, and the answer is marked as an upper
// bound. 0.5.23 has UnifiedRadixCache, a single class for hybrid models with components for windows, states or both.
func TestSGLangAsJudge(t *testing.T) {
	t.Parallel()
	x := startJudgedIndexer(t)
	sum := &tally{of: map[string]*counts{}}
	t.Cleanup(func() { sum.log(t) })
	hybrids := []string{"full", "swa:3", "mamba"}
	for _, c := range []struct {
		pinned string
		kinds  []string
	}{{"sglang==0.5.12", hybrids}, {"sglang==0.5.18", hybrids}, {"sglang==0.5.23", append(hybrids, "swa:3+mamba")}} {
		for _, kind := range c.kinds {
			for _, size := range []int{4, 16} {
				t.Run(fmt.Sprintf("%s/%s/%d", c.pinned, kind, size), func(t *testing.T) {
					t.Parallel()
					for seed := *judgeFirst; seed < *judgeFirst+uint64(*judgeSeeds); seed++ {
						runSGLang(t, x, c.pinned, kind, size, seed, sum)
					}
				})
			}
		}
	}
}

func runSGLang(t *testing.T, x *harness.Indexer, pinned, kind string, size int, seed uint64, sum *tally) {
	groups, bound := []string{"full"}, api.Bound("")
	for group := range strings.SplitSeq(strings.TrimPrefix(kind, "full"), "+") {
		name, blocks, _ := strings.Cut(group, ":")
		if n, err := strconv.Atoi(blocks); err == nil {
			group = fmt.Sprintf("%s:%d", name, n*size)
		}
		if group != "" {
			groups = append(groups, group)
		}
	}
	if len(groups) > 1 {
		bound = api.BoundFullAttentionOnly
	}
	engine := pyenv.StartEngine(t, pyenv.EngineOptions{Wheel: pyenv.Wheel(t, pinned),
		Cache: &pyenv.EngineCache{BlockSize: size, Blocks: judgeBlocks, Groups: groups}})
	instance, model := fmt.Sprintf("%s-%s-%d-%d", pinned, kind, size, seed), fmt.Sprint("SGLang, blocks of ", size)
	shim := harness.Start(t, "worker-shim", "run", "--engine", engine.Endpoint, "--replay", engine.Replay, "--worker",
		instance, "--model", model, "--block-size", strconv.Itoa(size),
		"--source", "sglang", "--kv-groups", strings.Join(groups, ","), "--nats", x.NATS)
	shim.WaitFor("connected to the engine")
	l := &load{t: t, rng: rand.New(rand.NewPCG(seed, uint64(size))), engine: engine, size: size, groups: groups[:1],
		plain: true, salts: []string{""}}
	var n counts
	for step := range judgeSteps {
		if l.rng.IntN(4) > 0 {
			l.step()
			continue
		}
		asked := make([]harness.Prompt, 6)
		for i := range asked {
			asked[i] = l.question()
		}
		var said struct{ Whole, Main []int }
		engine.Do(map[string]any{"op": "lookup", "prompts": asked}, &said)
		l.wait(x, model, instance)
		for i, p := range asked {
			found := harness.OverlapOf(t, x, model, instance, p)
			got := int(found.Device) * size
			n.lookups++
			if got > 0 {
				n.hits++
			}
			if said.Whole[i] < said.Main[i] {
				n.cut++
			}
			if got != said.Main[i] || said.Whole[i] > got || len(groups) == 1 && said.Whole[i] != got ||
				got > 0 && found.Bound != bound {
				n.wrong++
				t.Errorf(
					"seed %d, step %d: of %d tokens kvatlas finds %d cached (%s); full attention has %d, the engine would credit %d", seed, step, len(p.Tokens), got, found.Bound, said.Main[i], said.Whole[i])
			}
		}
		if n.wrong > 5 {
			t.FailNow()
		}
	}
	if n.lookups < judgeSteps/2 || n.hits < n.lookups/40 || n.hits == n.lookups || len(groups) > 1 && n.cut == 0 {
		t.Errorf("seed %d: %+v are no test", seed, n)
	}
	t.Logf("seed %d: %d of %d look-ups equal, %d hits; the engine would credit less in %d", seed,
		n.lookups-n.wrong, n.lookups, n.hits, n.cut)
	sum.add([]string{pinned, kind}, n)
	engine.Kill()
	shim.Stop()
}
