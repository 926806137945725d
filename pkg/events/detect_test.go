package events

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// The messages of every captured publisher identify the engine, at the first message with a sign. All messages are
// decoded as with a configured engine.
func TestEngineIsTold(t *testing.T) {
	for _, path := range capturePaths(t) {
		engine, err := EngineOf(strings.Split(path[strings.LastIndex(path, "/")+1:], "-")[0])
		if err != nil {
			t.Fatal(err)
		}
		configured, detected := mustDecoder(t, engine, 4), mustDecoder(t, AnyEngine, 4)
		for i, payload := range capturedPayloads(t, path) {
			want, err := configured.Decode(payload)
			if err != nil {
				t.Fatal(err)
			}
			got, err := detected.Decode(payload)
			if err != nil || len(got.Events) != len(want.Events) {
				t.Fatalf("%s, message %d: %+v, %v, want %+v", path, i, got, err, want)
			}
			for j := range got.Events {
				if !sameEvent(got.Events[j], want.Events[j]) {
					t.Errorf("%s, message %d: %+v, want %+v", path, i, got.Events[j], want.Events[j])
				}
			}
			if e, why := detected.Engine(); i == 0 && (e != engine || why == "") {
				t.Errorf("%s is detected as %s: %s", path, e, why)
			}
		}
		if configured.Counts() != detected.Counts() {
			t.Errorf("%s: skipped %v, want %v", path, detected.Counts(), configured.Counts())
		}
		detected.Reset()
		if e, why := detected.Engine(); e != AnyEngine || why != "" {
			t.Errorf("after a restart it is still %s: %s", e, why)
		}
	}
}

// A message without a sign has the same meaning for all engines, so no message waits for the detection.
func TestMessagesWithoutSigns(t *testing.T) {
	detected, untold := map[Engine]int{}, 0
	for seed := range uint64(testkit.Rounds(30)) {
		c := chooser{rand.New(rand.NewPCG(11, seed)), 1 + int(seed%4)}
		for i := range 200 {
			payload := pack(t, c.message())
			d := mustDecoder(t, AnyEngine, uint32(c.block))
			got, err := d.Decode(payload)
			if err != nil {
				t.Fatal(err)
			}
			e, why := d.Engine()
			if (e == AnyEngine) != (why == "") {
				t.Fatalf("%s because %q", e, why)
			}
			engines := []Engine{e}
			if e == AnyEngine {
				untold++
				engines = []Engine{VLLM, SGLang}
			}
			detected[e]++
			for _, engine := range engines {
				as := mustDecoder(t, engine, uint32(c.block))
				want, err := as.Decode(payload)
				if err != nil {
					t.Fatal(err)
				}
				same := len(got.Events) == len(want.Events) && as.Counts() == d.Counts()
				for j := range got.Events {
					same = same && sameEvent(got.Events[j], want.Events[j])
				}
				if !same {
					t.Fatalf("seed %d, message %d, detected %s (%s), as %s: %x\n%+v, want\n%+v", seed, i, e, why, engine,
						payload, got, want)
				}
			}
		}
	}
	if untold < 100 || detected[VLLM] < 100 || detected[SGLang] < 100 {
		t.Errorf("tried %v", detected)
	}
}

// All signs, one at a time.
func TestSigns(t *testing.T) {
	plain := func(others ...pair) []byte {
		return message(t, store(names(1, 2), nil, names(1, 2, 3, 4, 5, 6, 7, 8), others...))
	}
	for _, c := range []struct {
		name    string
		payload []byte
		want    Engine
	}{
		{"nothing", plain(), AnyEngine},
		{"a device's medium", plain(pair{"medium", "GPU"}), AnyEngine},
		{"a name", plain(pair{"lora_name", "a"}), AnyEngine},
		{"a session", plain(pair{"session_id", "a"}), AnyEngine},
		{"a group", plain(pair{"group_idx", 0}), VLLM},
		{"keys", plain(pair{"extra_keys", nil}), VLLM},
		{"a kind", plain(pair{"kv_cache_spec_kind", "full_attention"}), VLLM},
		{"vLLM's medium", plain(pair{"medium", "cpu"}), VLLM},
		{"SGLang's medium", plain(pair{"medium", "CPU_PINNED"}), SGLang},
		{"a salt", plain(pair{"cache_salt", nil}), SGLang},
		{"a signed hash", message(t, store(names(-1, 2), nil, names(1, 2, 3, 4, 5, 6, 7, 8))), SGLang},
		{"a signed parent", message(t, store(names(1, 2), -3, names(1, 2, 3, 4, 5, 6, 7, 8))), SGLang},
		{"an unsigned hash", message(t, store(names(uint64(1<<63), 2), nil, names(1, 2, 3, 4, 5, 6, 7, 8))), VLLM},
		{"both kinds of hashes", message(t, store(names(uint64(1<<63), -2), nil, names(1, 2, 3, 4, 5, 6, 7, 8))),
			AnyEngine},
		{"a signed hash and a field that only vLLM has now",
			message(t, store(names(-1, 2), nil, names(1, 2, 3, 4, 5, 6, 7, 8), pair{"group_idx", 0})), SGLang},
		{"a digest", message(t, store(names([]byte("0123456789abcdef"), 2), nil, names(1, 2, 3, 4, 5, 6, 7, 8))), VLLM},
		{"pairs", message(t, store(names(1), nil, names(names(1, 2), names(2, 3)))), SGLang},
		{"a clear", message(t, names("AllBlocksCleared")), AnyEngine},
		{"no events", message(t, []any{}...), AnyEngine},
		{"an array with a map", message(t, names("BlockStored", names(1), nil, names(1, 2, 3, 4), 4, nil, "GPU",
			pairs{{"cache_salt", "a"}})), SGLang},
		{"an array with a name", message(t, names("BlockStored", names(1), nil, names(1, 2, 3, 4), 4, nil, "GPU", nil)),
			VLLM},
		{"a short array", message(t, names("BlockStored", names(1), nil, names(1, 2, 3, 4), 4, nil, "GPU")), AnyEngine},
		{"a removal with a group", message(t, names("BlockRemoved", names(1), "GPU", 0)), VLLM},
	} {
		d := mustDecoder(t, AnyEngine, 4)
		if _, err := d.Decode(c.payload); err != nil {
			t.Fatal(err)
		}
		if e, why := d.Engine(); e != c.want {
			t.Errorf("%s: %s because %q, want %s", c.name, e, why, c.want)
		}
	}
}
