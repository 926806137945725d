package enginesim

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"slices"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// payloads are the payloads of all live frames in a capture.
func payloads(t *testing.T, file string) (out [][]byte) {
	t.Helper()
	b, err := os.ReadFile("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var capture struct {
		Live  [][]string
		Steps []struct{ Frames []string }
	}
	if err := json.Unmarshal(b, &capture); err != nil {
		t.Fatal(err)
	}
	for _, s := range capture.Steps {
		if len(s.Frames) > 0 {
			capture.Live = append(capture.Live, s.Frames)
		}
	}
	for _, frames := range capture.Live {
		p, err := hex.DecodeString(frames[len(frames)-1])
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, p)
	}
	return out
}

// fields is a decoded event of either form, by name.
type fields map[string]any

var arrayNames = map[string][]string{
	"BlockStored": {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
		"lora_name",
		"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"},
	"BlockRemoved":     {"type", "block_hashes", "medium", "group_idx"},
	"AllBlocksCleared": {"type"},
}

func decodeEvent(t *testing.T, raw []byte) fields {
	t.Helper()
	var v any
	d := msgpack.NewDecoder(bytes.NewReader(raw))
	d.UseLooseInterfaceDecoding(true)
	v, err := d.DecodeInterfaceLoose()
	if err != nil {
		t.Fatal(err)
	}
	switch v := v.(type) {
	case map[string]any:
		return v
	case []any:
		names := arrayNames[v[0].(string)]
		if len(v) != len(names) {
			t.Fatalf("%d places in %v, want %d", len(v), v, len(names))
		}
		out := fields{}
		for i, name := range names {
			out[name] = v[i]
		}
		return out
	}
	t.Fatalf("an event of type %T", v)
	return nil
}

func number(v any) uint64 {
	switch n := v.(type) {
	case int64:
		return uint64(n)
	case uint64:
		return n
	}
	return 1<<64 - 1
}

func numbers[T ~uint32 | ~uint64](v any) (out []T) {
	list, _ := v.([]any)
	for _, n := range list {
		out = append(out, T(number(n)))
	}
	return out
}

func (f fields) announced() Announced {
	switch f["type"] {
	case "BlockStored":
		a := Announced{Kind: events.Stored, Tier: f.tier(), Blocks: numbers[events.BlockHash](f["block_hashes"]),
			Tokens: numbers[uint32](f["token_ids"])}
		if f["parent_block_hash"] != nil {
			a.HasParent, a.Parent = true, events.BlockHash(number(f["parent_block_hash"]))
		}
		return a
	case "BlockRemoved":
		return Announced{Kind: events.Removed, Tier: f.tier(), Blocks: numbers[events.BlockHash](f["block_hashes"])}
	}
	return Announced{Kind: events.Cleared}
}

func (f fields) tier() events.Tier {
	if f["medium"] == hostMedium {
		return events.Host
	}
	return events.Device
}

// simulated reports whether the simulator supports the event: a single group of full attention on the device, without
// LoRA and salt.
func (f fields) simulated() bool {
	if f["type"] == "AllBlocksCleared" {
		return true
	}
	extra, _ := f["extra_keys"].([]any)
	plain := !slices.ContainsFunc(extra, func(keys any) bool { return keys != nil })
	return f["medium"] == medium && f["group_idx"] != nil && number(f["group_idx"]) == 0 && f["lora_name"] == nil &&
		plain
}

// rawBatch is a payload with encoded events.
type rawBatch struct {
	TS     float64
	Events []msgpack.RawMessage
	Rank   *uint32
}

func decodeBatch(t testing.TB, payload []byte) (b rawBatch) {
	t.Helper()
	d := msgpack.NewDecoder(bytes.NewReader(payload))
	n, err := d.DecodeArrayLen()
	if err == nil && n != 3 {
		t.Fatalf("a batch of %d fields", n)
	}
	if err == nil {
		err = d.DecodeMulti(&b.TS, &b.Events, &b.Rank)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestEventsEqualCaptures encodes every supported event of a real engine's capture again. The bytes must be equal.
func TestEventsEqualCaptures(t *testing.T) {
	for _, tc := range []struct {
		file    string
		release Release
		least   int // how many events must have been compared
	}{
		{"vllm-0.23.0.json", VLLM023, 2},
		{"vllm-cache-0.23.0-full-swa8.json", VLLM023, 10},
		{"vllm-0.24.0.json", VLLM024, 2},
		{"vllm-0.26.0.json", VLLM026, 2},
		{"vllm-cache-0.32.0-full.json", VLLM026, 10},
	} {
		t.Run(tc.file, func(t *testing.T) {
			compared := 0
			kinds := map[events.Kind]int{}
			for _, payload := range payloads(t, tc.file) {
				batch := decodeBatch(t, payload)
				var simulated []Announced
				for _, raw := range batch.Events {
					f := decodeEvent(t, raw)
					if !f.simulated() {
						continue
					}
					a := f.announced()
					if got := tc.release.appendEvent(nil, a, 4); !bytes.Equal(got, raw) {
						t.Errorf("%v:\n got %x\nwant %x", f, got, []byte(raw))
					}
					simulated = append(simulated, a)
					kinds[a.Kind]++
					compared++
				}
				if len(simulated) == len(batch.Events) {
					if got := tc.release.appendBatch(nil, batch.TS, simulated, 4,
						events.Rank(*batch.Rank)); !bytes.Equal(got, payload) {
						t.Errorf("batch:\n got %x\nwant %x", got, payload)
					}
				}
			}
			if compared < tc.least || kinds[events.Stored] == 0 || kinds[events.Cleared] == 0 {
				t.Errorf("compared %d events, want at least %d: %v", compared, tc.least, kinds)
			}
		})
	}
}
