package events

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// generic returns a router event as a value for both encoders.
func generic(rng *rand.Rand) map[string]any {
	hash := func() uint64 { return rng.Uint64() >> rng.IntN(60) }
	var data any = "cleared"
	switch rng.IntN(3) {
	case 0:
		var blocks []any
		for range 1 + rng.IntN(5) {
			blocks = append(blocks, map[string]any{"block_hash": hash(), "tokens_hash": hash(), "mm_extra_info": nil})
		}
		s := map[string]any{"parent_hash": nil, "start_position": nil, "blocks": blocks}
		if rng.IntN(2) == 0 {
			s["parent_hash"] = hash()
		}
		if rng.IntN(3) == 0 {
			s["lookahead"] = rng.IntN(MaxBlockSize + 1)
		}
		data = map[string]any{"stored": s}
	case 1:
		data = map[string]any{"removed": map[string]any{"block_hashes": []uint64{hash(), hash()}}}
	}
	if of, ok := data.(map[string]any); ok && rng.IntN(3) == 0 {
		for _, fields := range of {
			fields.(map[string]any)["group_idx"] = rng.IntN(4)
		}
	}
	event := map[string]any{"event_id": hash(), "data": data}
	if rng.IntN(2) == 0 {
		event["dp_rank"] = rng.IntN(8)
	}
	e := map[string]any{"worker_id": hash(), "event": event, "session_id": []any{"s", "", 7}[rng.IntN(3)],
		"state_source": []any{1, nil}}
	if rng.IntN(2) == 0 {
		e["storage_tier"] = []string{"device", "host_pinned", "disk", "external", "tape"}[rng.IntN(5)]
	}
	if rng.IntN(3) == 0 {
		e["residency_domain"] = []any{"worker", "cache_owner", "moon", nil}[rng.IntN(4)]
	}
	return e
}

// TestRouterFormsAgree reads random router events as JSON and as MessagePack, with and without an envelope, alone and
// in lists, with equal results.
func TestRouterFormsAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range testkit.Rounds(1000) {
		var values []any
		var want []RouterEvent
		for range 1 + rng.IntN(4) {
			v := generic(rng)
			text, _ := json.Marshal(v)
			e, err := ReadRouterEvent(text)
			if err != nil {
				t.Fatalf("%s: %v", text, err)
			}
			values, want = append(values, v), append(want, e)
		}
		var inner any = values
		if len(values) == 1 && rng.IntN(2) == 0 {
			inner = values[0]
		}
		data, err := msgpack.Marshal(inner)
		if err != nil {
			t.Fatal(err)
		}
		if rng.IntN(4) > 0 || len(values) > 1 {
			var payload any = data
			if rng.IntN(3) == 0 { // serde without its bytes type
				var list []any
				for _, b := range data {
					list = append(list, uint16(b))
				}
				payload = list
			}
			data, err = msgpack.Marshal(map[string]any{"topic": "kv-events", "publisher_id": 7, "sequence": 1,
				"published_at": 2, "payload": payload})
			if err != nil {
				t.Fatal(err)
			}
		} else if len(values) == 1 {
			data, _ = msgpack.Marshal(values[0])
		}
		var got []RouterEvent
		if err := ReadRouterEnvelope(data, func(e RouterEvent) { got = append(got, e) }); err != nil {
			t.Fatalf("%x: %v", data, err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("read\n%+v\nwant\n%+v", got, want)
		}
		if round%10 > 0 {
			continue
		}
		for i := range data { // a truncated message is an error or has fewer events, never different ones
			n := 0
			_ = ReadRouterEnvelope(data[:i], func(e RouterEvent) {
				if n >= len(want) || !reflect.DeepEqual(e, want[n]) {
					t.Fatalf("cut off at %d it has event %d: %+v", i, n, e)
				}
				n++
			})
		}
	}
}

// checkRouterEvent fails unless the event can be published, or has a reason to be skipped.
func checkRouterEvent(t *testing.T, e RouterEvent) {
	t.Helper()
	if e.Event.Kind == 0 {
		if e.Skipped == "" {
			t.Fatalf("%+v says nothing", e)
		}
		return
	}
	for _, cut := range e.Events() {
		if err := cut.check(); err != nil {
			t.Fatalf("%+v: %v", cut, err)
		}
	}
}

// The session of a router event is read as a hash. An id of another type or length is none, and loses no event.
func TestRouterSession(t *testing.T) {
	for id, want := range map[string]SessionHash{`"chat-17"`: HashSession("chat-17"), `""`: 0, `7`: 0, `null`: 0, `{}`: 0,
		`"` + strings.Repeat("s", maxSession+1) + `"`: 0} {
		e, err := ReadRouterEvent([]byte(`{"worker_id":1,"session_id":` + id + `,"event":{"event_id":1,"data":{"stored":` +
			`{"parent_hash":null,"blocks":[{"block_hash":1,"tokens_hash":2}]}}}}`))
		if err != nil || e.Event.Session != want || len(e.Event.Blocks) != 1 {
			t.Errorf("%.20s: %+v, %v, want %d", id, e, err, want)
		}
	}
}

// A readable line can be written, and read again with an equal result except for the session, which is known only as a
// hash.
func FuzzRouterEvent(f *testing.F) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		text, _ := json.Marshal(generic(rng))
		f.Add(text)
	}
	f.Add(
		[]byte(
			`{"worker_id":7,"event":{"event_id":1,"data":"cleared"},"kv_groups":[{"group_idx":1,"kv_cache_spec_kind":` +
				`"sliding_window","window":12,"eagle":true,"storage_tier":"host_pinned","block_hashes":[5,5]},{"kv_cache_spec_kind":"x"}]}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		e, err := ReadRouterEvent(line)
		if err != nil {
			return
		}
		checkRouterEvent(t, e)
		if e.Event.Kind == 0 || e.Event.Kind == Cleared && e.Event.Tier != AllTiers {
			return
		}
		written := AppendRouterEvent(nil, e.Key, EventID(e.ID), &e.Event, e.Groups...)
		again, err := ReadRouterEvent(written)
		again.Event.Session = e.Event.Session
		if err != nil || !reflect.DeepEqual(again, e) {
			t.Fatalf("%s\n%v\n%+v, want\n%+v", written, err, again, e)
		}
	})
}

func FuzzRouterEnvelope(f *testing.F) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		v := generic(rng)
		text, _ := json.Marshal(v)
		f.Add(text)
		data, _ := msgpack.Marshal([]any{v})
		f.Add(data)
		data, _ = msgpack.Marshal(map[string]any{"payload": data})
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		// the error follows the readable events
		_ = ReadRouterEnvelope(data, func(e RouterEvent) { checkRouterEvent(t, e) })
	})
}
