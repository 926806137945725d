package gateway

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestComparedPrompts compares the estimated tokens of requests with the usage of complete answers, for all APIs.
func TestComparedPrompts(t *testing.T) {
	const end = "response-body end"
	const text = `body {"model":"m","input":"hi"}`
	const chat = `body {"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":9}`
	const usage = `response-body {"usage":{"prompt_tokens":12,"completion_tokens":2}}`
	for name, c := range map[string]struct {
		send []string
		want string // empty: the request is not counted
	}{
		"completion": {[]string{"/v1/completions", `body {"model":"m","prompt":[1,2,3]}`, "response",
			`response-body {"usage":{"prompt_tokens":3,"completion_tokens":2}}`, end}, "3 with 3 and 2"},
		"stream of a completion": {[]string{"/v1/completions", `body {"model":"m","prompt":[1,2,3],"stream":true}`,
			"response", `response-body data:{"choices":[]}`, `response-body data:{"usage":{"prompt_tok`,
			`response-body ens":3}}`, end}, "3 with 3 and 0"},
		"batch": {[]string{"/v1/completions", `body {"model":"m","prompt":[[1,2,3],[4,5]]}`, "response",
			`response-body {"usage":{"prompt_tokens":5,"completion_tokens":4}}`, end}, "5 with 5 and 4"},
		"batch of embeddings": {[]string{"/v1/embeddings", `body {"model":"m","input":[[1,2,3],[4,5],[6]]}`, "response",
			`response-body {"usage":{"prompt_tokens":6,"completion_tokens":0}} end`}, "6 with 6 and 0"},
		"embedding of a text": {[]string{"/v1/embeddings", text, "response", usage + " end"}, "1 with 12 and 2"},
		"chat":                {[]string{"/v1/chat/completions", chat, "response", usage, end}, "7 with 12 and 2"},
		"stream of a chat": {[]string{"/v1/chat/completions", chat, "response", "response-body x",
			"response-body data:" + `{"usage":{"prompt_tokens":9}}`, usage, "response-trailers"}, "7 with 12 and 2"},
		"response": {[]string{"/v1/responses", text, "response",
			`response-body {"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8},"output_tokens":4}}`, end},
			"7 with 9 and 4"},
		"stream of a response": {[]string{"/v1/responses", text, "response",
			`response-body data:{"id":"resp_1","usage":null}`,
			`response-body data:{"usage":{"input_tokens":9,"output_tokens":4}}`, end}, "7 with 9 and 4"},
		"message": {[]string{"/v1/messages", chat, "response",
			`response-body {"usage":{"input_tokens":1,"cache_read_input_tokens":8,"output_tokens":4}}`, end}, "7 with 9 and 4"},
		"stream of a message": {[]string{"/v1/messages", chat, "response",
			`response-body data:{"message":{"usage":{"input_tokens":9,"output_tokens":0}}}`,
			`response-body data:{"usage":{"input_tokens":1,"cache_read_input_tokens":8,"output_tokens":4}}`, end},
			"7 with 9 and 4"},
		"answer of another worker": {[]string{"/v1/chat/completions", chat, "response 10.0.0.3:80", usage, end},
			"7 with 12 and 2"},

		"answer of a stranger": {[]string{"/v1/chat/completions", chat, "response 10.7.7.7:80", usage, end}, ""},
		"no usage":             {[]string{"/v1/chat/completions", chat, "response", "response-body x", end}, ""},
		"no answer":            {[]string{"/v1/chat/completions", chat, "response end"}, ""},
		"incomplete answer":    {[]string{"/v1/chat/completions", chat, "response", usage}, ""},
		"failure":              {[]string{"/v1/chat/completions", chat, "response status 500", usage, end}, ""},
		"negative": {[]string{"/v1/chat/completions", chat, "response",
			`response-body {"usage":{"prompt_tokens":-3}}`, end}, ""},
		"huge": {[]string{"/v1/chat/completions", chat, "response",
			`response-body {"usage":{"prompt_tokens":4294967297}}`, end}, ""},
		"an earlier response": {[]string{"/v1/responses", `body {"model":"m","input":"hi","previous_response_id":"resp_1"}`,
			"response", usage, end}, ""},
		"an earlier request": {[]string{"/v1/completions", `body {"model":"m","prompt":[1],"session_params":{"id":"x"}}`,
			"response", usage, end}, ""},
		"documents": {[]string{"/v1/rerank", `body {"model":"m","query":"hi","documents":["a","b"]}`, "response", usage,
			end}, ""},
		"another API": {[]string{"/v1/else", `body {"model":"m","x":"hi"}`, "response", usage, end}, ""},
	} {
		w := newWorld()
		cfg := w.config()
		cfg.Select = func(ctx context.Context, r *api.SelectRequest) (*api.Selection, error) {
			out, err := w.Select(ctx, r)
			if n := max(r.ISLTokens, uint64(len(r.Tokens))); n > 0 {
				out.ISLTokens = n
			}
			return out, err
		}
		send := slices.Clone(c.send)
		send[0] = "headers buffered " + send[0]
		if err := New(cfg).Process(&script{t: t, w: w, send: send}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := slices.DeleteFunc(w.log, func(line string) bool { return !strings.HasPrefix(line, "compared ") })
		var want []string
		if c.want != "" {
			want = []string{"compared m " + c.want}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
