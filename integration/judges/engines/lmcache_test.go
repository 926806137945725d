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

// TestLMCacheAsJudge runs random load through vLLM's own cache manager with LMCache's own event classes: the server's
// log, the worker's adapter and the connector. The server evicts, restarts, and holds chunks of other engines. At
// intervals, kvatlas must find the manager's blocks in device. In host, kvatlas must find the chunks that LMCache would
// load and that this engine's device has announced without salt or adapter. If the server has lost a chunk and stored
// the chunk again, kvatlas finds the chunk only while it keeps the device's announcement.
func TestLMCacheAsJudge(t *testing.T) {
	t.Parallel()
	x := startJudgedIndexer(t)
	sum := &tally{of: map[string]*counts{}}
	t.Cleanup(func() { sum.log(t) })
	for _, version := range []string{"0.5.6", "0.5.7rc2"} {
		for _, c := range []struct{ size, chunk, chunks, log int }{
			{4, 4, 60, 4096}, {4, 8, 40, 4096}, {4, 16, 20, 30}, {16, 16, 60, 4096}, {16, 64, 20, 30}, {16, 256, 8, 4096},
		} {
			t.Run(fmt.Sprintf("%s/%d in blocks of %d", version, c.chunk, c.size), func(t *testing.T) {
				t.Parallel()
				for seed := *judgeFirst; seed < *judgeFirst+uint64(*judgeSeeds); seed++ {
					judgeLMCache(t, x, version, c.size, pyenv.EngineLMCache{Wheel: pyenv.Wheel(t, "lmcache=="+version),
						Chunk: c.chunk, Chunks: c.chunks, Log: c.log}, seed, sum)
				}
			})
		}
	}
}

// judgeLMCache runs a load with a separate worker.
func judgeLMCache(t *testing.T, x *harness.Indexer, version string, size int, lmcache pyenv.EngineLMCache, seed uint64,
	sum *tally) {
	groups := []string{"full"}
	engine := pyenv.StartEngine(t, pyenv.EngineOptions{Wheel: pyenv.Wheel(t, "vllm==0.33.0"), Cache: &pyenv.EngineCache{
		BlockSize: size, Blocks: max(judgeBlocks, 6*lmcache.Chunk/size), Groups: groups, LMCache: &lmcache}})
	instance := fmt.Sprintf("lmcache-%s-%d-%d-%d", version, size, lmcache.Chunk, seed)
	model := fmt.Sprint("LMCache's blocks of ", size)
	shim := harness.Start(t, "worker-shim", "run", "--engine", engine.Endpoint, "--replay", engine.Replay, "--worker",
		instance, "--model", model, "--block-size", strconv.Itoa(size), "--nats", x.NATS)
	shim.WaitFor("connected to the engine")
	l := &load{t: t, rng: rand.New(rand.NewPCG(seed, uint64(size))), engine: engine, size: size, groups: groups,
		salts: []string{"", "", "", "tenant-a"}, changes: rand.New(rand.NewPCG(seed, 16)), plain: seed%2 == 0,
		longest: max(10, 3*lmcache.Chunk/size)}
	var n counts
	for step := range judgeSteps {
		switch r := l.rng.IntN(200); {
		case r < 120:
			l.step()
			continue
		case r < 130:
			engine.Do(map[string]any{"op": "foreign", "tokens": l.tokens(l.rng.IntN(4 * lmcache.Chunk))}, nil)
			continue
		case r < 132:
			engine.Do(map[string]any{"op": "restart"}, nil)
			continue
		case r < 160:
			engine.Do(map[string]any{"op": "evict", "ids": 1 + l.rng.IntN(6*judgeBlocks)}, nil)
			continue
		}
		asked := make([]harness.Prompt, 6)
		for i := range asked {
			asked[i] = l.question()
		}
		var said struct{ Whole, Host, Most []int }
		engine.Do(map[string]any{"op": "lookup", "prompts": asked}, &said)
		l.wait(x, model, instance)
		for i, p := range asked {
			found := harness.OverlapOf(t, x, model, instance, p)
			device, host := int(found.Device)*size, int(found.Host)*size
			n.lookups++
			if said.Host[i] > 0 {
				n.hits++
			}
			if said.Host[i] < said.Most[i] {
				n.cut++
			}
			if device != said.Whole[i] || host < said.Host[i] || host > said.Most[i] {
				n.wrong++
				t.Errorf("seed %d, step %d: of %d tokens with LoRA %q and salt %q we find %d in device and %d in host; the "+
					"engine would find %d and load %d to %d", seed, step, len(p.Tokens), p.LoRA, p.Salt, device, host,
					said.Whole[i], said.Host[i], said.Most[i])
			}
		}
		if n.wrong > 5 {
			t.FailNow()
		}
	}
	if n.lookups < judgeSteps/2 || n.hits == 0 {
		t.Errorf("seed %d: %+v are no test", seed, n)
	}
	t.Logf("seed %d: %d of %d look-ups equal, %d with chunks to load; %d with possibly more kept announcements", seed,
		n.lookups-n.wrong, n.lookups, n.hits, n.cut)
	sum.add([]string{fmt.Sprintf("%s, %d in blocks of %d", version, lmcache.Chunk, size)}, n)
	engine.Kill()
	shim.Stop()
}
