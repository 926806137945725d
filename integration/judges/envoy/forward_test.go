//go:build judges

package envoy

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestForwardedTokens sends texts of all sizes through both modes. The engines receive token ids, answer as to the
// text, and see the whole body. A text with an echo passes unchanged.
func TestForwardedTokens(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tokenizers.yaml")
	settings := "models:\n  sim:\n    engines: tokenize\n    timeout_ms: 60000\n"
	if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, edits := range bothModes {
		t.Run(name, func(t *testing.T) {
			g := startWith(t, []string{"--forward-tokens", "--tokenizers", file}, edits...)
			forwarded, tokens := 0, 0
			for i := range 60 {
				words := 1 << (i % 16)
				prompt := strings.Repeat(fmt.Sprintf("word-%d \"é\\ ", i), words)
				stream, echo := i%2 == 0, i%10 == 9
				fields := map[string]any{"model": model, "prompt": prompt, "stream": stream}
				if echo {
					fields["echo"] = true
				}
				body, _ := json.Marshal(fields) // the value can be encoded
				reply, err := http.Post(g.url+"/v1/completions", "application/json", strings.NewReader(string(body)))
				if err != nil {
					t.Fatal(err)
				}
				text, err := io.ReadAll(reply.Body)
				reply.Body.Close()
				a := answer{status: reply.StatusCode, body: string(text), err: err}
				if want := fmt.Sprintf(`"prompt_tokens":%d,`, 2*words); !a.whole(stream) || !strings.Contains(a.body, want) {
					t.Fatalf("%d words: %+v", words, a)
				}
				if reply.Header.Get("X-Token-Ids") != "" {
					if forwarded++; echo {
						t.Error("a text with an echo is replaced")
					}
					tokens += 2 * words
				}
			}
			t.Logf("%d of 60 requests had token ids, with %d tokens", forwarded, tokens)
			if forwarded < 40 {
				t.Errorf("only %d of 60 requests had token ids", forwarded)
			}
			counted := g.metric("kvatlas_tokenize_avoided_total")
			if of := g.metric("kvatlas_tokenize_avoided_tokens_total"); counted != float64(forwarded) || of != float64(tokens) {
				t.Errorf("%v requests and %v tokens are counted", counted, of)
			}
			if took := g.metric("kvatlas_tokenize_avoided_seconds_total"); took <= 0 || took > 60 {
				t.Errorf("the tokens are made in %v s", took)
			}
			g.idle()
			g.compared(60)
		})
	}
}
