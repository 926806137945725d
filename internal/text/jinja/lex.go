package jinja

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// kind is the kind of a token.
type kind uint8

const (
	tokEnd    kind = iota // end of the template
	tokData               // text between tags
	tokPrint              // {{
	tokBlock              // {%
	tokClose              // }} or %}
	tokName               // an identifier
	tokString             // val is the string without quotes and escapes
	tokInt
	tokFloat
	tokOp // an operator
)

type token struct {
	kind kind
	val  string
	line int
}

func (t token) String() string {
	if t.kind == tokEnd {
		return "the end of the template"
	}
	return fmt.Sprintf("%.40q", t.val)
}

// IsSpace is Python's str.isspace for one code point.
func IsSpace(r rune) bool {
	switch {
	case r >= '\t' && r <= '\r', r >= 0x1c && r <= ' ', r == 0x85, r == 0xa0, r == 0x1680, r >= 0x2000 && r <= 0x200a,
		r == 0x2028, r == 0x2029, r == 0x202f, r == 0x205f, r == 0x3000:
		return true
	}
	return false
}

// operators lists the operators; longer operators come first.
var operators = []string{"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
	">", "<", "=", ".", ":", "|", ",", ";"}

// tokensPerCheck is the number of tokens between two checks of the context.
const tokensPerCheck = 512

// lex splits a template into tokens. It removes the white space around tags as Jinja2 does.
func lex(ctx context.Context, src string) (list []token, err error) {
	if !utf8.ValidString(src) {
		return nil, fmt.Errorf("the template is not UTF-8")
	}
	src = strings.ReplaceAll(strings.ReplaceAll(src, "\r\n", "\n"), "\r", "\n")
	src = strings.TrimSuffix(src, "\n")
	at, lines, counted := 0, 1, 0
	line := func() int { // the line of at, which only grows
		lines += strings.Count(src[counted:at], "\n")
		counted = at
		return lines
	}
	fresh := true // the consumed text ends with a newline
	check := tokensPerCheck
	for {
		next, tag := nextTag(src[at:])
		if next < 0 {
			if at < len(src) {
				list = append(list, token{tokData, src[at:], line()})
			}
			return append(list, token{kind: tokEnd, line: line()}), nil
		}
		text := src[at : at+next]
		sign := byte(0)
		if i := at + next + 2; i < len(src) && (src[i] == '-' || src[i] == '+') {
			sign = src[i]
		}
		switch {
		case sign == '-':
			text = strings.TrimRightFunc(text, IsSpace)
		case sign == 0 && tag != "{{":
			if from := strings.LastIndexByte(text, '\n') + 1; (from > 0 || fresh) &&
				strings.TrimLeftFunc(text[from:], IsSpace) == "" {
				text = text[:from]
			}
		}
		if text != "" {
			list = append(list, token{tokData, text, line()})
		}
		at += next + 2
		if sign != 0 {
			at++
		}
		begun := line()
		if tag == "{#" {
			end := strings.Index(src[at:], "#}")
			if end < 0 {
				return nil, fmt.Errorf("line %d: a comment does not end", begun)
			}
			at += end
			minus, plus := end > 0 && src[at-1] == '-', end > 0 && src[at-1] == '+'
			at += 2
			at, fresh = afterTag(src, at, minus, !plus)
			continue
		}
		opening, closing := token{tokBlock, tag, begun}, "%}"

		if tag == "{{" {
			opening.kind, closing = tokPrint, "}}"
		}
		list = append(list, opening)
		depth := 0
	inside:
		for {
			for at < len(src) {
				r, n := utf8.DecodeRuneInString(src[at:])
				if !IsSpace(r) {
					break
				}
				at += n
			}
			rest := src[at:]
			if rest == "" {
				return nil, fmt.Errorf("line %d: a tag does not end", begun)
			}
			if depth == 0 {
				for _, sign := range []string{"-", "+", ""} {
					if !strings.HasPrefix(rest, sign+closing) || sign == "+" && tag == "{{" {
						continue
					}
					list = append(list, token{tokClose, closing, line()})
					at += len(sign) + 2
					at, fresh = afterTag(src, at, sign == "-", sign == "" && tag == "{%")
					break inside
				}
			}
			if len(list) >= check {
				check = len(list) + tokensPerCheck
				if err := ctx.Err(); err != nil {
					return nil, err
				}
			}
			t, n, err := lexOne(rest)
			t.line = line()
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", t.line, err)
			}
			if t.kind == tokOp {
				switch t.val {
				case "(", "[", "{":
					depth++
				case ")", "]", "}":
					depth--
				}
				if depth < 0 {
					return nil, fmt.Errorf("line %d: %q has no opening tag", t.line, t.val)
				}
			}
			list = append(list, t)
			at += n
		}
		if first := list[len(list)-2]; first.kind == tokName && first.val == "raw" && list[len(list)-3].kind == tokBlock {
			return nil, fmt.Errorf("line %d: raw blocks are not supported", begun)
		}
	}
}

// nextTag returns the beginning of the next tag; -1 without a tag.
func nextTag(s string) (at int, tag string) {
	for from := 0; ; {
		i := strings.IndexByte(s[from:], '{')
		if i < 0 || from+i+1 >= len(s) {
			return -1, ""
		}
		from += i
		switch tag = s[from : from+2]; tag {
		case "{{", "{%", "{#":
			return from, tag
		}
		from++
	}
}

// afterTag skips the white space that belongs to a tag's end.
func afterTag(src string, at int, all, line bool) (after int, fresh bool) {
	switch {
	case all:
		after = len(src) - len(strings.TrimLeftFunc(src[at:], IsSpace))
	case line && strings.HasPrefix(src[at:], "\n"):
		after = at + 1
	default:
		after = at
	}
	return after, after > at && src[after-1] == '\n'
}

func isWord(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// lexOne parses one token of a tag.
func lexOne(s string) (t token, n int, err error) {
	c := s[0]
	switch {
	case c == '\'' || c == '"':
		for n = 1; n < len(s) && s[n] != c; n++ {
			if s[n] == '\\' {
				n++
			}
		}
		if n >= len(s) {
			return t, 0, fmt.Errorf("a string does not end")
		}
		val, err := unescape(s[1:n])
		return token{kind: tokString, val: val}, n + 1, err
	case '0' <= c && c <= '9':
		digits := func() {
			for n < len(s) && '0' <= s[n] && s[n] <= '9' {
				n++
			}
		}
		t.kind = tokInt
		digits()
		if n+1 < len(s) && s[n] == '.' && '0' <= s[n+1] && s[n+1] <= '9' {
			t.kind = tokFloat
			n++
			digits()
		}
		if n < len(s) && isWord(s[n]) || n > 1 && c == '0' && t.kind == tokInt {
			return t, 0, fmt.Errorf("the form of the number %.20q is not supported", s)
		}
		t.val = s[:n]
		return t, n, nil
	case isWord(c):
		for n < len(s) && isWord(s[n]) {
			n++
		}
		if n < len(s) && s[n] >= utf8.RuneSelf {
			return t, 0, fmt.Errorf("the name %.20q is not ASCII", s)
		}
		if n > maxName {
			return t, 0, fmt.Errorf("the name %.20q has %d bytes, more than %d", s, n, maxName)
		}
		return token{kind: tokName, val: s[:n]}, n, nil
	}
	for _, op := range operators {
		if strings.HasPrefix(s, op) {
			return token{kind: tokOp, val: op}, len(op), nil
		}
	}
	return t, 0, fmt.Errorf("%.20q is not valid in a tag", s)
}

// unescape resolves the escapes of a string as Python does.
func unescape(s string) (string, error) {
	if !strings.Contains(s, `\`) {
		return s, nil
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			b.WriteByte(s[i])
			continue
		}
		i++
		hex := 0
		switch c := s[i]; c {
		case '\n':
		case '\\', '\'', '"':
			b.WriteByte(c)
		case 'n':
			b.WriteByte('\n')
		case 't':
			b.WriteByte('\t')
		case 'r':
			b.WriteByte('\r')
		case 'a':
			b.WriteByte('\a')
		case 'b':
			b.WriteByte('\b')
		case 'f':
			b.WriteByte('\f')
		case 'v':
			b.WriteByte('\v')
		case 'x':
			hex = 2
		case 'u':
			hex = 4
		case 'U':
			hex = 8
		case 'N', '0', '1', '2', '3', '4', '5', '6', '7':
			return "", fmt.Errorf("the escape \\%c is not supported", c)
		default:
			b.WriteByte('\\')
			b.WriteByte(c)
		}
		if hex > 0 {
			if i+1+hex > len(s) {
				return "", fmt.Errorf("an escape in a string does not end")
			}
			v, err := strconv.ParseUint(s[i+1:i+1+hex], 16, 32)
			if err != nil || !utf8.ValidRune(rune(v)) {
				return "", fmt.Errorf("the escape \\%s is not a code point", s[i:i+1+hex])
			}
			b.WriteRune(rune(v))
			i += hex
		}
	}
	return b.String(), nil
}
