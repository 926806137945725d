//go:build judges

package engines

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// offloaded is a configuration of vLLM's offloading connector.
type offloaded struct {
	pinned string
	size   int // tokens of a block
	pyenv.EngineOffload
}

func (o offloaded) name() string {
	form := "by name"
	if o.SelfDescribing {
		form = "self-describing"
	}
	return fmt.Sprintf("%s/%d blocks of %d/%s/%s", o.pinned, o.BlocksPerChunk, o.size, form, o.Policy)
}

// TestOffloadingAsJudge runs random load through vLLM's own cache manager and offloading connector. At intervals it
// compares the engine's blocks in device and the connector's loadable blocks in host memory with kvatlas's answer for
// both tiers.
func TestOffloadingAsJudge(t *testing.T) {
	t.Parallel()
	x := startJudgedIndexer(t)
	sum := &tally{of: map[string]*counts{}}
	t.Cleanup(func() { sum.log(t) })
	for _, size := range []int{4, 16} {
		for _, blocks := range []int{1, 2, 3, 4} {
			for _, describes := range []bool{false, true} {
				o := offloaded{"vllm==0.33.0", size, pyenv.EngineOffload{BlocksPerChunk: blocks, Chunks: 2 * judgeBlocks / blocks,
					SelfDescribing: describes, Policy: []string{"lru", "arc"}[blocks%2]}}
				t.Run(o.name(), func(t *testing.T) {
					t.Parallel()
					for seed := *judgeFirst; seed < *judgeFirst+uint64(*judgeSeeds); seed++ {
						o.run(t, x, seed, sum)
					}
				})
			}
		}
	}
}

// run runs a load with a separate worker.
func (o offloaded) run(t *testing.T, x *harness.Indexer, seed uint64, sum *tally) {
	groups := []string{"full"}
	engine := pyenv.StartEngine(t, pyenv.EngineOptions{Wheel: pyenv.Wheel(t, o.pinned), Cache: &pyenv.EngineCache{
		BlockSize: o.size, Blocks: 2 * judgeBlocks, Groups: groups, Offload: &o.EngineOffload}})
	instance := fmt.Sprintf("offload-%d-%d-%v-%d", o.size, o.BlocksPerChunk, o.SelfDescribing, seed)
	model := fmt.Sprint("offloaded blocks of ", o.size)
	shim := harness.Start(t, "worker-shim", "run", "--engine", engine.Endpoint, "--replay", engine.Replay, "--worker",
		instance, "--model", model, "--block-size", strconv.Itoa(o.size), "--nats", x.NATS)
	shim.WaitFor("connected to the engine")
	l := &load{t: t, rng: rand.New(rand.NewPCG(seed, uint64(o.size))), engine: engine, size: o.size, groups: groups,
		salts: []string{"", "", "tenant-a", "tenant-b"}, changes: rand.New(rand.NewPCG(seed, 16)), media: true,
		longest: 20}
	var n counts
	both := 0 // look-ups with blocks in both tiers
	for step := range judgeSteps {
		switch r := l.rng.IntN(16); {
		case r < 9:
			l.step()
			continue
		case r < 11:
			engine.Do(map[string]any{"op": "transfers"}, nil)
			continue
		case r < 13:
			engine.Do(map[string]any{"op": "evict", "ids": 1 + l.rng.IntN(2*judgeBlocks)}, nil)
			continue
		}
		asked := make([]harness.Prompt, 6)
		for i := range asked {
			asked[i] = l.question()
		}
		engine.Do(map[string]any{"op": "transfers"}, nil) // the connector does not answer during a copy
		var said struct{ Whole, Host []int }
		engine.Do(map[string]any{"op": "lookup", "prompts": asked}, &said)
		l.wait(x, model, instance)
		for i, p := range asked {
			found := harness.OverlapOf(t, x, model, instance, p)
			device, host := int(found.Device)*o.size, int(found.Host)*o.size
			n.lookups++
			if said.Host[i] > 0 {
				n.hits++
			}
			if said.Host[i] > 0 && said.Whole[i] > 0 {
				both++
			}
			if device != said.Whole[i] || host != said.Host[i] {
				n.wrong++
				t.Errorf("seed %d, step %d: of %d tokens with LoRA %q, salt %q and media %v we find %d in device and %d in "+
					"host; the engine would find %d and load %d", seed, step, len(p.Tokens), p.LoRA, p.Salt, p.Media, device,
					host, said.Whole[i], said.Host[i])
			}
		}
		if n.wrong > 5 {
			t.FailNow()
		}
	}
	if n.lookups < judgeSteps/2 || n.hits < 10 || both == 0 {
		t.Errorf("seed %d: %+v, %d in both tiers: too few look-ups", seed, n, both)
	}
	t.Logf("seed %d: %d of %d look-ups equal, %d with blocks to load, %d after blocks in device", seed,
		n.lookups-n.wrong, n.lookups, n.hits, both)
	sum.add([]string{o.name()}, n)
	engine.Kill()
	shim.Stop()
}
