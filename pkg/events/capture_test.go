package events

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func readCapture(t testing.TB, path string, into any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatal(err)
	}
}

func mustHex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustDecoder(t testing.TB, engine Engine, blockSize uint32) *Decoder {
	t.Helper()
	d, err := NewDecoder(DecoderConfig{Engine: engine, BlockSize: blockSize})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// decode decodes a message, and fails unless the skips are exactly the expected ones.
func decode(t testing.TB, d *Decoder, payload []byte, passed ...Skip) Message {
	t.Helper()
	want := d.Counts()
	for _, s := range passed {
		want[s]++
	}
	m, err := d.Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	for s, n := range d.Counts() {
		if n != want[s] {
			t.Errorf("passed over for %s: %d, want %d", Skip(s), n, want[s])
		}
	}
	return m
}

func locals(t testing.TB, blockSize uint32, space Space, tokens []uint32) []LocalHash {
	t.Helper()
	return mustHasher(t, blockSize, space, false).Hash(nil, tokens)
}

// capturePaths lists the captures of vLLM's and SGLang's own publishers.
func capturePaths(t testing.TB) []string {
	t.Helper()
	var paths []string
	for _, engine := range []string{"vllm", "sglang"} {
		found, err := filepath.Glob("testdata/captures/" + engine + "-[0-9]*.json")
		if err != nil || len(found) < 6 {
			t.Fatalf("%d captures of %s, %v", len(found), engine, err)
		}
		paths = append(paths, found...)
	}
	return paths
}

// capturedPayloads returns the live messages of a capture.
func capturedPayloads(t testing.TB, path string) (payloads [][]byte) {
	t.Helper()
	var capture struct {
		Live [][]string // topic, sequence, payload
	}
	readCapture(t, path, &capture)
	for _, frames := range capture.Live {
		payloads = append(payloads, mustHex(t, frames[2]))
	}
	return payloads
}

// All captured publishers announced the same four messages; versions differ in the fields.
func TestPublisherCaptures(t *testing.T) {
	for _, path := range capturePaths(t) {
		name := strings.TrimSuffix(filepath.Base(path), ".json")
		engine, version, _ := strings.Cut(name, "-")
		t.Run(name, func(t *testing.T) {
			payloads := capturedPayloads(t, path)
			e, err := EngineOf(engine)
			if err != nil {
				t.Fatal(err)
			}
			minor, err := strconv.Atoi(strings.Split(version, ".")[1])
			if err != nil {
				t.Fatal(err)
			}
			patch, err := strconv.Atoi(strings.Split(version, ".")[2])
			if err != nil {
				t.Fatal(err)
			}
			vllm := e == VLLM
			first, third := BlockHash(15760518052499183552), BlockHash(0xabababababababab)
			attention := AttentionFull
			lora, salt, host := "adapter-a", "tenant-a", Host
			if vllm {
				if minor < 14 {
					lora = LoRAByID("1")
				}
				if minor < 17 {
					salt = ""
				}
				if minor < 11 {
					host = Device
				}
				if minor < 19 {
					attention = AttentionUnknown
				}
			} else {
				signed := int64(-3482352314437016571)
				first, third = BlockHash(signed), 77
				attention = AttentionUnknown
				if patch < 22 {
					lora = LoRAByID("1")
				}
				if patch < 18 {
					salt = ""
				}
			}
			want := []Message{
				{1.5, 0, true, []Event{{Kind: Stored, Tier: Device, Attention: attention, Blocks: []BlockHash{first, 2},
					Locals: locals(t, 4, Space{}, count(1, 8))}}},
				{2.5, 0, true, []Event{
					{Kind: Stored, Tier: Device, HasParent: true, Parent: 2, Blocks: []BlockHash{3},
						Locals: locals(t, 4, Space{LoRA: lora}, count(9, 4))},
					{Kind: Removed, Tier: Device, Blocks: []BlockHash{3}},
				}},
				{3.5, 0, true, []Event{{Kind: Stored, Tier: host, Blocks: []BlockHash{third},
					Locals: locals(t, 4, Space{Salt: salt}, count(1, 4))}}},
				{4.5, 0, true, []Event{{Kind: Cleared, Reason: ReasonEngine}}},
			}
			if len(payloads) != len(want) {
				t.Fatalf("%d messages", len(payloads))
			}
			var passed [4][]Skip
			if vllm && minor >= 11 && minor < 17 { // a copy in host memory without extra keys
				copied := &want[2].Events[0]
				copied.Chunk, copied.Own, copied.Locals = 1, true, locals(t, 4, Space{}, count(1, 4))
				passed[2] = []Skip{skipCopyTokens}
			}
			d := mustDecoder(t, e, 4)
			for i, payload := range payloads {
				if got := decode(t, d, payload, passed[i]...); !reflect.DeepEqual(got, want[i]) {
					t.Errorf("message %d:\n%+v, want\n%+v", i, got, want[i])
				}
			}
			if d.Diagnosis() != nil {
				t.Error(d.Diagnosis())
			}
		})
	}
}

// cacheCapture is a session with vLLM's own cache manager.
type cacheCapture struct {
	BlockSize uint32 `json:"block_size"`
	Steps     []struct {
		Command struct {
			Op     string
			ID     string
			Tokens []uint32
			Salt   string
			LoRA   string
		}
		Answer struct {
			Hashes []string
			Keys   []string
			OK     bool
		}
		Frames []string
	}
}

// The engine's own cache is the reference: the position of a hash in the prompt determines the local hash, and the
// engine's blocks at the end equal the blocks after all events.
func TestCacheCaptures(t *testing.T) {
	paths, err := filepath.Glob("testdata/captures/vllm-cache-*.json")
	if err != nil || len(paths) != 4 {
		t.Fatalf("%d captures, %v", len(paths), err)
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			var capture cacheCapture
			readCapture(t, path, &capture)
			d := mustDecoder(t, VLLM, capture.BlockSize)
			type prompt struct {
				tokens []uint32
				space  Space
			}
			type key struct {
				group GroupIndex
				name  BlockHash
			}
			prompts := map[string]prompt{}
			local := map[BlockHash]LocalHash{}
			parent := map[BlockHash]BlockHash{}
			held := map[key]int{}
			checked, compared := 0, false
			for i, s := range capture.Steps {
				p := prompts[s.Command.ID]
				p.tokens = append(p.tokens, s.Command.Tokens...)
				if s.Command.Op == "run" {
					p.space = Space{LoRA: s.Command.LoRA, Salt: s.Command.Salt}
				}
				prompts[s.Command.ID] = p
				hashes := locals(t, capture.BlockSize, p.space, p.tokens)
				names := make([]BlockHash, len(s.Answer.Hashes))
				for j, digest := range s.Answer.Hashes {
					v, err := strconv.ParseUint(digest[len(digest)-16:], 16, 64)
					if err != nil {
						t.Fatal(err)
					}
					names[j] = BlockHash(v)
					local[names[j]] = hashes[j]
					if j > 0 {
						parent[names[j]] = names[j-1]
					}
				}
				if len(s.Frames) == 3 {
					m := decode(t, d, mustHex(t, s.Frames[2]))
					for _, e := range m.Events {
						switch e.Kind {
						case Stored:
							if want := [2]Attention{AttentionFull,
								AttentionSlidingWindow}[e.Group]; e.Attention != want || e.Tier != Device {
								t.Errorf("step %d: group %d is %d in %s", i, e.Group, e.Attention, e.Tier)
							}
							for j, name := range e.Blocks {
								before, hasParent := e.Parent, e.HasParent
								if j > 0 {
									before, hasParent = e.Blocks[j-1], true
								}
								// the answer has no hashes: the block is the last full block
								if s.Command.Op == "append" {
									local[name] = hashes[len(hashes)-len(e.Blocks)+j]
									parent[name] = before
								}
								if want, ok := local[name]; !ok || e.Locals[j] != want {
									t.Errorf("step %d: block %x has local hash %x, want %x (%v)", i, name, e.Locals[j],
										want, ok)
								}
								if want, ok := parent[name]; hasParent != ok || ok && before != want {
									t.Errorf("step %d: block %x follows %x (%v), want %x (%v)", i, name, before,
										hasParent, want, ok)
								}
								held[key{e.Group, name}]++
								checked++
							}
						case Removed:
							for _, name := range e.Blocks {
								if k := (key{e.Group, name}); held[k] == 1 {
									delete(held, k)
								} else {
									held[k]--
								}
							}
						case Cleared:
							clear(held)
						}
					}
				}
				if s.Command.Op == "resident" {
					compared = true
					var want []key
					for _, k := range s.Answer.Keys {
						name, err1 := strconv.ParseUint(k[len(k)-24:len(k)-8], 16, 64)
						group, err2 := strconv.ParseUint(k[len(k)-8:], 16, 32)
						if err1 != nil || err2 != nil {
							t.Fatal(err1, err2)
						}
						want = append(want, key{GroupIndex(group), BlockHash(name)})
					}
					if len(want) != len(held) || slices.ContainsFunc(want, func(k key) bool { return held[k] == 0 }) {
						t.Errorf("step %d: events leave %d blocks, the engine holds %d", i, len(held), len(want))
					}
				}
			}
			if checked < 10 || !compared && !strings.Contains(path, "duplicate") {
				t.Errorf("checked %d blocks, compared %v", checked, compared)
			}
		})
	}
}

func TestMockerCapture(t *testing.T) {
	d := mustDecoder(t, VLLM, 16)
	blocks := 0
	for _, payload := range capturedPayloads(t, "testdata/captures/dynamo-mocker-1.6.1.json") {
		for _, e := range decode(t, d, payload).Events {
			if e.Kind != Stored || e.Tier != Device || len(e.Locals) != len(e.Blocks) {
				t.Errorf("%+v", e)
			}
			blocks += len(e.Blocks)
		}
	}
	if blocks != 9 {
		t.Errorf("%d blocks", blocks)
	}
}

func TestSamples(t *testing.T) {
	var samples map[string]string
	readCapture(t, "testdata/samples.json", &samples)
	const a, b = BlockHash(0xdab89baa7b5857c0), BlockHash(0x4ebfa8a1f3c34151)
	const page, salted = BlockHash(0xcf97adeedb59e05b), BlockHash(0x339927f491605c4b)
	one := locals(t, 4, Space{}, count(1, 4))
	two := locals(t, 4, Space{}, count(1, 8))
	pages := []BlockHash{page, b}
	full := []Event{
		{Kind: Stored, Tier: Device, Attention: AttentionFull, Blocks: []BlockHash{a}, Locals: one},
		{Kind: Removed, Tier: Device, Blocks: []BlockHash{a}},
		{Kind: Cleared, Reason: ReasonEngine},
	}
	for name, c := range map[string]struct {
		engine  Engine
		hasRank bool
		events  []Event
	}{
		"vllm array era, v0.11 shape": {VLLM, true,
			[]Event{{Kind: Stored, Tier: Device, Blocks: []BlockHash{a}, Locals: one}}},
		"vllm array era, full": {VLLM, true, full},
		"vllm map era":         {VLLM, true, full},
		"vllm bytes hash": {VLLM, false,
			[]Event{{Kind: Removed, Tier: Device, Blocks: []BlockHash{0x18191a1b1c1d1e1f}}}},
		"sglang array": {SGLang, false, []Event{
			{Kind: Cleared, Reason: ReasonEngine},
			{Kind: Stored, Tier: Host, Blocks: pages, Locals: two},
			{Kind: Removed, Tier: Device, Blocks: []BlockHash{page}},
		}},
		"sglang array salted (map in slot 7)": {SGLang, true, []Event{
			{Kind: Stored, Tier: Device, Blocks: []BlockHash{salted}, Locals: locals(t, 4, Space{Salt: "tenant-a"},
				count(1, 4))},
		}},
		"sglang map":             {SGLang, true, []Event{{Kind: Stored, Tier: Device, Blocks: pages, Locals: two}}},
		"old 2-element envelope": {SGLang, false, []Event{{Kind: Cleared, Reason: ReasonEngine}}},
	} {
		payload, ok := samples[name]
		if !ok {
			t.Fatalf("no sample %q", name)
		}
		want := Message{1.5, 0, c.hasRank, c.events}
		if got := decode(t, mustDecoder(t, c.engine, 4), mustHex(t, payload)); !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n%+v, want\n%+v", name, got, want)
		}
	}

	// The master of a shared store is not an engine: all events have unknown types.
	d := mustDecoder(t, VLLM, 4)
	m, err := d.Decode(mustHex(t, samples["mooncake master"]))
	if err != nil || len(m.Events) != 0 || d.Counts() != (SkipCounts{skipUnknownType: 1}) {
		t.Errorf("mooncake master: %+v, %v, %v", m, err, d.Counts())
	}
}
