package openaisim

import (
	"cmp"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestAnswers checks that answers with and without streams report the number of cached prompt tokens.
func TestAnswers(t *testing.T) {
	e, err := Start("127.0.0.1:0", Options{Model: "m", BlockSize: 2, Tokens: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Kill()
	for _, c := range []struct{ path, body, want string }{
		{"v1/completions", `{"model":"m","prompt":[1,2,3,4,5]}`, `"cached_tokens":0`},
		{"v1/completions", `{"model":"m","prompt":[1,2,3,4,6],"stream":true}`, `"cached_tokens":4`},
		{"v1/completions", `{"model":"m","prompt":[1,2,9,4,6]}`, `"cached_tokens":2`},
		{"v1/completions", `{"model":"m","prompt":"a b c"}`, `"text":"x "`},
		{"v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"a"}]}`, `"cached_tokens":0`},
		{"v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"a"},` +
			`{"role":"assistant","content":"x "},{"role":"user","content":"b"}]}`, `"cached_tokens":4`},
		{"v1/completions", `{"model":"x","prompt":[1]}`, "model"},
		{"v1/completions", `{"model":"m","prompt":{}}`, "json"},
		{"v1/completions", `{"model":"m","prompt":["a b","c"]}`, `"prompt_tokens":3`},
		{"v1/completions", `{"model":"m","prompt":[[1,2],[3]]}`, `"prompt_tokens":3`},
		{"v1/responses", `{"model":"m","input":"a b"}`, `"input_tokens":5`},
		{"v1/responses", `{"model":"m","instructions":"c","stream":true,"input":[{"role":"user","content":` +
			`[{"type":"input_text","text":"a b"}]}]}`, `"type":"response.completed","response":{"id":"resp_1"`},
		{"v1/messages", `{"model":"m","system":"c","messages":[{"role":"user","content":"a b"}]}`, `"cache_read_input_tokens":8`},
		{"v1/messages", `{"model":"m","stream":true,"messages":[{"role":"user","content":"a b"}]}`, "event: message_stop"},
		{"v1/embeddings", `{"model":"m","input":["a b","c"]}`, `"prompt_tokens":3`},
		{"v1/score", `{"model":"m","queries":"a b","documents":["c","d"]}`, `"prompt_tokens":6`},
		{"v1/rerank", `{"model":"m","query":"a b","documents":["c","d"]}`, `"prompt_tokens":6`},
		{"tokenize", `{"model":"m","prompt":[1,2,3]}`, `"tokens":[1,2,3]`},
		{"tokenize", `{"model":"m","prompt":"a b"}`, `"count":2`},
		{"tokenize", `{"model":"m","messages":[{"role":"user","content":"a b"}]}`, `"count":5`},
	} {
		r, err := http.Post("http://"+e.Addr+"/"+c.path, "application/json", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || !strings.Contains(string(text), c.want) {
			t.Errorf("%s: %s, %v, want %s", c.body, text, err, c.want)
		}
	}
}

// TestRefusals: refused requests get errors in JSON. The error for an unknown model has the served model.
func TestRefusals(t *testing.T) {
	e, err := Start("127.0.0.1:0", Options{Model: "m", BlockSize: 2, Tokens: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Kill)
	for _, c := range []struct {
		body, want string
		fail       int
	}{
		{`{"model":"no\"pe","prompt":[1]}`, `the model "no\"pe" does not exist; this engine serves m`, 0},
		{`{"model":"m","prompt":{}}`, "json: ", 0},
		{`{"model":"m","prompt":[1]}`, "the engine fails", http.StatusServiceUnavailable},
	} {
		e.Fail(c.fail)
		r, err := http.Post("http://"+e.Addr+"/v1/completions", "application/json", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		var body struct{ Error struct{ Message string } }
		err = json.NewDecoder(r.Body).Decode(&body)
		r.Body.Close()
		if form := r.Header.Get("Content-Type"); err != nil || form != "application/json" ||
			!strings.Contains(body.Error.Message, c.want) || r.StatusCode != cmp.Or(c.fail, http.StatusBadRequest) {
			t.Errorf("%s: %d, %s, %+v, %v, want %s", c.body, r.StatusCode, form, body, err, c.want)
		}
	}
}
