package events

import (
	"encoding/json"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

func n(v uint64) *uint64 { return &v }

// dynamoLoads are messages in the forms of all releases, with the expected loads.
var dynamoLoads = []struct {
	text string
	want EngineLoad
}{
	{`{"worker_id":7,"dp_rank":2,"active_decode_blocks":null,"active_prefill_tokens":null,"kv_used_blocks":95}`,
		EngineLoad{Worker: "7", Rank: 2, UsedBlocks: n(95)}},
	{`{"worker_id":18446744073709551615,"dp_rank":0,"active_decode_blocks":4,"active_prefill_tokens":0}`,
		EngineLoad{Worker: "18446744073709551615", DecodeBlocks: n(4), PrefillTokens: n(0)}},
	{`{"worker_id":7,"kv_used_blocks":1,"of_a_later_release":[{}]}`, EngineLoad{Worker: "7", UsedBlocks: n(1)}},
	{`{"worker_id":694,"data":{"request_active_slots":1,"request_total_slots":256,"kv_active_blocks":10,
		"kv_total_blocks":100,"num_requests_waiting":3,"gpu_cache_usage_perc":0.1,"gpu_prefix_cache_hit_rate":0.5}}`,
		EngineLoad{Worker: "694", UsedBlocks: n(10), TotalBlocks: n(100)}},
	{`{"worker_id":694,"request_active_slots":1,"request_total_slots":256,"kv_active_blocks":10,"kv_total_blocks":0,
		"num_requests_waiting":3,"gpu_cache_usage_perc":0.1,"gpu_prefix_cache_hit_rate":0.5}`,
		EngineLoad{Worker: "694", UsedBlocks: n(10)}},
	{`{"worker_id":694,"data":{"worker_stats":{"data_parallel_rank":3,"request_active_slots":0,"request_total_slots":1,
		"num_requests_waiting":0},"kv_stats":{"kv_active_blocks":10,"kv_total_blocks":100,"gpu_cache_usage_perc":0.1,
		"gpu_prefix_cache_hit_rate":0.0},"spec_decode_stats":null}}`,
		EngineLoad{Worker: "694", Rank: 3, UsedBlocks: n(10), TotalBlocks: n(100)}},
	{`{"worker_id":"a","data":{"worker_stats":{"data_parallel_rank":null},"kv_stats":{"kv_active_blocks":0}}}`,
		EngineLoad{Worker: "a", UsedBlocks: n(0)}},
}

// TestDynamoLoads reads all forms as JSON, as MessagePack, and in the envelope, alone and in a list.
func TestDynamoLoads(t *testing.T) {
	read := func(data []byte) (list []EngineLoad, err error) {
		err = ReadDynamoLoad(data, func(l EngineLoad) { list = append(list, l) })
		return list, err
	}
	for _, c := range dynamoLoads {
		var v map[string]any
		dec := json.NewDecoder(strings.NewReader(c.text))
		dec.UseNumber()
		if err := dec.Decode(&v); err != nil {
			t.Fatal(err)
		}
		plain := withNumbers(v)
		packed, err := msgpack.Marshal(plain)
		if err != nil {
			t.Fatal(err)
		}
		list, _ := msgpack.Marshal([]any{plain, plain})
		envelope := func(payload []byte) []byte {
			data, _ := msgpack.Marshal(map[string]any{"topic": "kv_metrics", "publisher_id": 1, "payload": payload})
			return data
		}
		for i, data := range [][]byte{[]byte(c.text), packed, envelope(packed), envelope(list)} {
			got, err := read(data)
			want := []EngineLoad{c.want}
			if i == 3 {
				want = append(want, c.want)
			}
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("form %d of %s:\n%+v, %v, want\n%+v", i, c.text, got, err, want)
			}
		}
	}
	for _, text := range []string{``, `{}`, `[]`, `7`, `{"worker_id":7}`, `{"worker_id":7,"kv_used_blocks":-1}`,
		`{"worker_id":7,"kv_used_blocks":1.5}`, `{"worker_id":7.5,"kv_used_blocks":1}`, `{"kv_used_blocks":1}`,
		`{"worker_id":"","kv_used_blocks":1}`, `{"worker_id":7,"kv_used_blocks":9007199254740993}`,
		`{"worker_id":7,"dp_rank":4294967296,"kv_used_blocks":1}`, `{"worker_id":7,"kv_used_blocks":1} x`,
		`{"worker_id":7,"data":{"kv_stats":{}}}`, "\x81\xa7payload\x07"} {
		if got, err := read([]byte(text)); err == nil {
			t.Errorf("%q is read as %+v", text, got)
		}
	}
}

// withNumbers converts numbers to MessagePack's types.
func withNumbers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for key, of := range v {
			out[key] = withNumbers(of)
		}
		return out
	case []any:
		for i := range v {
			v[i] = withNumbers(v[i])
		}
	case json.Number:
		if whole, err := v.Int64(); err == nil {
			return whole
		}
		if whole, err := strconv.ParseUint(v.String(), 10, 64); err == nil {
			return whole
		}
		f, _ := v.Float64()
		return f
	}
	return v
}

// A decoded load has a worker and a value, and survives encoding and decoding in kvatlas's own form.
func FuzzDynamoLoad(f *testing.F) {
	for _, c := range dynamoLoads {
		f.Add([]byte(c.text))
		var v map[string]any
		_ = json.Unmarshal([]byte(c.text), &v)
		packed, _ := msgpack.Marshal(v)
		f.Add(packed)
		packed, _ = msgpack.Marshal(map[string]any{"payload": packed})
		f.Add(packed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		_ = ReadDynamoLoad(data, func(l EngineLoad) {
			for _, v := range []*uint64{l.UsedBlocks, l.TotalBlocks, l.DecodeBlocks, l.PrefillTokens} {
				if v != nil && *v > MaxEngineCount {
					t.Fatalf("%d", *v)
				}
			}
			if err := l.Check(); err != nil {
				t.Fatalf("%+v: %v", l, err)
			}
		})
	})
}
