package bpe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

const (
	llama = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	qwen  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// world builds a tokenizer.json with a vocabulary of the bytes, then of merges, and with added tokens.
type world struct {
	merges []string // of letters, separated by a space
	change func(file map[string]any)
}

func (w world) json(t testing.TB) []byte {
	t.Helper()
	unit, _ := byteUnits()
	vocab := map[string]int{}
	for b := range 256 {
		vocab[string(unit[b])] = b
	}
	for i, m := range w.merges {
		vocab[strings.ReplaceAll(m, " ", "")] = 256 + i
	}
	isolated := func(pattern string) map[string]any {
		return map[string]any{"type": "Split", "pattern": map[string]any{"Regex": pattern}, "behavior": "Isolated",
			"invert": false}
	}
	file := map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil,
		"added_tokens": []map[string]any{
			{"id": 1000, "content": "<a>", "special": true}, {"id": 1001, "content": "<a><b>", "special": true},
			{"id": 1002, "content": "é!", "normalized": true},
		},
		"normalizer": map[string]any{"type": "NFC"},
		"pre_tokenizer": map[string]any{"type": "Sequence", "pretokenizers": []map[string]any{
			isolated(llama), {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}}},
		"post_processor": map[string]any{"type": "Sequence", "processors": []map[string]any{{"type": "ByteLevel"},
			{"type": "TemplateProcessing", "single": []map[string]any{
				{"SpecialToken": map[string]any{"id": "<a>", "type_id": 0}}, {"Sequence": map[string]any{"id": "A", "type_id": 0}}},
				"special_tokens": map[string]any{"<a>": map[string]any{"id": "<a>", "ids": []int{1000}}}}}},
		"decoder": nil,
		"model": map[string]any{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": "",
			"end_of_word_suffix": nil, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": w.merges},
	}
	if w.change != nil {
		w.change(file)
	}
	data, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func (w world) open(t testing.TB) *Tokenizer {
	t.Helper()
	x, err := New(w.json(t))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// naive merges the bytes of a piece. It examines all pairs again after each merge.
func naive(t *Tokenizer, s string) (ids []uint32) {
	for i := range len(s) {
		ids = append(ids, t.bytes[s[i]])
	}
	for {
		best := -1
		var by merge
		for i := 0; i+1 < len(ids); i++ {
			if m, ok := t.merges[pair{ids[i], ids[i+1]}]; ok && (best < 0 || m.rank < by.rank) {
				best, by = i, m
			}
		}
		if best < 0 {
			return ids
		}
		ids = slices.Replace(ids, best, best+2, by.to)
	}
}

// TestMerges compares with the naive twin, on random merges and texts.
func TestMerges(t *testing.T) {
	for seed := range uint64(testkit.Rounds(300)) {
		rng := rand.New(rand.NewPCG(seed, 7))
		tokens, w := []string{"a", "b", "c"}, world{}
		for range 1 + rng.IntN(20) {
			a, b := tokens[rng.IntN(len(tokens))], tokens[rng.IntN(len(tokens))]
			if len(a+b) < 9 && !slices.Contains(tokens, a+b) {
				tokens, w.merges = append(tokens, a+b), append(w.merges, a+" "+b)
			}
		}
		x := w.open(t)
		m := merger{work: work{ctx: t.Context()}, t: x}
		for range 30 {
			text := make([]byte, 1+rng.IntN(40))
			for i := range text {
				text[i] = "abcd"[rng.IntN(4)]
			}
			got, want := m.merge(nil, string(text)), naive(x, string(text))
			if !slices.Equal(got, want) {
				t.Fatalf("seed %d, merges %q: %s is %v, not %v", seed, w.merges, text, got, want)
			}
		}
	}
}

// TestEncode covers added tokens, normalization, the template, and ignore_merges.
func TestEncode(t *testing.T) {
	w := world{merges: []string{"a b", "ab c"}}
	for text, want := range map[string][]uint32{
		"":               {1000},
		"abc":            {1000, 257},
		"<a><b><a>ab":    {1000, 1001, 1000, 256},
		"<a":             {1000, '<', 'a'},
		"e\u0301!":       {1000, 1002},
		"x<a>e\u0301!ab": {1000, 'x', 1000, 1002, 256},
		"ab c1234":       {1000, 256, ' ', 'c', '1', '2', '3', '4'},
	} {
		got, err := w.open(t).Encode(t.Context(), nil, text)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q is %v, not %v: %v", text, got, want, err)
		}
	}
	if _, err := w.open(t).Encode(t.Context(), nil, "e"+strings.Repeat("\u0301", 40)); err == nil {
		t.Error("too many combining characters are accepted")
	}
	w.merges = []string{"b c", "a b", "ab c"} // no merge leads to abc
	if got, _ := w.open(t).Encode(t.Context(), nil, "abc"); !slices.Equal(got, []uint32{1000, 'a', 256}) {
		t.Errorf("by merges: %v", got)
	}
	w.change = func(file map[string]any) { file["model"].(map[string]any)["ignore_merges"] = true }
	if got, _ := w.open(t).Encode(t.Context(), nil, "abc"); !slices.Equal(got, []uint32{1000, 258}) {
		t.Errorf("with ignore_merges: %v", got)
	}
}

// TestAdded covers added tokens that include spaces, or must be single words.
func TestAdded(t *testing.T) {
	w := world{change: func(file map[string]any) {
		file["added_tokens"] = []map[string]any{
			{"id": 1000, "content": "<a>"}, {"id": 1001, "content": "<l>", "lstrip": true},
			{"id": 1002, "content": "<r>", "rstrip": true}, {"id": 1003, "content": "one", "single_word": true},
			{"id": 1004, "content": "éa", "normalized": true, "single_word": true, "lstrip": true, "rstrip": true},
		}
	}}
	for text, want := range map[string][]uint32{
		" <l> ":             {1001, ' '},
		"\n\u3000<l><l>":    {1001, 1001},
		"a <r> \t<l>\u2003": {'a', ' ', 1002, 1001, 0xe2, 0x80, 0x83},
		"<r> <r> <a> ":      {1002, 1002, 1000, ' '},
		"one":               {1003},
		"one,(one)":         {1003, ',', '(', 1003, ')'},
		"oneone":            {'o', 'n', 'e', 'o', 'n', 'e'},
		"1one_ \u0301one":   {'1', 'o', 'n', 'e', '_', ' ', 0xcc, 0x81, 'o', 'n', 'e'},
		"<a>one<a>":         {1000, 1003, 1000},
		". e\u0301a !":      {'.', 1004, '!'},
		"<a> e\u0301a <a>":  {1000, 1004, 1000},
		"be\u0301a":         {'b', 0xc3, 0xa9, 'a'},
		"\u200cone one":     {0xe2, 0x80, 0x8c, 'o', 'n', 'e', ' ', 1003},
	} {
		got, err := w.open(t).EncodeText(t.Context(), nil, text, nil)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q is %v, not %v: %v", text, got, want, err)
		}
	}
}

// TestSplit shows the pieces of each pattern.
func TestSplit(t *testing.T) {
	for pattern, texts := range map[string]map[string]string{
		llama: {
			"I'll see  hello, world!\n\n x": "I|'ll| see| | hello|,| world|!\n\n| x",
			"12345 6":                       "123|45| |6", "a \n b ": "a| \n| b| ",
			"IT'SſO 'ſ": "IT|'S|ſO| '|ſ", "\tab": "\tab", "  ": "  ",
		},
		qwen: {"12 3": "1|2| |3"},
	} {
		for text, want := range texts {
			var got []string
			split(&work{ctx: t.Context()}, text, patterns[pattern], func(s string) bool { got = append(got, s); return true })
			if strings.Join(got, "|") != want {
				t.Errorf("%q: %q, not %q", text, got, want)
			}
		}
	}
}

// TestRefused covers files with possibly different tokens in the tokenizers library.
func TestRefused(t *testing.T) {
	model := func(name string, v any) func(map[string]any) {
		return func(f map[string]any) { f["model"].(map[string]any)[name] = v }
	}
	set := func(name string, v any) func(map[string]any) { return func(f map[string]any) { f[name] = v } }
	for says, change := range map[string]func(map[string]any){
		`is "Unigram"`:               model("type", "Unigram"),
		"not byte-level":             model("byte_fallback", true),
		"lacks byte 0x0":             model("vocab", map[string]int{"a": 1}),
		"vocabulary lacks":           model("merges", []string{"a zz"}),
		"not two tokens":             model("merges", []string{"ab"}),
		"truncation":                 set("truncation", map[string]any{"max_length": 1}),
		`normalizer "Lowercase"`:     set("normalizer", map[string]any{"type": "Lowercase"}),
		"not a sequence of patterns": set("pre_tokenizer", map[string]any{"type": "ByteLevel"}),
		"unsupported pattern": set("pre_tokenizer", map[string]any{"type": "Sequence",
			"pretokenizers": []map[string]any{{"type": "Split", "pattern": map[string]any{"Regex": `\w+`},
				"behavior": "Isolated"}, {"type": "ByteLevel"}}}),
		`post-processor "BertProcessing"`: set("post_processor", map[string]any{"type": "BertProcessing"}),
		"begins with a space": set("added_tokens", []map[string]any{{"id": 999, "content": "xx", "rstrip": true},
			{"id": 10, "content": "\u3000"}}),
		"is empty": set("added_tokens", []map[string]any{{"id": 9, "content": ""}}),
	} {
		if _, err := New(world{change: change}.json(t)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, not %q", err, says)
		}
	}
	if _, err := New([]byte("{")); err == nil {
		t.Error("a file without JSON is accepted")
	}
}

// FuzzSplit: the pieces of a text form the text, for every pattern, and no piece is empty.
func FuzzSplit(f *testing.F) {
	for _, text := range []string{"I'll  see\n\n 123 é\u0301中文・ !?/ ", "\x00\u00a0\u2003ǅa'ſ", "  \t"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) {
			return
		}
		for pattern, match := range patterns {
			var got []string
			split(&work{ctx: t.Context()}, text, match, func(s string) bool { got = append(got, s); return true })
			if strings.Join(got, "") != text || slices.Contains(got, "") {
				t.Errorf("%s: %q is split into %q", pattern, text, got)
			}
		}
	})
}

// FuzzNew: no file causes a panic.
func FuzzNew(f *testing.F) {
	f.Add(world{merges: []string{"a b"}}.json(f), "ab<a>")
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		x, err := New(data)
		if err != nil || !utf8.ValidString(text) {
			return
		}
		one, _ := x.Encode(t.Context(), nil, text)
		if two, _ := x.Encode(t.Context(), nil, text); !reflect.DeepEqual(one, two) {
			t.Error(fmt.Sprint(one, two))
		}
	})
}

// ending is a context that ends after a number of checks.
type ending struct {
	context.Context
	after int
}

func (e *ending) Err() error {
	if e.after--; e.after < 0 {
		return context.Canceled
	}
	return nil
}

// TestEnds: the context ends before, in and between pieces. Tokens of such a text are not cached.
func TestEnds(t *testing.T) {
	x := world{merges: []string{"a a", "aa aa", "aaaa aaaa"}}.open(t)
	const n = 16 * stepsPerCheck
	for text, all := range map[string]int{strings.Repeat("a", n): 20, strings.Repeat("a1", n/2): 12} {
		for after := range all {
			m := &memory{parts: map[string][]uint32{}}
			ctx := &ending{t.Context(), after}
			if _, err := x.EncodeText(ctx, nil, text, m); !errors.Is(err, context.Canceled) || len(m.parts) > 0 {
				t.Errorf("%.4q ended after %d checks: %v, %d parts", text, after, err, len(m.parts))
			}
			if ctx.after < -1 {
				t.Errorf("%.4q went on after the end, for %d checks", text, -1-ctx.after)
			}
		}
	}
	if _, err := x.Encode(&ending{t.Context(), 0}, nil, "a"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// BenchmarkEncode tokenizes a text of words and numbers.
func BenchmarkEncode(b *testing.B) {
	x := world{merges: []string{"t h", "th e", "i n", "a n", "an d", "e r"}}.open(b)
	text := strings.Repeat("The painter and the other 1234 in the thin line.\n", 1000)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	var ids []uint32
	for b.Loop() {
		ids, _ = x.Encode(b.Context(), ids[:0], text)
	}
}

// memory is a [Memory] that counts hits.
type memory struct {
	parts map[string][]uint32
	hits  int
}

func (m *memory) Get(part string) ([]uint32, bool) {
	ids, has := m.parts[part]
	if has {
		m.hits++
	}
	return ids, has
}

func (m *memory) Add(part string, ids []uint32) { m.parts[part] = slices.Clone(ids) }

// TestMemory covers growing chats: the tokens are the same with a memory, and the memory returns the earlier parts.
func TestMemory(t *testing.T) {
	tok := world{merges: []string{"t u", "r n", "tu rn"}}.open(t)
	m := &memory{parts: map[string][]uint32{}}
	text := ""
	for turn := range 50 {
		text += "<a>" + strings.Repeat("e\u0301 turn ", turn+1) + fmt.Sprint(turn)
		want, err := tok.EncodeText(t.Context(), nil, text, nil)
		if err != nil {
			t.Fatal(err)
		}
		before := m.hits
		got, err := tok.EncodeText(t.Context(), []uint32{7}, text, m)
		if err != nil || !slices.Equal(got[1:], want) || got[0] != 7 {
			t.Fatalf("turn %d: %v, %v, not %v", turn, got, err, want)
		}
		if turn > 20 && m.hits-before < turn-10 {
			t.Errorf("turn %d: %d parts were cached", turn, m.hits-before)
		}
	}
}
