package bpe

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"golang.org/x/text/unicode/norm"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// counting is a context that counts its checks, and ends after a number of checks; 0 means never.
type counting struct {
	context.Context
	checks, most int
}

func (c *counting) Err() error {
	if c.checks++; c.most > 0 && c.checks > c.most {
		return context.Canceled
	}
	return nil
}

// TestWork: a text is a single run of each pattern. Every stage checks the context and ends with the context.
func TestWork(t *testing.T) {
	testkit.Sequential(t)
	const size = 1 << 20
	for _, unit := range []string{"a", " ", "\n", "<", "1", "\u4e00", "e\u0301", "\u0301"} {
		text := strings.Repeat(unit, size/len(unit))
		stages := map[string]func(w *work) error{
			"added": func(w *work) error {
				a := &added{}
				a.add(addedToken{Content: "<|x|>"})
				return a.split(w, text, func(string) error { return nil }, func(uint32) {})
			},
		}
		if unit != "\u0301" {
			stages["nfc"] = func(w *work) error { _, err := w.nfc(text); return err }
		}
		for pattern, match := range patterns {
			stages[pattern] = func(w *work) error {
				split(w, text, match, func(string) bool { return true })
				return w.err
			}
		}
		for name, stage := range stages {
			c := &counting{Context: t.Context()}
			if err := stage(&work{ctx: c}); err != nil || c.checks < size/(4*segmentBytes) {
				t.Errorf("%.20s of %q: %d checks, %v", name, unit, c.checks, err)
			}
			c = &counting{Context: t.Context(), most: 3}
			if err := stage(&work{ctx: c}); !errors.Is(err, context.Canceled) || c.checks > 4 {
				t.Errorf("%.20s of %q: the work ends after %d checks: %v", name, unit, c.checks, err)
			}
		}
	}
}

// TestSegments: a text of several segments is normalized as a whole text is.
func TestSegments(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	letters := []rune("ae\u0301\u0327\u0300\u1100\u1161\u11a8\u212b\ufb01\u4e00\U0001f600\u0958\u09c7\u09be \n")
	for range 100 {
		var b strings.Builder
		marks := 0
		for n := rng.IntN(4 * segmentBytes); b.Len() < n; {
			r := letters[rng.IntN(len(letters))]
			if marks++; norm.NFC.PropertiesString(string(r)).BoundaryBefore() {
				marks = 0
			}
			if marks < 20 { // runs stay at most 30 characters long
				b.WriteRune(r)
			}
		}
		text := b.String()
		if rng.IntN(4) == 0 {
			text = norm.NFC.String(text)
		}
		got, err := (&work{ctx: t.Context()}).nfc(text)
		if err != nil || got != norm.NFC.String(text) {
			t.Fatalf("%.200q of %d bytes: %v", text, len(text), err)
		}
	}
}
