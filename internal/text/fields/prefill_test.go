package fields

import (
	"encoding/json"
	"reflect"
	"testing"
)

// prefillTwin is Prefill on a decoded body.
func prefillTwin(a API, body map[string]any) map[string]any {
	out := map[string]any{}
	for name, value := range body {
		out[name] = value
	}
	out["stream"] = false
	out["kv_transfer_params"] = map[string]any{"do_remote_decode": true, "do_remote_prefill": false,
		"remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil}
	delete(out, "stream_options")
	switch a {
	case Responses:
		out["max_output_tokens"], out["store"] = 1.0, false
	case Messages:
		out["max_tokens"] = 1.0
	default:
		out["max_tokens"] = 1.0
		if _, has := out["max_completion_tokens"]; has {
			out["max_completion_tokens"] = 1.0
		}
		delete(out, "min_tokens")
		delete(out, "min_completion_tokens")
	}
	return out
}

var prefillBodies = []string{
	`{}`, `{"model":"m","prompt":"a","stream":true,"stream_options":{"include_usage":true},"max_tokens":9}`,
	`{"messages":[],"max_completion_tokens":9,"min_tokens":3,"kv_transfer_params":{"remote_host":"evil"}}`,
	`{"max_completion_tokens":null,"min_completion_tokens":1,"n":1}`,
	`{"str\u0065am":true,"x":{"stream":true},"y":["max_tokens"],"input":"\"}"}`,
	`{"input":"x","max_output_tokens":7,"store":true,"stream":true}`,
}

// TestPrefill compares the request for a prefill worker with the request of a naive function.
func TestPrefill(t *testing.T) {
	for _, a := range []API{Completions, Chat, Responses, Messages} {
		for _, body := range prefillBodies {
			comparePrefill(t, a, []byte(body))
		}
	}
	for name, encode := range encodings {
		if got := string(Prefill(Messages, encode(`{"a":1}`))); got != `{"a":1,"stream":false,"kv_transfer_params":`+
			remoteDecode+`,"max_tokens":1}` {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got := string(Prefill(Messages, []byte(`{"temperature":NaN}`))); got[:len(`{"temperature":NaN,`)] !=
		`{"temperature":NaN,` {
		t.Error(got)
	}
}

func comparePrefill(t *testing.T, a API, body []byte) {
	t.Helper()
	var was, got map[string]any
	if json.Unmarshal(toUTF8(body), &was) != nil {
		return // NaN
	}
	out := Prefill(a, body)
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%s: %q becomes %q: %v", a, body, out, err)
	}
	if want := prefillTwin(a, was); !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %q\nbecomes %q\nwant %v", a, body, out, want)
	}
}

// FuzzPrefill compares with the naive function.
func FuzzPrefill(f *testing.F) {
	for _, body := range prefillBodies {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		if _, err := Read(Chat, []byte(body)); err == nil {
			comparePrefill(t, Chat, []byte(body))
		}
	})
}

var transferAnswers = map[string]string{
	`{"kv_transfer_params":{"remote_block_ids":[1,2],"a":"}"}}`:           `{"remote_block_ids":[1,2],"a":"}"}`,
	` {"a":{"kv_transfer_params":1},"kv_transfer_params" : {"b":null} } `: `{"b":null}`,
	`{"kv_transfer_params":{"a":1},"kv_transfer_params":{"b":1}}`:         `{"b":1}`,
	`{"kv_transfer_params":null}`:                                         "",
	`{"kv_transfer_params":{ }}`:                                          "", `{"kv_transfer_params":[1]}`: "",
	`{"kv_transfer_params":"x"}`: "", `{}`: "", `{"choices":[]}`: "",
	`[]`: "malformed", ``: "malformed", `{"kv_transfer_params":{"a":1}`: "malformed", `data: {}`: "malformed",
	`{"a":NaN}`: "malformed", `null`: "malformed",
}

func TestTransfer(t *testing.T) {
	for answer, want := range transferAnswers {
		value, ok := Transfer([]byte(answer))
		if ok != (want != "malformed") || ok && string(value) != want {
			t.Errorf("%s: %q, %v, want %q", answer, value, ok, want)
		}
	}
}

// FuzzTransfer reads any bytes. encoding/json must read the same description.
func FuzzTransfer(f *testing.F) {
	for answer := range transferAnswers {
		f.Add([]byte(answer))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		value, ok := Transfer(answer)
		all := map[string]json.RawMessage{}
		err := json.Unmarshal(answer, &all)
		if ok != (err == nil && string(answer[blank(answer, 0):][:1]) == "{") {
			t.Fatalf("%q: %v, but %v", answer, ok, err)
		}
		var want map[string]any
		_ = json.Unmarshal(all[KVTransfer], &want) // another value is no description
		if ok && (value != nil) != (len(want) > 0) {
			t.Fatalf("%q: the description is %q, want %v", answer, value, want)
		}
		var got map[string]any
		if value != nil && (json.Unmarshal(value, &got) != nil || !reflect.DeepEqual(got, want)) {
			t.Fatalf("%q: the description is %q, want %v", answer, value, want)
		}
	})
}

// TestTransferable has requests with blocks that vLLM can transfer, and requests without.
func TestTransferable(t *testing.T) {
	for body, want := range map[string]bool{
		`{"prompt":"a"}`: true, `{"prompt":["a"],"n":1,"best_of":null,"use_beam_search":false}`: true,
		`{"prompt":[1,2]}`: true, `{"prompt":["a","b"]}`: false, `{"prompt":[[1],[2]]}`: false, `{"prompt":"a","n":2}`: false,
		`{"prompt":"a","best_of":3}`: false, `{"prompt":"a","use_beam_search":true}`: false,
		`{"messages":[],"n":2}`: false, `{"messages":[]}`: true,
		`{"input":"a"}`: true, `{"input":"a","background":true}`: false, `{"input":"a","previous_response_id":"r"}`: false,
	} {
		a := Completions
		switch body[2] {
		case 'm':
			a = Chat
		case 'i':
			a = Responses
		}
		r, err := Read(a, []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Transferable([]byte(body)); got != want {
			t.Errorf("%s: %v", body, got)
		}
	}
	r, err := Read(Embeddings, []byte(`{"input":[1]}`))
	if err != nil || r.Transferable([]byte(`{"input":[1]}`)) {
		t.Errorf("embeddings are transferred: %v", err)
	}
}
