package bpe

import (
	"unicode"
	"unicode/utf8"
)

// A matcher returns the end of the pattern's match that begins at i, or i without a match. Matches are not empty. The
// result is invalid if the context of the work is done.
type matcher func(w *work, s string, i int) int

// patterns are the supported patterns, by their exact text in tokenizer.json.
var patterns = map[string]matcher{
	// Llama 3
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|` +
		`\s+(?!\S)|\s+`: func(w *work, s string, i int) int { return matchWords(w, s, i, 3) },
	// Qwen 2, 2.5 and 3
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|` +
		`\s+(?!\S)|\s+`: func(w *work, s string, i int) int { return matchWords(w, s, i, 1) },
	// gpt-oss (o200k)
	`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|` +
		`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|` +
		`\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`: matchCased,
	// DeepSeek V3: three patterns in sequence
	`\p{N}{1,3}`: func(w *work, s string, i int) int { return runOf(w, s, i, 3, unicode.IsNumber) },
	`[一-龥぀-ゟ゠-ヿ]+`: func(w *work, s string, i int) int {
		return runOf(w, s, i, -1, func(r rune) bool { return '一' <= r && r <= '龥' || 0x3040 <= r && r <= 0x30ff })
	},
	"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|" +
		" ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+": matchDeepSeek,
}

// split calls piece for each match in a text, and for the parts between matches, until piece returns false. It reports
// whether piece always returned true.
func split(w *work, s string, match matcher, piece func(s string) bool) bool {
	from := 0
	for i := 0; i < len(s); {
		end := match(w, s, i)
		if !w.step() {
			return false
		}
		if end == i {
			_, n := utf8.DecodeRuneInString(s[i:])
			i += n
			continue
		}
		if from < i && !piece(s[from:i]) || !piece(s[i:end]) {
			return false
		}
		from, i = end, end
	}
	return from == len(s) || piece(s[from:])
}

// runOf returns the end of a run of at most most code points of a class. A negative bound means no bound.
func runOf(w *work, s string, i, most int, class func(rune) bool) int {
	for ; most != 0 && i < len(s) && w.step(); most-- {
		r, n := utf8.DecodeRuneInString(s[i:])
		if !class(r) {
			break
		}
		i += n
	}
	return i
}

func newline(r rune) bool { return r == '\r' || r == '\n' }
func other(r rune) bool   { return !unicode.IsSpace(r) && !unicode.IsLetter(r) && !unicode.IsNumber(r) }
func lead(r rune) bool    { return !newline(r) && !unicode.IsLetter(r) && !unicode.IsNumber(r) }
func mark(r rune) bool    { return unicode.IsPunct(r) || unicode.IsSymbol(r) }
func word(r rune) bool    { return unicode.IsLetter(r) || unicode.IsMark(r) }
func upper(r rune) bool   { return word(r) && !unicode.Is(unicode.Ll, r) }
func lower(r rune) bool   { return word(r) && !unicode.Is(unicode.Lu, r) && !unicode.Is(unicode.Lt, r) }

// contraction matches (?i:'s|'t|'re|'ve|'m|'ll|'d).
func contraction(s string, i int) int {
	if i+1 >= len(s) || s[i] != '\'' {
		return i
	}
	switch s[i+1] | 0x20 {
	case 's', 't', 'm', 'd':
		return i + 2
	case 'r', 'v':
		if i+2 < len(s) && s[i+2]|0x20 == 'e' {
			return i + 3
		}
	case 'l':
		if i+2 < len(s) && s[i+2]|0x20 == 'l' {
			return i + 3
		}
	}
	const long = "ſ" // folds to s
	if len(s) >= i+1+len(long) && s[i+1:i+1+len(long)] == long {
		return i + 1 + len(long)
	}
	return i
}

// marks matches [ ?class+after*].
func marks(w *work, s string, i int, class, after func(rune) bool) int {
	from := i
	if s[i] == ' ' {
		from++
	}
	end := runOf(w, s, from, -1, class)
	if end == from {
		return i
	}
	return runOf(w, s, end, -1, after)
}

// spaces matches \s*[\r\n]+|\s+(?!\S)|\s+.
func spaces(w *work, s string, i int) int {
	line, last, end := i, i, i // after the last newline, before the last code point, and the end of the run
	for end < len(s) && w.step() {
		r, n := utf8.DecodeRuneInString(s[end:])
		if !unicode.IsSpace(r) {
			break
		}
		last, end = end, end+n
		if newline(r) {
			line = end
		}
	}
	switch {
	case line > i:
		return line
	case end < len(s) && last > i:
		return last // the last code point belongs to the next match
	}
	return end
}

func matchWords(w *work, s string, i, digits int) int {
	if end := contraction(s, i); end > i {
		return end
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	from := i
	if lead(r) {
		from += n
	}
	if end := runOf(w, s, from, -1, unicode.IsLetter); end > from {
		return end
	}
	if end := runOf(w, s, i, digits, unicode.IsNumber); end > i {
		return end
	}
	if end := marks(w, s, i, other, newline); end > i {
		return end
	}
	return spaces(w, s, i)
}

func matchCased(w *work, s string, i int) int {
	r, n := utf8.DecodeRuneInString(s[i:])
	from := []int{i}
	if lead(r) {
		from = []int{i + n, i}
	}
	for _, at := range from {
		if end := lowerWord(w, s, at); end > at {
			return contraction(s, end)
		}
	}
	for _, at := range from {
		if end := runOf(w, s, at, -1, upper); end > at {
			return contraction(s, runOf(w, s, end, -1, lower))
		}
	}
	if end := runOf(w, s, i, 3, unicode.IsNumber); end > i {
		return end
	}
	if end := marks(w, s, i, other, func(r rune) bool { return newline(r) || r == '/' }); end > i {
		return end
	}
	return spaces(w, s, i)
}

// lowerWord matches [upper]*[lower]+. The first class gives code points back if the second needs them.
func lowerWord(w *work, s string, i int) int {
	last := i // after the last code point of the first run that is in both classes
	up := runOf(w, s, i, -1, upper)
	if end := runOf(w, s, up, -1, lower); end > up {
		return end
	}
	for at := up; at > i && w.step(); {
		r, n := utf8.DecodeLastRuneInString(s[:at])
		if lower(r) {
			last = at
			break
		}
		at -= n
	}
	return last
}

func matchDeepSeek(w *work, s string, i int) int {
	if c := s[i]; c > ' ' && c < 0x7f && !alphanumeric(c) {
		end := i + 1
		for end < len(s) && s[end] < 0x80 && alphanumeric(s[end]) && s[end] > '9' {
			end++
		}
		if end > i+1 {
			return end
		}
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	if !newline(r) && !unicode.IsLetter(r) && !mark(r) {
		if end := runOf(w, s, i+n, -1, word); end > i+n {
			return end
		}
	}
	if end := runOf(w, s, i, -1, word); end > i {
		return end
	}
	if end := marks(w, s, i, mark, newline); end > i {
		return end
	}
	return spaces(w, s, i)
}

func alphanumeric(c byte) bool {
	return '0' <= c && c <= '9' || 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z'
}
