package sharedstore

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// storePayload is a message of Mooncake's KvEventPublisher with all fields.
func storePayload(t testing.TB, list ...map[string]any) []byte {
	t.Helper()
	for _, e := range list {
		for field, value := range map[string]any{"event_id": 1, "timestamp": 1763740000000, "model_name": nil,
			"block_size": 16, "additional_salt": nil, "lora_name": nil,
			"backend_id": "pool-a", "dp_rank": 0, "group_id": "sglang-hicache:e3b0", "seq_hashes": []uint64{},
			"base_block_idx": nil, "block_hashes": []uint64{}, "token_ids": nil} {
			e[field] = value
		}
	}
	data, err := msgpack.Marshal([]any{int64(1763740000000), list, uint32(0)})
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestReadStoreEvents(t *testing.T) {
	got, err := readEvents(storePayload(t,
		map[string]any{"event_type": "stored", "object_key": "a_0_k", "medium": "cpu", "tenant_id": "default"},
		map[string]any{"event_type": "removed", "object_key": "a_0_k", "medium": "disk", "tenant_id": "b",
			"new_field": map[string]any{"x": []int{1}}},
		map[string]any{"event_type": "cleared", "medium": nil, "tenant_id": nil},
	))
	want := []storeEvent{{events.Stored, "default", "a_0_k", "cpu"}, {events.Removed, "b", "a_0_k", "disk"},
		{events.Cleared, "default", "", ""}}
	if err != nil || !slices.Equal(slices.Collect(got), want) {
		t.Errorf("%v", err)
	}
	for name, payload := range map[string][]byte{
		"nothing":         nil,
		"no array":        {0xc0},
		"no events":       {0x93, 1, 2, 3},
		"an unknown type": storePayload(t, map[string]any{"event_type": "moved", "object_key": "a"}),
		"no type":         storePayload(t, map[string]any{"object_key": "a"}),
		"no object":       storePayload(t, map[string]any{"event_type": "stored", "medium": "cpu"}),
		"a number as key": storePayload(t, map[string]any{"event_type": "stored", "object_key": 7}),
		"cut off": storePayload(t, map[string]any{"event_type": "stored", "object_key": "a",
			"medium": "cpu"})[:40],
	} {
		if got, err := readEvents(payload); !errors.Is(err, events.ErrMalformed) || got != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestStoreMessage(t *testing.T) {
	for _, m := range []Message{
		{Kind: Batch, Session: 1<<64 - 1, Number: 1, Payload: []byte("payload")},
		{Kind: Alive, Session: 7, Number: 1 << 60, Payload: []byte{}},
		{Kind: Lost, Session: 7, Payload: []byte{}},
	} {
		got, err := readMessage(AppendMessage(nil, &m))
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%+v became %+v, %v", m, got, err)
		}
	}
	good := AppendMessage(nil, &Message{Kind: Lost, Session: 7})
	good[0] = 2
	if _, err := readMessage(good); !errors.Is(err, events.ErrVersion) {
		t.Errorf("a later version: %v", err)
	}
	for _, m := range []Message{{Kind: 0}, {Kind: 4}, {Kind: Alive, Payload: []byte("x")},
		{Kind: Batch, Number: 1<<64 - 1}} {
		if _, err := readMessage(AppendMessage(nil, &m)); !errors.Is(err, events.ErrMalformed) {
			t.Errorf("%+v: %v", m, err)
		}
	}
}

// FuzzStoreEvents reads any bytes: the result is a classified error, or events with an object or a tenant.
func FuzzStoreEvents(f *testing.F) {
	f.Add(storePayload(f, map[string]any{"event_type": "stored", "object_key": "a", "medium": "cpu"},
		map[string]any{"event_type": "cleared"}))
	f.Add([]byte{0x93, 1, 0x91, 0x80, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := readEvents(data)
		if err != nil && (!errors.Is(err, events.ErrMalformed) || list != nil) {
			t.Fatal(err)
		}
		if list == nil {
			list = slices.Values[[]storeEvent](nil)
		}
		for e := range list {
			if e.Kind < events.Stored || e.Kind > events.Cleared || (e.Object == "") != (e.Kind == events.Cleared) {
				t.Fatalf("%+v", e)
			}
		}
		if m, err := readMessage(data); err == nil {
			if again, err := readMessage(AppendMessage(nil, &m)); err != nil || !reflect.DeepEqual(m, again) {
				t.Fatalf("%+v became %+v, %v", m, again, err)
			}
		}
	})
}
