package fields

import (
	"encoding/json"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

func TestReplacePrompt(t *testing.T) {
	for body, want := range map[string]string{
		`{"prompt":"a"}`:   `{"prompt":[1,22]}`,
		`{"prompt":["a"]}`: `{"prompt":[[1,22]]}`,
		` {"n":1, "prompt" : "a\"}" ,"stop":["prompt"]}`: `{"n":1,"stop":["prompt"],"prompt":[1,22]}`,
		`{"\u0070rompt":"a","model":"m"}`:                `{"model":"m","prompt":[1,22]}`,
		`{"prompt":"a","temperature":NaN,"n":3}`:         `{"temperature":NaN,"n":3,"prompt":[1,22]}`,
		`{"prompt":"é","echo":false,"suffix":null}`:      `{"echo":false,"suffix":null,"prompt":[1,22]}`,
		`{"prompt":"a","x":{"prompt":"b"},"y":[{"prompt":"c"}]}`: `{"x":{"prompt":"b"},"y":[{"prompt":"c"}],` +
			`"prompt":[1,22]}`,

		`{"prompt":["a","b"]}`: "", `{"prompt":[]}`: "", `{"prompt":[3]}`: "", `{"prompt":[[3]]}`: "", `{"prompt":null}`: "",
		`{"messages":[]}`: "", `{"prompt":"a\ud800"}`: "", `{"prompt":"a\ufffd"}`: "", "{\"prompt\":\"a\xff\"}": "",
		"\ufeff" + `{"prompt":"a"}`: "", `{"prompt":"a","echo":true}`: "", `{"prompt":"a","suffix":""}`: "",
		`{"prompt":"a","add_special_tokens":false}`: "", `{"prompt":"a","truncate_prompt_tokens":5}`: "",
		`{"prompt":"a","use_beam_search":true}`: "", `{"prompt":"a","return_token_offsets":true}`: "",
		`{"prompt":"a","lora_path":"x"}`: "", `{"lora_request":{"lora_int_id":3},"prompt":"a"}`: "",
		`{"prompt":"a","truncation_side":"left"}`: "",
	} {
		got, ok := ReplacePrompt([]byte(body), api.Tokens{1, 22})
		if string(got) != want || ok != (want != "") {
			t.Errorf("%s becomes %q, %v, want %q", body, got, ok, want)
		}
	}
	if got, ok := ReplacePrompt([]byte(`{"prompt":""}`), api.Tokens{}); ok {
		t.Errorf("a prompt without tokens becomes %s", got)
	}
	for name, encode := range encodings {
		if _, ok := ReplacePrompt(encode(`{"prompt":"a"}`), api.Tokens{1}); ok != (name == "UTF-8") {
			t.Errorf("%s is replaced: %v", name, ok)
		}
	}
}

// TestTextFields: a field that needs the text is a field of completions.
func TestTextFields(t *testing.T) {
	for name := range needsText {
		if TableOf(Completions)[name] == 0 {
			t.Errorf("%s is no field of completions", name)
		}
	}
}

// FuzzReplacePrompt changes only the prompt.
func FuzzReplacePrompt(f *testing.F) {
	for _, body := range []string{`{"prompt":"a","n":1}`, `{"prompt":["a"],"stop":"]"}`, `{"prompt":"\\\"","a":{"b":[1]}}`,
		`{"a":NaN,"prompt":"x"}`} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := Read(Completions, body)
		if err != nil || len(r.Unsupported) > 0 {
			return
		}
		got, ok := ReplacePrompt(body, api.Tokens{7, 8})
		if !ok {
			return
		}
		after, err := Read(Completions, got)
		if err != nil || len(after.Tokens) != 2 || after.Salt != r.Salt || after.Model != r.Model {
			t.Fatalf("%q becomes %q: %+v, %v", body, got, after, err)
		}
		var a, b map[string]json.RawMessage
		if json.Unmarshal(body, &a) != nil {
			return // with NaN
		}
		if err := json.Unmarshal(got, &b); err != nil || len(a) != len(b) {
			t.Fatalf("%q becomes %q: %v", body, got, err)
		}
		for name, value := range a {
			if name != "prompt" && string(b[name]) != string(value) {
				t.Fatalf("%q becomes %q", body, got)
			}
		}
	})
}
