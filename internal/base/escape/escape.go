// Package escape makes texts of others, such as names of workers and models, safe to show on a terminal and to copy
// into a shell.
//
//	escape.Text("w\x1b[2J")   // w\x1b[2J, eight characters that do nothing
//	escape.Shell("a b")       // 'a b'
//
// Its functions may be called from any goroutine.
package escape

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// invisible are characters that count as printable and show nothing, so that different names look alike: fillers,
// variation selectors, joiners, and the blank of Braille.
var invisible = []*unicode.RangeTable{
	unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector,
	{R16: []unicode.Range16{{Lo: 0x2800, Hi: 0x2800, Stride: 1}}},
}

// shown reports whether a character is shown as it is: letters, marks, numbers, punctuation, symbols and the ASCII
// space. Control and format characters are not: line breaks, escapes, C1 controls, directions of text, zero-width ones.
func shown(r rune, width int) bool {
	return r < utf8.RuneSelf && r >= ' ' && r != 0x7f ||
		r >= utf8.RuneSelf && (r != utf8.RuneError || width > 1) && strconv.IsPrint(r) && !unicode.In(r, invisible...)
}

// Text replaces each character that a terminal would not just show, and each byte that is not UTF-8, by its escape in
// Go's syntax: \n, \x1b, \u202e. The result is one line. A text that is safe is returned as it is, so that to call Text
// twice is harmless; a backslash stays a backslash.
func Text(text string) string {
	for i, r := range text {
		if _, width := utf8.DecodeRuneInString(text[i:]); !shown(r, width) {
			return escaped(text, i)
		}
	}
	return text
}

// escaped is Text of a text whose first unsafe character is at from.
func escaped(text string, from int) string {
	var b strings.Builder
	b.WriteString(text[:from])
	for rest := text[from:]; rest != ""; {
		r, width := utf8.DecodeRuneInString(rest)
		if shown(r, width) {
			b.WriteString(rest[:width])
		} else {
			quoted := strconv.QuoteToASCII(rest[:width])
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		rest = rest[width:]
	}
	return b.String()
}

// Shell writes a text as one word of a POSIX shell. The word can be shown and copied: it is printable, as [Text] is,
// and has no line breaks. Characters that cannot be shown are written by printf within the word, as are those that
// printf or an interactive shell would read otherwise there. Two texts cannot be written so: a NUL byte ends the word,
// and the shell drops line breaks at the word's end.
func Shell(text string) string {
	if text != "" && text[0] != '-' && strings.IndexFunc(text, func(r rune) bool { return !plain(r) }) < 0 {
		return text
	}
	if Text(text) == text {
		return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
	}
	var b strings.Builder
	b.WriteString(`"$(printf '`)
	for rest := text; rest != ""; {
		r, width := utf8.DecodeRuneInString(rest)
		one := rest[:width]
		switch {
		case r == '%':
			b.WriteString("%%")
		case !shown(r, width) || strings.ContainsRune(`'\!`, r) || r == '-' && len(rest) == len(text):
			for i := range len(one) {
				fmt.Fprintf(&b, `\%03o`, one[i])
			}
		default:
			b.WriteString(one)
		}
		rest = rest[width:]
	}
	b.WriteString(`')"`)
	return b.String()
}

// Operand is Shell for a word that is an argument by itself, not a flag's value: "--" before a text that begins with
// '-' keeps it from being read as a flag. Flags must come before it.
func Operand(text string) string {
	if strings.HasPrefix(text, "-") {
		return "-- " + Shell(text)
	}
	return Shell(text)
}

// plain reports whether a shell gives a character no meaning, wherever it is in a word but at its beginning.
func plain(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-./:@,+", r)
}
