package tokenize

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// The templates of testdata/chats.json.
const (
	showAll = "{{ messages|tojson }}\n{{ tools|tojson }}\n{{ documents }} {{ add_generation_prompt }} {{ enable_thinking }} " +
		"{{ q }}\n{% for m in messages %}{{ m.content|trim }};{% endfor %}"
	showContinued = "{% for m in messages %}<{{ m.role }}>{{ m.content|trim if trim else m.content }}</>{% endfor %}{{ q }}"
)

// TestChats renders chats as vLLM does.
func TestChats(t *testing.T) {
	data, err := os.ReadFile("testdata/chats.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Request     json.RawMessage
		Text, Error string
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		var text api.Text
		if err := json.Unmarshal(c.Request, &text); err != nil {
			t.Fatal(err)
		}
		template := showAll
		if text.ContinueFinalMessage != nil {
			template = showContinued
		}
		r, err := (&renderer{}).withTemplate(t.Context(), template)
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.render(t.Context(), &text, &options{})
		if got != c.Text || (err != nil) != (c.Error != "") {
			t.Errorf("%s:\n%q, %v, not\n%q, %s", c.Request, got, err, c.Text, c.Error)
		}
	}
}

// TestChatFields renders chats with fields that clients add, and with the role developer, as vLLM does.
func TestChatFields(t *testing.T) {
	data, err := os.ReadFile("testdata/fields.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Template, Text string
		Request        api.Text
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		r, err := (&renderer{}).withTemplate(t.Context(), c.Template)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := r.render(t.Context(), &c.Request, &options{}); err != nil || got != c.Text {
			t.Errorf("%s %s:\n%q, %v, not\n%q", c.Request.Messages, c.Request.Tools, got, err, c.Text)
		}
	}
}

// TestChatsRefused covers chats that engines, or their versions, treat differently.
func TestChatsRefused(t *testing.T) {
	user := `{"role":"user","content":"x"}`
	for _, c := range [][2]string{
		{`{"messages":[{"role":"latest_reminder","content":"x"}]}`,
			"the role is \"latest_reminder\""},
		{`{"messages":[{"role":"developer","content":"x","tools":[]}]}`,
			"a developer message has tools"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"{\"a\":NaN}"}}]}]}`,
			"NaN"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"{\"a\":1e999}"}}]}]}`,
			"is too large"},
		{`{"messages":[{"content":"x"}]}`,
			"the role is"},
		{`{"messages":[7]}`,
			"message 0: not an object"},
		{`{"messages":[{"role":"user","content":7}]}`,
			"neither text nor a list"},
		{`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`,
			"part 0 of the content is \"image_url\""},
		{`{"messages":[{"role":"user","content":["x"]}]}`,
			"is not an object"},
		{`{"messages":[{"role":"assistant","content":"x","reasoning":7}]}`,
			"reasoning"},
		{`{"messages":[{"role":"assistant","tool_calls":7}]}`,
			"tool_calls is not a list"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"type":"x","function":{}}]}]}`,
			"not a function"},
		{`{"messages":[` + user + `],"tools":[{"type":"custom","function":{"name":"f"}}]}`,
			"tool 0 is not a function"},
		{`{"messages":[` + user + `],"tools":[7]}`,
			"tool 0: not an object"},
		{`{"messages":[` + user + `],"chat_template_kwargs":{"tools":[]}}`,
			"chat_template_kwargs.tools"},
		{`{"messages":[` + user + `],"chat_template_kwargs":{"enable_thinking":null}}`,
			"enable_thinking"},
		{`{"messages":[` + user + `],"add_generation_prompt":true,"continue_final_message":true}`,
			"exclude each other"},
		{`{"messages":[],"add_generation_prompt":false,"continue_final_message":true}`,
			"no final message"},
		{`{"messages":[` + user + `],"chat_template":"{% if %}"}`,
			"chat_template: line 1"},
		{`{"messages":[` + user + `],"chat_template":"{{ raise_exception('never') }}"}`,
			"never"},
		{`{"messages":[` + user + `],"chat_template":"{{ bos_token }}"}`,
			"bos_token"},
		{`{"messages":[` + user + `],"chat_template":"{% for p in messages[0].content %}{% endfor %}"}`,
			"in parts"},
		{`{"messages":[` + user + `],"chat_template":"{{ 'x' * 9000000 }}"}`,
			"has 9000000 bytes"},
		{`{"messages":"hi"}`, "messages is not a list"},
		{`{"messages":[` + user + `],"tools":{}}`, "tools is not a list"},
	} {
		request, want := c[0], c[1]
		var text api.Text
		if err := json.Unmarshal([]byte(request), &text); err != nil {
			t.Fatal(err)
		}
		r, err := (&renderer{}).withTemplate(t.Context(), showAll)
		if err != nil {
			t.Fatal(err)
		}
		_, err = (&Local{chat: r}).render(t.Context(), &text, &options{})
		if OutcomeOf(err) != Refused || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: %v", request, err)
		}
	}
}

// folder returns a tokenizer.json of bytes, and the files beside it.
func folder(t *testing.T, files map[string]string) func(string) ([]byte, error) {
	t.Helper()
	files["m/tokenizer.json"] = string(byteVocabulary(t))
	return func(path string) ([]byte, error) {
		if text, has := files[path]; has {
			return []byte(text), nil
		}
		return nil, fs.ErrNotExist
	}
}

// TestTemplateFiles finds a template as transformers does.
func TestTemplateFiles(t *testing.T) {
	const config, jinja = "m/tokenizer_config.json", "m/chat_template.jinja"
	own := `{"bos_token":{"content":"B"},"eos_token":null,` +
		`"chat_template":"{{ bos_token }}{{ eos_token }}c{{ messages[0].content }}"}`
	parts := "{% for p in q %}{% endfor %}"
	text := &api.Text{Messages: api.Value(`[{"role":"user","content":"x"}]`)}
	type files = map[string]string
	for name, c := range map[string]struct {
		files    files
		template string
		want     string // tokens, or a part of the error
	}{
		"of the configuration":  {files{config: own}, "", "Bcx"},
		"beside":                {files{config: own, jinja: "{{ bos_token }}j\n"}, "", "Bj"},
		"named":                 {files{config: own, "x": "n"}, "x", "n"},
		"without configuration": {files{jinja: "j"}, "", "j"},
		"none":                  {files{}, "", "has no chat template"},
		"not wanted":            {files{config: own}, "none", "has no chat template"},
		"named and missing":     {files{}, "x", "file does not exist"},
		"several":               {files{config: `{"chat_template":[]}`}, "", "several chat templates"},
		"no configuration":      {files{config: `{`}, "", "tokenizer_config.json: "},
		"an unknown token":      {files{jinja: "{{ bos_token }}"}, "", "tokenizer_config.json does not define"},
		"unknown statements":    {files{jinja: "\n{% include 'x' %}"}, "", `line 2: the statement "include"`},
		"of gpt-oss":            {files{jinja: "<|start|>x<|channel|>"}, "", "gpt-oss"},
		"of images":             {files{jinja: "{% for p in messages[0].content %}{% endfor %}"}, "", "in parts"},
		"a copy of contents":    {files{jinja: "{% set q = messages[0].content %}" + parts}, "", "in parts"},
		"a macro over contents": {files{jinja: "{% macro a(q) %}" + parts + "{% endmacro %}{{ a(messages[0]['content']) }}"},
			"", "in parts"},
	} {
		settings := Settings{Models: map[string]Source{"m": {Path: "m/tokenizer.json", ChatTemplate: c.template,
			TimeoutMS: int(patience.Milliseconds())}}}
		err := settings.Complete(folder(t, c.files))
		var got Tokens
		if err == nil {
			got, err = New(Config{Settings: settings}).Tokenize(t.Context(), "m", text)
		}
		is := ""
		for _, id := range got.IDs {
			is += string(rune(id))
		}
		if err != nil && !strings.Contains(err.Error(), c.want) || err == nil && is != c.want {
			t.Errorf("%s: %q, %v", name, is, err)
		}
	}
}

// TestClock: texts of a template that reads the time are not cached.
func TestClock(t *testing.T) {
	for template, want := range map[string]Outcome{"{{ strftime_now('%Y') }}": OK, "x": Cached} {
		settings := Settings{Models: map[string]Source{"m": {Path: "m/tokenizer.json",
			TimeoutMS: int(patience.Milliseconds())}}}
		if err := settings.Complete(folder(t, map[string]string{"m/chat_template.jinja": template})); err != nil {
			t.Fatal(err)
		}
		var outcomes []Outcome
		s := New(Config{Settings: settings, Observe: func(_, _ string, o Outcome, _ time.Duration) {
			outcomes = append(outcomes, o)
		}})
		for range 2 {
			if _, err := s.Tokenize(t.Context(), "m", chat); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.Equal(outcomes, []Outcome{OK, want}) {
			t.Errorf("%s: %v", template, outcomes)
		}
	}
}

// TestDisconnect: clients disconnect while their texts are rendered, and the only slot of the model is free again at
// once. Each of the texts would need minutes, with few steps of the template.
func TestDisconnect(t *testing.T) {
	const n = 7 << 20
	settings := Settings{Models: map[string]Source{"m": {Path: "m/tokenizer.json", InFlight: 1,
		TimeoutMS: int((10 * patience).Milliseconds())}}}
	read := folder(t, map[string]string{"m/chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}"})
	if err := settings.Complete(read); err != nil {
		t.Fatal(err)
	}
	s := New(Config{Settings: settings})
	begun, ended := make(chan bool), make(chan error)
	url := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		var text api.Text
		if err := json.NewDecoder(r.Body).Decode(&text); err != nil {
			t.Error(err)
		}
		_, _ = io.Copy(io.Discard, r.Body) // net/http detects the end of the connection after the end of the body
		begun <- true
		_, err := s.Tokenize(r.Context(), "m", &text)
		ended <- err
	})
	wide := strings.Repeat("\u4e00", n/3)
	period := strings.Repeat("a"+strings.Repeat("b", 16), n/2/17)
	yes, no := true, false
	message := func(contents ...string) api.Value {
		var list []map[string]string
		for _, text := range contents {
			list = append(list, map[string]string{"role": "user", "content": text})
		}
		data, err := json.Marshal(list)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	for name, text := range map[string]api.Text{
		"trim": {Messages: message(wide), ChatTemplate: "{% set c = messages[0].content %}{% set c = c ~ c ~ c %}" +
			"{% set x = range(5000)|map('trim', c)|list %}"},
		"search": {Messages: message(period, period[:n/3]+"c"), ChatTemplate: "{% set a = messages[0].content %}" +
			"{% set a = a ~ a ~ a %}{% for i in range(500) %}{% set x = messages[1].content in a %}{% endfor %}"},
		"continued": {Messages: message(period, period[:n/3]+"c"), AddGenerationPrompt: &no, ContinueFinalMessage: &yes},
	} {
		body, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		gone := make(chan bool)
		go func() {
			if a, err := http.DefaultClient.Do(r); err == nil {
				a.Body.Close()
			}
			close(gone)
		}()
		<-begun
		for len(s.sourceOf("m").slots) == 0 {
			runtime.Gosched()
		}
		cancel()
		<-gone
		select {
		case err := <-ended:
			if o := OutcomeOf(err); o != TimedOut && o != Refused { // refused for too much work
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(patience):
			t.Fatalf("%s: the text is still in progress %v after its client disconnected", name, patience)
		}
		if _, err := s.Tokenize(t.Context(), "m", &api.Text{Prompt: "x" + name}); err != nil {
			t.Errorf("%s: no slot is free: %v", name, err)
		}
	}
}
