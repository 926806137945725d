package tokenize

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
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
		r, err := (&renderer{}).with(template)
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.render(t.Context(), &text)
		if got != c.Text || (err != nil) != (c.Error != "") {
			t.Errorf("%s:\n%q, %v, not\n%q, %s", c.Request, got, err, c.Text, c.Error)
		}
	}
}

// TestChatsRefused has chats that engines, or their versions, take in different ways.
func TestChatsRefused(t *testing.T) {
	user := `{"role":"user","content":"x"}`
	for _, c := range [][2]string{
		{`{"messages":[{"role":"developer","content":"x"}]}`,
			"its role is \"developer\""},
		{`{"messages":[{"content":"x"}]}`,
			"its role is"},
		{`{"messages":[7]}`,
			"message 0: it is no object"},
		{`{"messages":[{"role":"user","content":7}]}`,
			"neither text nor a list"},
		{`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`,
			"part 0 of its content is \"image_url\""},
		{`{"messages":[{"role":"user","content":["x"]}]}`,
			"is no object"},
		{`{"messages":[{"role":"system","content":"x-anthropic-billing-header: a\nb"}]}`,
			"billing"},
		{`{"messages":[{"role":"assistant","content":"x","reasoning":7}]}`,
			"reasoning"},
		{`{"messages":[{"role":"assistant","tool_calls":7}]}`,
			"tool_calls is no list"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"type":"x","function":{}}]}]}`,
			"it is no function"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"index":1,"function":{}}]}]}`,
			"the field \"index\""},
		{`{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"{"}}]}]}`,
			"its arguments are no JSON"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"[]"}}]}]}`,
			"its arguments are no object"},
		{`{"messages":[` + user + `],"tools":[{"type":"function","function":{"name":"f","x":1}}]}`,
			"the field \"x\""},
		{`{"messages":[` + user + `],"tools":[{"type":"custom","function":{"name":"f"}}]}`,
			"tool 0 is no function"},
		{`{"messages":[` + user + `],"tools":[7]}`,
			"tool 0: it is no object"},
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
		{`{"messages":"hi"}`, "messages is no list"},
		{`{"messages":[` + user + `],"tools":{}}`, "tools is no list"},
	} {
		request, want := c[0], c[1]
		var text api.Text
		if err := json.Unmarshal([]byte(request), &text); err != nil {
			t.Fatal(err)
		}
		r, err := (&renderer{}).with(showAll)
		if err != nil {
			t.Fatal(err)
		}
		_, err = (&Local{chat: r}).render(t.Context(), &text)
		if OutcomeOf(err) != Refused || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: %v", request, err)
		}
	}
}

// folder is a tokenizer.json of bytes and files beside it.
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
		want     string // tokens, or an error's part
	}{
		"of the configuration":  {files{config: own}, "", "Bcx"},
		"beside":                {files{config: own, jinja: "{{ bos_token }}j\n"}, "", "Bj"},
		"named":                 {files{config: own, "x": "n"}, "x", "n"},
		"without configuration": {files{jinja: "j"}, "", "j"},
		"none":                  {files{}, "", "there is none beside"},
		"not wanted":            {files{config: own}, "none", "there is none beside"},
		"named and missing":     {files{}, "x", "file does not exist"},
		"several":               {files{config: `{"chat_template":[]}`}, "", "several chat templates"},
		"no configuration":      {files{config: `{`}, "", "tokenizer_config.json: "},
		"an unknown token":      {files{jinja: "{{ bos_token }}"}, "", "tokenizer_config.json does not say"},
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

// TestClock has a template that shows the time: its texts are not kept.
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
