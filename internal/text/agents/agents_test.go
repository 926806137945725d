package agents

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// vector is a golden vector.
type vector struct {
	API      string
	Template Template
	Request  json.RawMessage

	Messages, Tools json.RawMessage
	Kwargs          map[string]any
	Special         bool
	Error           string
}

func vectors(t testing.TB) (list []vector) {
	t.Helper()
	for _, name := range []string{"anywhere", "first"} {
		f, err := os.Open("testdata/" + name + ".jsonl")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var v vector
			if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
				t.Fatal(err)
			}
			list = append(list, v)
		}
	}
	if len(list) < 100 {
		t.Fatalf("only %d vectors", len(list))
	}
	return list
}

func convert(name string, body []byte, template *Template) (*Chat, error) {
	if name == "messages" {
		return Messages(body, template)
	}
	return Responses(body)
}

// TestVectors compares conversions with vLLM's own.
func TestVectors(t *testing.T) {
	for _, v := range vectors(t) {
		got, err := convert(v.API, v.Request, &v.Template)
		if refused := v.Error != "" || string(v.Messages) == "[]"; refused || err != nil {
			if !refused || err == nil {
				t.Errorf("%s: %v, and vLLM %q", v.Request, err, v.Error)
			}
			continue
		}
		kwargs := map[string]any{"add_generation_prompt": got.AddGenerationPrompt == nil || *got.AddGenerationPrompt,
			"continue_final_message": got.ContinueFinalMessage != nil && *got.ContinueFinalMessage}
		if got.ChatTemplateKwargs != nil {
			if err := json.Unmarshal(got.ChatTemplateKwargs, &kwargs); err != nil {
				t.Fatal(err)
			}
		}
		if !reflect.DeepEqual(plain(t, got.Messages), value(t, v.Messages)) {
			t.Errorf("%s:\n%s, not\n%s", v.Request, got.Messages, v.Messages)
		}
		if !reflect.DeepEqual(value(t, got.Tools), value(t, v.Tools)) {
			t.Errorf("%s: tools\n%s, not\n%s", v.Request, got.Tools, v.Tools)
		}
		if !reflect.DeepEqual(kwargs, v.Kwargs) || got.SpecialTokens != v.Special {
			t.Errorf("%s: %v %v, not %v %v", v.Request, kwargs, got.SpecialTokens, v.Kwargs, v.Special)
		}
	}
}

func value(t testing.TB, text []byte) (v any) {
	t.Helper()
	if len(text) > 0 {
		if err := json.Unmarshal(text, &v); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	return v
}

// plain returns messages in the form of the vectors: calls have their arguments as values.
func plain(t testing.TB, messages []byte) any {
	t.Helper()
	list := value(t, messages)
	for _, m := range list.([]any) {
		calls, _ := m.(map[string]any)["tool_calls"].([]any)
		for i, c := range calls {
			call := c.(map[string]any)
			function := call["function"].(map[string]any)
			arguments := function["arguments"]
			var v any
			if json.Unmarshal([]byte(arguments.(string)), &v) == nil {
				arguments = v
			}
			calls[i] = map[string]any{"id": call["id"], "type": call["type"], "name": function["name"], "arguments": arguments}
		}
	}
	return list
}

// TestRefused covers unsupported requests.
func TestRefused(t *testing.T) {
	user := `{"role":"user","content":"x"}`
	messages := func(more string) string { return `{"messages":[` + user + `]` + more + `}` }
	input := func(items string) string { return `{"input":[` + items + `]}` }
	for _, c := range []struct{ api, request, want string }{
		{"messages", `[]`, "not a JSON object"},
		{"messages", ``, "not a JSON object"},
		{"messages", `{`, "another type"},
		{"messages", `{"messages":7}`, "another type"},
		{"messages", `{"messages":[],"messages":[]}`, "given twice"},
		{"messages", `{"messages":[]}`, "no message"},
		{"messages", `{"messages":[{"role":"user"}]}`, "no content"},
		{"messages", `{"messages":[{"role":"tool","content":"x"}]}`, `the role is "tool"`},
		{"messages", `{"messages":[{"role":"user","content":[{"type":"document"}]}]}`, `the type "document"`},
		{"messages", `{"messages":[{"role":"user","content":7}]}`, "another type"},
		{"messages", `{"messages":[` + user + `,{"role":"assistant","content":[{"type":"tool_use","name":"f"}]}]}`, "no id"},
		{"messages", `{"messages":[` + user + `,{"role":"assistant","content":[{"type":"tool_use","id":"i","input":[]}]}]}`,
			"not an object"},
		{"messages", `{"messages":[` + user + `,{"role":"assistant","content":[{"type":"tool_result","content":[]}]}]}`,
			"text of Python"},
		{"messages", `{"messages":[{"role":"user","content":[{"type":"tool_addition"}]}]}`, "belongs in a system message"},
		{"messages", messages(`,"system":[{"type":"tool_removal"}]`), "belongs in a system message"},
		{"messages", messages(`,"tools":[{"type":"web_search_20250305","name":"web_search"}]`), "no input_schema"},
		{"messages", messages(`,"tools":[{"name":"f","input_schema":7}]`), "no input_schema"},
		{"messages", messages(`,"chat_template_kwargs":7`), "chat_template_kwargs"},
		{"messages", messages(`,"thinking":{"type":"disabled"}`), "depends on the template"},
		{"messages", `{"messages":[` + user + `,{"role":"system","content":"s"}]}`, "depends on the template"},
		{"messages", messages(`,"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"none"}`),
			"tool_choice"},
		{"responses", `{"input":"x","tools":[{"type":"function","name":"f"}],"tool_choice":"none"}`, "tool_choice"},
		{"responses", `{}`, "no input"},
		{"responses", `{"input":7}`, "another type"},
		{"responses", `{"input":[]}`, "no message"},
		{"responses", `{"input":"x","previous_response_id":"resp_1"}`, "previous_response_id"},
		{"responses", `{"input":"x","previous_input_messages":[]}`, "previous_input_messages"},
		{"responses", `{"input":"x","prompt":{"id":"p"}}`, "stored prompt"},
		{"responses", `{"input":"x","truncation":"auto"}`, "truncation"},
		{"responses", `{"input":"x","truncation":null}`, "truncation"},
		{"responses", `{"input":"x","tools":[{"type":"unknown"}]}`, "unknown type"},
		{"responses", `{"input":"x","tools":[{"type":"custom","name":"c","format":{"type":"grammar"}}]}`, "grammar"},
		{"responses", input(`{"type":"item_reference","id":"x"}`), "not supported by engines"},
		{"responses", input(`{"role":"tool","content":"x"}`), `the role is "tool"`},
		{"responses", input(`{"role":"user"}`), "neither a text nor a list"},
		{"responses", input(`{"role":"user","content":[{"type":"text","text":"x"}]}`), `the type "text"`},
		{"responses", input(`{"role":"user","content":[{"type":"input_file","file_id":"x"}]}`), `"input_file"`},
		{"responses", input(`{"role":"assistant","content":[{"type":"output_text","text":"x"}]}`), "refuse there"},
		{"responses", input(`{"type":"message","role":"assistant","content":[{"type":"refusal","refusal":"x"}]}`),
			`"refusal"`},
		{"responses", input(`{"type":"message","role":"assistant","content":[]}`), "neither a text nor a list"},
		{"responses", input(`{"type":"function_call","name":"f","arguments":"{}"}`), "needs a call_id"},
		{"responses", input(`{"type":"custom_tool_call","name":"f","call_id":"c"}`), "needs a call_id"},
		{"responses", input(`{"type":"function_call_output","output":"x"}`), "needs a call_id"},
		{"responses", input(`{"type":"reasoning"}`), "needs a summary"},
		{"responses", input(`{"type":"reasoning","summary":[],"encrypted_content":"x"}`), "encrypted"},
	} {
		if _, err := convert(c.api, []byte(c.request), nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, not %q", c.request, err, c.want)
		}
	}
}

// TestBounds covers the bounds of size and depth.
func TestBounds(t *testing.T) {
	for _, name := range []string{"messages", "responses"} {
		deep := []byte(`{"metadata":` + strings.Repeat("[", MaxDepth) + strings.Repeat("]", MaxDepth) + `}`)
		if _, err := convert(name, deep, nil); err == nil || !strings.Contains(err.Error(), "nested deeper") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := convert(name, bytes.Repeat([]byte(" "), api.MaxBody+1), nil); err == nil ||
			!strings.Contains(err.Error(), "more than") {
			t.Errorf("%s: %v", name, err)
		}
	}
	text := `{"input":"` + strings.Repeat(`[\"`, MaxDepth) + `"}`
	if c, err := Responses([]byte(text)); err != nil || c.Messages == nil {
		t.Error("brackets in a text count as nesting:", err)
	}
}

// check verifies the promises about a chat.
func check(t *testing.T, body []byte, c *Chat) {
	t.Helper()
	if err := c.Text.Check(); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	d := json.NewDecoder(bytes.NewReader(c.Messages))
	d.DisallowUnknownFields()
	type plainMessage struct {
		message
		Content json.RawMessage `json:"content"`
	}
	var decoded []plainMessage
	if err := d.Decode(&decoded); err != nil {
		t.Fatalf("%q: %s: %v", body, c.Messages, err)
	}
	for i, m := range decoded {
		if m.Role == "" || (m.Role == "tool") != (m.ToolCallID != nil) {
			t.Fatalf("%q: message %d: %s", body, i, c.Messages)
		}
	}
	for _, v := range []api.Value{c.Tools, c.ChatTemplateKwargs} {
		if v != nil && !json.Valid(v) {
			t.Fatalf("%q: %s", body, v)
		}
	}
}

func FuzzMessages(f *testing.F) {
	for _, v := range vectors(f) {
		if v.API == "messages" {
			f.Add([]byte(v.Request), v.Template.MergeSystem)
		}
	}
	f.Fuzz(func(t *testing.T, body []byte, merge bool) {
		if c, err := Messages(body, &Template{merge, "none"}); err == nil {
			check(t, body, c)
		}
		if c, err := Messages(body, nil); err == nil {
			known, err := Messages(body, &Template{merge, "low"})
			if err != nil || !reflect.DeepEqual(c, known) {
				t.Fatalf("%q depends on the template: %v", body, err)
			}
		}
	})
}

func FuzzResponses(f *testing.F) {
	for _, v := range vectors(f) {
		if v.API == "responses" {
			f.Add([]byte(v.Request))
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if c, err := Responses(body); err == nil {
			check(t, body, c)
		}
	})
}
