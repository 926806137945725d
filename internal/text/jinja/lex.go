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

// IsSpace reports whether a code point is white space, as str.isspace of Python does.
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

// lexer splits a template into tokens.
type lexer struct {
	ctx   context.Context
	src   string
	at    int  // the number of consumed bytes of src
	fresh bool // the consumed text ends with a newline
	list  []token
	check int // the length of list at the next check of ctx

	lines, counted int // lines is the line of src[counted]
}

// lex splits a template into tokens. It removes the white space around tags as Jinja2 does.
func lex(ctx context.Context, src string) ([]token, error) {
	if !utf8.ValidString(src) {
		return nil, fmt.Errorf("the template is not UTF-8")
	}
	src = strings.ReplaceAll(strings.ReplaceAll(src, "\r\n", "\n"), "\r", "\n")
	src = strings.TrimSuffix(src, "\n")
	l := lexer{ctx: ctx, src: src, fresh: true, check: tokensPerCheck, lines: 1}
	for {
		length, opening := nextTag(l.src[l.at:])
		if length < 0 {
			l.text(l.src[l.at:])
			return append(l.list, token{kind: tokEnd, line: l.line()}), nil
		}
		l.open(length, opening)
		begun, err := l.line(), error(nil)
		if opening == "{#" {
			err = l.comment(begun)
		} else {
			err = l.tag(opening, begun)
		}
		if err != nil {
			return nil, err
		}
	}
}

// line returns the line of the next byte. It counts newlines from the previous call on.
func (l *lexer) line() int {
	l.lines += strings.Count(l.src[l.counted:l.at], "\n")
	l.counted = l.at
	return l.lines
}

// text adds a token for the text between two tags.
func (l *lexer) text(text string) {
	if text != "" {
		l.list = append(l.list, token{tokData, text, l.line()})
	}
}

// open consumes the text before a tag, which has the given length, and the opening of the tag.
func (l *lexer) open(length int, opening string) {
	text, sign := l.src[l.at:l.at+length], byte(0)
	if i := l.at + length + 2; i < len(l.src) && (l.src[i] == '-' || l.src[i] == '+') {
		sign = l.src[i]
	}
	switch {
	case sign == '-':
		text = strings.TrimRightFunc(text, IsSpace)
	case sign == 0 && opening != "{{":
		if from := strings.LastIndexByte(text, '\n') + 1; (from > 0 || l.fresh) &&
			strings.TrimLeftFunc(text[from:], IsSpace) == "" {
			text = text[:from]
		}
	}
	l.text(text)
	l.at += length + 2
	if sign != 0 {
		l.at++
	}
}

// comment consumes the rest of a comment. The comment begins in line begun.
func (l *lexer) comment(begun int) error {
	end := strings.Index(l.src[l.at:], "#}")
	if end < 0 {
		return fmt.Errorf("line %d: a comment does not end", begun)
	}
	l.at += end
	minus, plus := end > 0 && l.src[l.at-1] == '-', end > 0 && l.src[l.at-1] == '+'
	l.at += 2
	l.skipAfterTag(minus, !plus)
	return nil
}

// tag adds the tokens of a tag, and consumes the rest of the tag. The tag begins in line begun.
func (l *lexer) tag(opening string, begun int) error {
	first, closing := token{tokBlock, opening, begun}, "%}"
	if opening == "{{" {
		first.kind, closing = tokPrint, "}}"
	}
	l.list = append(l.list, first)
	inner := len(l.list)
	for depth := 0; ; {
		l.skipSpace()
		if l.at == len(l.src) {
			return fmt.Errorf("line %d: a tag does not end", begun)
		}
		if depth == 0 && l.close(opening, closing) {
			break
		}
		t, err := l.token()
		if err != nil {
			return err
		}
		if depth += nesting(t); depth < 0 {
			return fmt.Errorf("line %d: %q has no opening tag", t.line, t.val)
		}
		l.list = append(l.list, t)
	}
	only := l.list[inner]
	if first.kind == tokBlock && len(l.list) == inner+2 && only.kind == tokName && only.val == "raw" {
		return fmt.Errorf("line %d: raw blocks are not supported", begun)
	}
	return nil
}

// skipSpace consumes white space inside a tag.
func (l *lexer) skipSpace() {
	l.at = len(l.src) - len(strings.TrimLeftFunc(l.src[l.at:], IsSpace))
}

// close consumes the closing of a tag, and reports whether it is there.
func (l *lexer) close(opening, closing string) bool {
	for _, sign := range []string{"-", "+", ""} {
		if !strings.HasPrefix(l.src[l.at:], sign+closing) || sign == "+" && opening == "{{" {
			continue
		}
		l.list = append(l.list, token{tokClose, closing, l.line()})
		l.at += len(sign) + 2
		l.skipAfterTag(sign == "-", sign == "" && opening == "{%")
		return true
	}
	return false
}

// token consumes a token inside a tag. It returns an error if the context is done.
func (l *lexer) token() (token, error) {
	if len(l.list) >= l.check {
		l.check = len(l.list) + tokensPerCheck
		if err := l.ctx.Err(); err != nil {
			return token{}, err
		}
	}
	t, n, err := lexOne(l.src[l.at:])
	t.line = l.line()
	if err != nil {
		return t, fmt.Errorf("line %d: %w", t.line, err)
	}
	l.at += n
	return t, nil
}

// skipAfterTag consumes the white space that belongs to a tag's end: all of it, or a newline.
func (l *lexer) skipAfterTag(all, newline bool) {
	after := l.at
	switch {
	case all:
		l.skipSpace()
	case newline && strings.HasPrefix(l.src[l.at:], "\n"):
		l.at++
	}
	l.fresh = l.at > after && l.src[l.at-1] == '\n'
}

// nesting returns 1 for an opening bracket, -1 for a closing bracket, and 0 for other tokens.
func nesting(t token) int {
	if t.kind == tokOp {
		switch t.val {
		case "(", "[", "{":
			return 1
		case ")", "]", "}":
			return -1
		}
	}
	return 0
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
