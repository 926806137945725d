package tokenize

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestAgentForms sends requests of agents' APIs to servers with and without renderers of these APIs. A server without
// renderers receives the chat.
func TestAgentForms(t *testing.T) {
	responses := `{"input":"hi","instructions":"be brief"}`
	messages := `{"messages":[{"role":"user","content":"hi"}],"system":"be brief","max_tokens":9}`
	chat := `{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}]`
	inline := `{"messages":[{"role":"user","content":"a"},{"role":"system","content":"b"}]}`
	image := `{"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"u"}}]}]}`
	const renderer = "/v1/messages/render /v1/chat/completions/render"
	for name, c := range map[string]struct {
		kind         Kind
		api, request string
		has          string // the paths of the server
		want         string // the path and the body, or a part of the error
		version      string // default: 0.33.0
	}{
		"responses": {Render, "responses", responses, "/v1/responses/render",
			"/v1/responses/render " + `{"model":"m",` + responses[1:], ""},
		"messages": {Render, "messages", messages, renderer, "/v1/messages/render " + `{"model":"m",` + messages[1:], ""},
		"responses as a chat": {Render, "responses", responses, chatRender,
			chatRender + " " + chat + `,"add_special_tokens":true}`, ""},
		"messages as a chat": {Render, "messages", messages, chatRender, chatRender + " " + chat + "}", ""},
		"responses of a tokenizer": {Tokenize, "responses", responses, "/tokenize",
			"/tokenize " + chat + `,"add_special_tokens":true}`, ""},
		"messages of SGLang": {Tokenize, "messages", messages, "/v1/tokenize", "names no vLLM", ""},
		"an old version":     {Render, "messages", messages, chatRender, "names no vLLM", "0.24.1"},
		"a development version": {Render, "messages", messages, chatRender, chatRender + " " + chat + "}",
			"0.32.1rc2.dev7+g1234"},
		"a later version": {Render, "messages", messages, renderer,
			"/v1/messages/render " + `{"model":"m",` + messages[1:], "1.0"},
		"inline system": {Render, "messages", inline, renderer,
			"/v1/messages/render " + `{"model":"m",` + inline[1:], ""},
		"inline system as a chat": {Render, "messages", inline, chatRender,
			"depends on the template", ""},
		"inline system of a tokenizer": {Tokenize, "messages", inline, "/tokenize", "depends on the template", ""},
		"empty tools": {Render, "messages", `{"messages":[{"role":"user","content":"a"}],"tools":[]}`, chatRender,
			"an empty list of tools", ""},
		"an image":                {Render, "messages", image, chatRender, `"image_url":{"url":"u"}`, ""},
		"an image of a tokenizer": {Tokenize, "messages", image, "/tokenize", "other parts than text", ""},
		"no path":                 {Render, "messages", messages, "/x", "404", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var asked []string
			url := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet && r.URL.Path == "/version" && !strings.Contains(c.has, "/v1/tokenize") {
					fmt.Fprint(w, `{"version":"`+cmp.Or(c.version, "0.33.0")+`"}`)
					return
				}
				if r.Method != http.MethodPost || !strings.Contains(" "+c.has+" ", " "+r.URL.Path+" ") {
					http.NotFound(w, r)
					return
				}
				body, _ := io.ReadAll(r.Body)
				asked = append(asked, r.URL.Path+" "+string(body))
				fmt.Fprint(w, `{"token_ids":[1],"tokens":[1]}`)
			})
			source := Source{Tokenize: URLs{url}, CacheBytes: new(int64), TimeoutMS: int(patience.Milliseconds())}
			if c.kind == Render {
				source = Source{Render: URLs{url}, CacheBytes: new(int64), TimeoutMS: int(patience.Milliseconds())}
			}
			s, _ := service(t, source)
			for range 2 {
				asked = nil
				_, err := s.Tokenize(t.Context(), "m", &api.Text{API: c.api, Request: api.Value(c.request)})
				if got := fmt.Sprint(asked, err); !strings.Contains(got, c.want) {
					t.Errorf("%s, not %s", got, c.want)
				}
			}
		})
	}
}

// TestAgentsLocally renders requests of agents' APIs by a template here. The vocabulary's tokens are bytes.
func TestAgentsLocally(t *testing.T) {
	const plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
	for name, c := range map[string]struct{ template, api, request, want string }{
		"messages": {plain, "messages", `{"messages":[{"role":"user","content":"a"}],"system":"s"}`, "<system>s<user>a"},
		"responses": {plain, "responses", `{"input":[{"role":"user","content":"a"}],"instructions":"s"}`,
			"<system>s<user>a"},
		"system anywhere": {plain, "messages", `{"messages":[{"role":"user","content":"a"},{"role":"system","content":"s"}]}`,
			"<user>a<system>s"},
		"system first": {"{% if messages[1:]|selectattr('role', 'equalto', 'system')|list %}{{ raise_exception('x') }}{% endif %}" +
			plain, "messages", `{"messages":[{"role":"user","content":"a"},{"role":"system","content":"s"}]}`,
			"<system>s<user>a"},
		"a template for training": {"{% generation %}{% endgeneration %}" + plain, "messages",
			`{"messages":[{"role":"user","content":"a"},{"role":"system","content":"s"}]}`, "<system>s<user>a"},
		"the time": {"{{ strftime_now('') }}" + plain, "messages",
			`{"messages":[{"role":"user","content":"a"},{"role":"system","content":"s"}]}`, "depends on the template"},
		"disabled thinking": {"{{ reasoning_effort }}{{ enable_thinking }}", "messages",
			`{"messages":[{"role":"user","content":"a"}],"thinking":{"type":"disabled"}}`, "noneFalse"},
		"disabled thinking, ignored": {"{{ enable_thinking is defined }}", "messages",
			`{"messages":[{"role":"user","content":"a"}],"thinking":{"type":"disabled"}}`, "True"},
		"no tools":  {"{{ tools is none }}", "messages", `{"messages":[{"role":"user","content":"a"}]}`, "True"},
		"few tools": {"{{ tools is none }}", "messages", `{"messages":[{"role":"user","content":"a"}],"tools":[]}`, "False"},
		"order": {"{{ messages[-1].tool_calls[0].function|tojson }}", "responses",
			`{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}]}`, `{"name": "f", "arguments": {}}`},
		"order of messages": {"{{ messages[-1].tool_calls[0].function|tojson }}", "messages",
			`{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"i","name":"f"}]}]}`,
			`{"arguments": {}, "name": "f"}`},
		"refused": {plain, "responses", `{"input":"x","previous_response_id":"r"}`, "previous_response_id"},
	} {
		t.Run(name, func(t *testing.T) {
			settings := Settings{Models: map[string]Source{"m": {Path: "m/tokenizer.json",
				TimeoutMS: int(patience.Milliseconds())}}}
			if err := settings.Complete(folder(t, map[string]string{"m/chat_template.jinja": c.template})); err != nil {
				t.Fatal(err)
			}
			got, err := New(Config{Settings: settings}).Tokenize(t.Context(), "m",
				&api.Text{API: c.api, Request: api.Value(c.request)})
			is := ""
			for _, id := range got.IDs {
				is += string(rune(id))
			}
			if err != nil && !strings.Contains(err.Error(), c.want) || err == nil && is != c.want {
				t.Errorf("%q, %v, not %q", is, err, c.want)
			}
		})
	}
}
