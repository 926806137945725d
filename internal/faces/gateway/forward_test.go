package gateway

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestForwardTokens: the engine receives token ids in place of the text of a completion, in both body modes, unless it
// must receive the text.
func TestForwardTokens(t *testing.T) {
	const path = " /v1/completions"
	made := api.Tokenization{Tokenized: true, PromptTokens: 2, TokenIDs: api.Tokens{7, 8}, Took: time.Second}
	changed := func(change func(*api.Tokenization)) *api.Tokenization {
		result := made
		change(&result)
		return &result
	}
	for name, c := range map[string]struct {
		path, body string
		result     *api.Tokenization
		off        bool
		want       string // body; empty: unchanged
	}{
		"a text":       {path, `{"prompt":"a b","n":2}`, &made, false, `{"n":2,"prompt":[7,8]}`},
		"turned off":   {path, `{"prompt":"a b"}`, &made, true, ""},
		"token ids":    {path, `{"prompt":[1]}`, nil, false, ""},
		"a batch":      {path, `{"prompt":["a","b"]}`, &made, false, ""},
		"an echo":      {path, `{"prompt":"a","echo":true}`, &made, false, ""},
		"a chat":       {" /v1/chat/completions", `{"messages":[{"role":"user"}]}`, &made, false, ""},
		"another path": {" /v2/prompts", `{"prompt":"a"}`, &made, false, ""},
		"an adapter":   {path, `{"model":"adapter","prompt":"a"}`, &made, false, ""},
		"no tokens":    {path, `{"prompt":"a"}`, &api.Tokenization{TokenizeError: "timeout"}, false, ""},
		"a comparison": {path, `{"prompt":"a"}`, changed(func(t *api.Tokenization) { t.KeepText = true }), false, ""},
		"some tokens":  {path, `{"prompt":"a"}`, changed(func(t *api.Tokenization) { t.PromptTokens = 3 }), false, ""},
		"a much larger body": {path, `{"prompt":"a"}`, changed(func(t *api.Tokenization) {
			t.PromptTokens, t.TokenIDs = largerBody, make(api.Tokens, largerBody)
		}), false, ""},
	} {
		for _, mode := range []string{"buffered", "duplex"} {
			w := newWorld()
			cfg := w.config()
			cfg.ForwardTokens = !c.off
			asked := false
			cfg.Select = func(ctx context.Context, r *api.SelectRequest) (*api.Selection, error) {
				s, err := w.Select(ctx, r)
				if err == nil {
					s.Tokenization = c.result
				}
				asked = r.Text != nil && r.ReturnTokenIDs
				return s, err
			}
			send := []string{"headers " + mode + c.path, "body " + c.body + " end"}
			if err := New(cfg).Process(&script{t: t, w: w, send: send}); err != nil {
				t.Fatal(err)
			}
			log := strings.Join(w.log, "\n")
			if mode == "duplex" {
				want := c.want
				if want == "" {
					want = c.body
				}
				if !strings.Contains(log, "<- body "+want+" end") {
					t.Errorf("%s in %s: the body is not %s: %s", name, mode, want, log)
				}
			} else if replaced := fmt.Sprintf("content-length=%d replaced by %s", len(c.want), c.want); strings.Contains(log,
				replaced) != (c.want != "") || strings.Contains(log, "content-length") != (c.want != "") {
				t.Errorf("%s in %s: the body is not %q: %s", name, mode, c.want, log)
			}
			if counted := strings.Contains(log, "avoided m 2 1s"); counted != (c.want != "") || counted && !asked {
				t.Errorf("%s in %s: counted %v, token ids requested %v: %s", name, mode, counted, asked, log)
			}
		}
	}
}
