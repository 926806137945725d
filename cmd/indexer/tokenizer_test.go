package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// byteTokens are the tokens of an engine with a token per byte.
func byteTokens(text string) []uint32 {
	ids := make([]uint32, len(text))
	for i := range len(text) {
		ids[i] = uint32(text[i])
	}
	return ids
}

// TestTokenizerCheck compares a tokenizer.json of bytes with equal and with different engines.
func TestTokenizerCheck(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	vocab := map[string]int{}
	for b, r := 0, rune(256); b < 256; b++ {
		if '!' <= b && b <= '~' || 0xa1 <= b && b <= 0xac || 0xae <= b {
			vocab[string(rune(b))] = b
		} else {
			vocab[string(r)] = b
			r++
		}
	}
	file, err := json.Marshal(map[string]any{
		"model": map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{}},
		"pre_tokenizer": map[string]any{"type": "Sequence", "pretokenizers": []any{map[string]any{"type": "Split",
			"pattern": map[string]any{"Regex": `\p{N}{1,3}`}, "behavior": "Isolated"}, map[string]any{"type": "ByteLevel"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := write("tokenizer.json", string(file))
	write("chat_template.jinja", "{% for m in messages %}{{ m.role }}\n{% endfor %}")
	tokenizers := write("tokenizers.yaml", "models: {m: {path: "+path+"}}\n")
	texts := write("texts", "one more\n{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}\n")
	bad := write("bad", "{\"messages\":7")

	for name, c := range map[string]struct {
		answer func(text string) (status int, ids []uint32)
		args   []string
		want   string // of the output, or of the error
		failed bool
	}{
		"the same": {func(text string) (int, []uint32) { return 200, byteTokens(text) }, []string{"--texts", texts},
			"57 same, 0 differ, 1 refused here, 0 refused there, 0 not compared", false},
		"another vocabulary": {func(text string) (int, []uint32) { return 200, append(byteTokens(text), 7) }, nil,
			"texts have other tokens there", true},
		"in trouble":    {func(string) (int, []uint32) { return 503, nil }, nil, "0 texts could be compared", true},
		"refusing":      {func(string) (int, []uint32) { return 400, nil }, nil, "0 texts could be compared", true},
		"bad texts":     {nil, []string{"--texts", bad}, "--texts: line 1", true},
		"another model": {nil, []string{"--model", "x"}, "names nothing for model", true},
	} {
		engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var q struct {
				Prompt   string
				Messages []struct{ Role string }
			}
			if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.URL.Path != "/tokenize" {
				t.Error(r.URL, err)
			}
			for _, m := range q.Messages {
				q.Prompt += m.Role + "\n"
			}
			status, ids := c.answer(q.Prompt)
			w.WriteHeader(status)
			_ = json.NewEncoder(w).Encode(map[string]any{"tokens": ids})
		}))
		root := rootCommand()
		var out strings.Builder
		root.SetOut(&out)
		root.SetErr(&out)
		root.SetArgs(append([]string{"tokenizer", "check", "--tokenizers", tokenizers, "--model", "m", "--against",
			engine.URL}, c.args...))
		err := root.ExecuteContext(t.Context())
		engine.Close()
		if (err != nil) != c.failed || !strings.Contains(out.String(), c.want) && (err == nil ||
			!strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v\n%s", name, err, &out)
		}
	}
}
