package bpe

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is an added token of a tokenizer.json.
type addedToken struct {
	ID      uint32 `json:"id"`
	Content string `json:"content"`

	SingleWord bool `json:"single_word"` // no match beside a letter
	LStrip     bool `json:"lstrip"`      // the token includes the spaces before it
	RStrip     bool `json:"rstrip"`      // the token includes the spaces after it
	Normalized bool `json:"normalized"`  // the token is matched in normalized text
	Special    bool `json:"special"`
}

// added contains added tokens by text.
type added struct {
	tokens map[string]addedToken
	sizes  [256][]int // by first byte: lengths of texts, longest first
}

func (a *added) add(t addedToken) {
	if a.tokens == nil {
		a.tokens = map[string]addedToken{}
	}
	text := t.Content
	a.tokens[text] = t
	if sizes := &a.sizes[text[0]]; !slices.Contains(*sizes, len(text)) {
		*sizes = append(*sizes, len(text))
		slices.SortFunc(*sizes, func(a, b int) int { return b - a })
	}
}

// check refuses tokens with a leading space if other tokens include the spaces after them. The tokenizers library finds
// the first kind inside the spaces of the second kind.
func (a *added) check() error {
	takes, begins := "", ""
	for text, t := range a.tokens {
		if t.RStrip {
			takes = text
		}
		if spacesBehind(text) > 0 {
			begins = text
		}
	}
	if takes != "" && begins != "" {
		return fmt.Errorf("added token %.40q includes the spaces after it, and %.40q begins with a space", takes, begins)
	}
	return nil
}

// match returns the longest token at an offset of a text.
func (a *added) match(s string, i int) (addedToken, bool) {
	for _, n := range a.sizes[s[i]] {
		if i+n <= len(s) {
			if t, ok := a.tokens[s[i:i+n]]; ok {
				return t, true
			}
		}
	}
	return addedToken{}, false
}

// split calls text for the parts between added tokens, and token for each added token.
func (a *added) split(w *work, s string, text func(string) error, token func(uint32)) error {
	if len(a.tokens) == 0 {
		return text(s)
	}
	from := 0
	for i := 0; i < len(s); {
		if !w.step() {
			return w.err
		}
		t, ok := a.match(s, i)
		if !ok {
			i++
			continue
		}
		start, end := i, i+len(t.Content)
		i = end
		if t.SingleWord && (wordBefore(s[:start]) || wordBehind(s[end:])) {
			continue
		}
		if t.LStrip {
			start -= spacesBefore(s[from:start])
		}
		if t.RStrip {
			end += spacesBehind(s[end:])
		}
		if from < start {
			if err := text(s[from:start]); err != nil {
				return err
			}
		}
		token(t.ID)
		from, i = end, end
	}
	if from < len(s) {
		return text(s[from:])
	}
	return nil
}

func spacesBefore(s string) int { return len(s) - len(strings.TrimRightFunc(s, unicode.IsSpace)) }
func spacesBehind(s string) int { return len(s) - len(strings.TrimLeftFunc(s, unicode.IsSpace)) }

func wordBefore(s string) bool {
	r, _ := utf8.DecodeLastRuneInString(s)
	return s != "" && wordRune(r)
}

func wordBehind(s string) bool {
	r, _ := utf8.DecodeRuneInString(s)
	return s != "" && wordRune(r)
}

// wordRune is \w of Rust's regular expressions, by Unicode's UTS #18.
func wordRune(r rune) bool {
	const zeroWidthNonJoiner, zeroWidthJoiner = 0x200c, 0x200d
	return unicode.In(r, unicode.L, unicode.M, unicode.Nd, unicode.Nl, unicode.Pc, unicode.Other_Alphabetic) ||
		r == zeroWidthNonJoiner || r == zeroWidthJoiner
}
