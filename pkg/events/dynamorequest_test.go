package events

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// dynamoRequests are messages in the forms of all releases, with the expected changes.
var dynamoRequests = []struct {
	text string
	want []RouterRequest
}{
	{`{"request_id":"r","worker":{"worker_id":7,"dp_rank":2},"router_id":1,"lora_name":null,"data":{"AddRequest":
		{"token_sequence":[5,18446744073709551615],"track_prefill_tokens":true,"expected_output_tokens":8,
		"prefill_load_hint":{"initial_effective_prefill_tokens":9,"expected_prefill_duration":{"secs":0,"nanos":5}}}}}`,
		[]RouterRequest{{RankKey{"7", 2}, "r", RequestAdded, []SeqHash{5, 1<<64 - 1}, 9}}},
	{`{"request_id":"r","worker":{"worker_id":7,"dp_rank":0},"router_id":1,"data":{"AddRequest":
		{"token_sequence":null,"track_prefill_tokens":false,"expected_output_tokens":null,
		"prefill_load_hint":{"initial_effective_prefill_tokens":9}}}}`,
		[]RouterRequest{{RankKey{"7", 0}, "r", RequestAdded, nil, 0}}},
	{`{"request_id":"r","worker":{"worker_id":7,"dp_rank":0},"router_id":"8d","data":{"AddRequest":
		{"token_sequence":[1],"isl":40,"overlap":2}}}`,
		[]RouterRequest{{RankKey{"7", 0}, "r", RequestAdded, []SeqHash{1}, 8}}},
	{`{"request_id":"r","worker_id":-7,"router_id":"8d","data":{"AddRequest":{"token_sequence":[],"isl":3,"overlap":1}}}`,
		[]RouterRequest{{RankKey{"-7", 0}, "r", RequestAdded, nil, 0}}},
	{`{"request_id":"r","worker":{"worker_id":18446744073709551615,"dp_rank":0},"data":"Free","router_id":1}`,
		[]RouterRequest{{RankKey{"18446744073709551615", 0}, "r", RequestFreed, nil, 0}}},
	{`{"request_id":"r","worker":{"worker_id":7,"dp_rank":1},"data":"MarkPrefillCompleted","of_a_later_release":[{}]}`,
		[]RouterRequest{{RankKey{"7", 1}, "r", RequestPrefilled, nil, 0}}},
	{`{"request_id":"r","worker_id":7,"data":{"NewPrefill":9},"router_id":1}`,
		[]RouterRequest{{RankKey{"7", 0}, "r", RequestPrefilling, nil, 9}}},
	{`{"request_id":"r","worker_id":7,"data":{"UpdatePrefill":0},"router_id":1}`,
		[]RouterRequest{{RankKey{"7", 0}, "r", RequestPrefilling, nil, 0}}},
	{`{"request_id":"r","worker_id":7,"data":"CompletePrefill","router_id":1}`,
		[]RouterRequest{{RankKey{"7", 0}, "r", RequestPrefilled, nil, 0}}},
	{`{"events":[{"request_id":"r","worker":{"worker_id":7},"data":"Free"},
		{"request_id":"s","worker":{"worker_id":8},"data":{"NewPrefill":1}}]}`,
		[]RouterRequest{{RankKey{"7", 0}, "r", RequestFreed, nil, 0}, {RankKey{"8", 0}, "s", RequestPrefilling, nil, 1}}},
	{`{"events":[]}`, nil},
}

func readRequests(data []byte) (list []RouterRequest, err error) {
	err = ReadDynamoRequests(data, 16, func(r RouterRequest) { list = append(list, r) })
	return list, err
}

// TestDynamoRequests reads all forms as JSON, as MessagePack, and in the envelope.
func TestDynamoRequests(t *testing.T) {
	for _, c := range dynamoRequests {
		forms := [][]byte{[]byte(c.text), packedJSON(t, c.text)}
		envelope, err := msgpack.Marshal(map[string]any{"topic": "active_sequences_events", "publisher_id": uint64(1),
			"sequence": 1, "published_at": 1, "payload": forms[1]})
		if err != nil {
			t.Fatal(err)
		}
		for i, data := range append(forms, envelope) {
			got, err := readRequests(data)
			if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s in form %d: %+v, %v, want %+v", c.text, i, got, err, c.want)
			}
		}
	}
}

// packedJSON converts JSON to MessagePack.
func packedJSON(t *testing.T, text string) []byte {
	t.Helper()
	var v any
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatal(err)
	}
	packed, err := msgpack.Marshal(withNumbers(v))
	if err != nil {
		t.Fatal(err)
	}
	return packed
}

// TestDynamoRequestsRefused rejects messages without a request, a worker or a change.
func TestDynamoRequestsRefused(t *testing.T) {
	for text, want := range map[string]string{
		`{"worker_id":7,"data":"Free"}`:                                                  "request_id is missing",
		`{"request_id":"","worker_id":7,"data":"Free"}`:                                  "request_id is missing",
		`{"request_id":"r","data":"Free"}`:                                               "worker_id is missing",
		`{"request_id":"r","worker_id":null,"data":"Free"}`:                              "worker_id is missing",
		`{"request_id":"r","worker":{"dp_rank":1},"data":"Free"}`:                        "worker_id is missing",
		`{"request_id":"r","worker_id":7}`:                                               "data is missing",
		`{"request_id":"r","worker_id":7,"data":"Other"}`:                                "unknown change",
		`{"request_id":"r","worker_id":7,"data":{"Other":1}}`:                            "none of AddRequest",
		`{"request_id":"r","worker_id":7,"data":{"NewPrefill":-1}}`:                      "-1",
		`{"request_id":"r","worker_id":7,"data":{"NewPrefill":9007199254740993}}`:        "above the maximum",
		`{"request_id":"r","worker_id":7,"data":{"AddRequest":{"token_sequence":[""]}}}`: "not a 64-bit number",

		`{"events":[{"events":[]}]}`: "event 1 of 1: request_id is missing",
	} {
		if got, err := readRequests([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v, want %q", text, got, err, want)
		}
	}
	if _, err := readRequests(make([]byte, maxPayload+1)); err == nil {
		t.Error("a message that is too long is read")
	}
}

// FuzzDynamoRequests reads any bytes without a panic, and yields only changes with a request and a worker.
func FuzzDynamoRequests(f *testing.F) {
	for _, c := range dynamoRequests {
		f.Add([]byte(c.text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		list, _ := readRequests(data)
		for _, r := range list {
			if r.ID == "" || r.Change == "" || r.PrefillTokens > MaxEngineCount {
				t.Errorf("%+v", r)
			}
		}
	})
}
