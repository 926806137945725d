// Package escape makes foreign texts, such as names of workers and models, safe for a terminal and for a copy into a
// shell.
//
//	escape.Text("w\x1b[2J")   // w\x1b[2J, eight characters that do nothing
//	escape.Shell("a b")       // 'a b'
//
// All functions are safe for concurrent use.
package escape

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// invisible are characters that count as printable but show nothing, so that different names look equal: fillers,
// variation selectors, joiners, and the Braille blank.
var invisible = []*unicode.RangeTable{
	unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector,
	{R16: []unicode.Range16{{Lo: 0x2800, Hi: 0x2800, Stride: 1}}},
}

// shown reports whether a character is shown unchanged: letters, marks, numbers, punctuation, symbols and the ASCII
// space. Control and format characters are not: line breaks, escapes, C1 controls, text directions, zero-width
// characters.
func shown(r rune, width int) bool {
	return r < utf8.RuneSelf && r >= ' ' && r != 0x7f ||
		r >= utf8.RuneSelf && (r != utf8.RuneError || width > 1) && strconv.IsPrint(r) && !unicode.In(r, invisible...)
}

// Text replaces every character that a terminal would not just show, and every byte that is not UTF-8, with its escape
// in Go's syntax: \n, \x1b, \u202e. The result is a single line. Text returns a safe text unchanged, so it is
// idempotent; a backslash stays a backslash.
func Text(text string) string {
	for i, r := range text {
		if _, width := utf8.DecodeRuneInString(text[i:]); !shown(r, width) {
			return escaped(text, i)
		}
	}
	return text
}

// escaped is Text for a text with the first unsafe character at from.
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

// Shell writes a text as a single word of a POSIX shell. The word is printable, as the result of [Text] is, and has no
// line breaks. The shell's printf writes characters that are not printable, and characters with a special meaning in
// printf or in an interactive shell. Two texts have no exact word: a NUL byte ends the word, and the shell drops line
// breaks at the end of a word.
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

// Operand is Shell for an argument that is not the value of a flag. "--" before a text with a leading '-' keeps the
// shell command from reading a flag. Flags must come before the word.
func Operand(text string) string {
	if strings.HasPrefix(text, "-") {
		return "-- " + Shell(text)
	}
	return Shell(text)
}

// plain reports whether a character has no special meaning in a shell, except at the start of a word.
func plain(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-./:@,+", r)
}
