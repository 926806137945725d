package jinja

import (
	"context"
	"errors"
	"slices"
	"strings"
	"unicode/utf8"
)

// The functions of this file read and create texts, piece by piece. They count the work of every piece. The files of
// builtins do not import strings, bytes, unicode or utf8, because the functions of these packages do not count. Some
// need time proportional to the product of the lengths of their arguments (strings.Index with a long argument).

const (
	pieceBytes = 16 << 10 // bytes of a text between two counts
	headBytes  = 16       // length of a search text's head; the rest is compared only at matches of the head
	matchWork  = 16       // work of one call of a search
	wordBits   = 64
)

// spaces are the spaces of the deepest JSON indent.
var spaces = strings.Repeat(" ", maxIndent*(maxDepth+1))

// head returns the first piece of a text. The piece ends between code points.
func head(s string) string {
	if len(s) <= pieceBytes {
		return s
	}
	n := pieceBytes
	for n > pieceBytes-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// tail returns the last piece of a text.
func tail(s string) string {
	if len(s) <= pieceBytes {
		return s
	}
	n := len(s) - pieceBytes
	for n < len(s)-pieceBytes+utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n++
	}
	return s[n:]
}

// pieces calls do for each piece of a text.
func (r *run) pieces(s string, do func(piece string) error) error {
	for s != "" {
		piece := head(s)
		if err := r.spend(len(piece)); err != nil {
			return err
		}
		if err := do(piece); err != nil {
			return err
		}
		s = s[len(piece):]
	}
	return nil
}

// buffer builds a text. It counts bytes before it stores them.
type buffer struct {
	run *run
	b   strings.Builder
}

func (b *buffer) add(s string) error {
	if err := b.run.made(len(s)); err != nil {
		return err
	}
	b.b.WriteString(s)
	return nil
}

// addMapped adds a text and replaces each code point for which change does not return "".
func (b *buffer) addMapped(s string, change func(rune) string) error {
	return b.run.pieces(s, func(piece string) error {
		from := 0 // start of the unchanged text
		for i := 0; i < len(piece); {
			c, n := utf8.DecodeRuneInString(piece[i:])
			i += n
			to := change(c)
			if to == "" {
				continue
			}
			if err := b.add(piece[from : i-n]); err != nil {
				return err
			}
			if err := b.add(to); err != nil {
				return err
			}
			from = i
		}
		return b.add(piece[from:])
	})
}

func (b *buffer) String() string { return b.b.String() }

// text counts a returned text.
func (r *run) text(s string) (any, error) { return s, r.made(len(s)) }

// codePoints returns Python's len of a text.
func (r *run) codePoints(s string) (n int, err error) {
	err = r.pieces(s, func(piece string) error {
		n += utf8.RuneCountInString(piece)
		return nil
	})
	return n, err
}

// offset returns the byte offset of code point n, or the length of the text.
func (r *run) offset(s string, n int) (at int, err error) {
	for at < len(s) {
		piece := head(s[at:])
		if count := utf8.RuneCountInString(piece); count <= n {
			at, n = at+len(piece), n-count
			if err := r.spend(len(piece)); err != nil {
				return 0, err
			}
			continue
		}
		for i := range piece {
			if n == 0 {
				return at + i, r.spend(i)
			}
			n--
		}
	}
	return at, nil
}

// letter returns the code point at an index of a text. A negative index counts from the end.
func (r *run) letter(s string, at int64) (letter string, has bool, err error) {
	if at >= 0 {
		from, err := r.offset(s, int(min(at, int64(len(s)))))
		_, size := utf8.DecodeRuneInString(s[from:])
		return s[from : from+size], size > 0, err
	}
	from, size := len(s), 0
	for ; at < 0; at++ {
		if _, size = utf8.DecodeLastRuneInString(s[:from]); size == 0 {
			return "", false, nil
		}
		from -= size
		if err := r.spend(size); err != nil {
			return "", false, err
		}
	}
	return s[from : from+size], true, nil
}

// same reports whether two texts are equal. It counts the compared bytes.
func (r *run) same(a, b string) (bool, error) {
	if len(a) != len(b) {
		return false, nil
	}
	for n := 64; a != ""; n = min(2*n, pieceBytes) {
		n := min(n, len(a))
		if err := r.spend(n); err != nil || a[:n] != b[:n] {
			return false, err
		}
		a, b = a[n:], b[n:]
	}
	return true, nil
}

// before compares texts by code points, which is the byte order of UTF-8.
func (r *run) before(a, b string) (int, error) {
	return strings.Compare(a, b), r.spend(min(len(a), len(b)))
}

// hasPrefix reports whether a text begins with another.
func (r *run) hasPrefix(s, prefix string) (bool, error) {
	if len(s) < len(prefix) {
		return false, nil
	}
	return r.same(s[:len(prefix)], prefix)
}

// hasSuffix reports whether a text ends with another.
func (r *run) hasSuffix(s, suffix string) (bool, error) {
	if len(s) < len(suffix) {
		return false, nil
	}
	return r.same(s[len(s)-len(suffix):], suffix)
}

// index returns the first offset of a text in another; -1 without a match.
func (r *run) index(s, sub string) (int, error) {
	begin := sub[:min(len(sub), headBytes)]
	for at := 0; at+len(sub) <= len(s); at++ {
		window := s[at:min(len(s), at+pieceBytes)]
		i := strings.Index(window, begin)
		if i < 0 {
			i = len(window) - len(begin) // the last offset, which the loop skips
			at += i
			if err := r.spend(i + matchWork); err != nil {
				return 0, err
			}
			continue
		}
		if err := r.spend(i + matchWork); err != nil {
			return 0, err
		}
		if at += i; at+len(sub) > len(s) {
			break
		}
		if same, err := r.same(s[at:at+len(sub)], sub); same || err != nil {
			return at, err
		}
	}
	return -1, nil
}

// lastIndex returns the last offset of a text in another; -1 without a match.
func (r *run) lastIndex(s, sub string) (int, error) {
	begin := sub[:min(len(sub), headBytes)]
	end := len(s) - len(sub) + len(begin) // end of the last head
	for end >= len(begin) {
		from := max(0, end-pieceBytes)
		i := strings.LastIndex(s[from:end], begin)
		if i < 0 {
			if err := r.spend(end - from + matchWork); err != nil {
				return 0, err
			}
			end = from + len(begin) - 1
			if from == 0 {
				break
			}
			continue
		}
		if err := r.spend(end - from - i + matchWork); err != nil {
			return 0, err
		}
		at := from + i
		if same, err := r.same(s[at:at+len(sub)], sub); same || err != nil {
			return at, err
		}
		end = at + len(begin) - 1
	}
	return -1, nil
}

// Contains reports whether a text contains another, in a time bounded by the context. The error is the context's, or
// [ErrTooMuch].
func Contains(ctx context.Context, s, sub string) (bool, error) {
	i, err := (&run{ctx: ctx}).index(s, sub)
	return i >= 0 && err == nil, err
}

// split calls part for each part of a text between separators, at most cuts times; a negative number means no limit.
func (r *run) split(s, sep string, cuts int64, part func(string) error) error {
	for ; cuts != 0; cuts-- {
		i, err := r.index(s, sep)
		if err != nil {
			return err
		}
		if i < 0 {
			break
		}
		if err := part(s[:i]); err != nil {
			return err
		}
		s = s[i+len(sep):]
	}
	return part(s)
}

// splitRight splits from the end to the beginning. Overlapping separators split differently then.
func (r *run) splitRight(s, sep string, cuts int64, part func(string) error) error {
	for ; cuts != 0; cuts-- {
		i, err := r.lastIndex(s, sep)
		if err != nil {
			return err
		}
		if i < 0 {
			break
		}
		if err := part(s[i+len(sep):]); err != nil {
			return err
		}
		s = s[:i]
	}
	return part(s)
}

// words calls part for each part of a text between white space.
func (r *run) words(s string, part func(string) error) error {
	for {
		var err error
		if s, err = r.trimLeft(s, IsSpace); err != nil || s == "" {
			return err
		}
		rest, err := r.trimLeft(s, func(c rune) bool { return !IsSpace(c) })
		if err != nil {
			return err
		}
		if err := part(s[:len(s)-len(rest)]); err != nil {
			return err
		}
		s = rest
	}
}

// trimLeft removes code points of a class from the beginning of a text.
func (r *run) trimLeft(s string, of func(rune) bool) (string, error) {
	for s != "" {
		piece := head(s)
		rest := strings.TrimLeftFunc(piece, of)
		if err := r.spend(len(piece) - len(rest) + 1); err != nil {
			return "", err
		}
		if s = s[len(piece)-len(rest):]; rest != "" {
			break
		}
	}
	return s, nil
}

// trimRight removes code points of a class from the end of a text.
func (r *run) trimRight(s string, of func(rune) bool) (string, error) {
	for s != "" {
		piece := tail(s)
		rest := strings.TrimRightFunc(piece, of)
		if err := r.spend(len(piece) - len(rest) + 1); err != nil {
			return "", err
		}
		if s = s[:len(s)-len(piece)+len(rest)]; rest != "" {
			break
		}
	}
	return s, nil
}

// class returns a function that reports whether a code point occurs in chars.
func (r *run) class(chars string) (func(rune) bool, error) {
	if len(chars) <= headBytes {
		return func(c rune) bool { return strings.ContainsRune(chars, c) }, r.spend(len(chars))
	}
	set := make([]uint64, (utf8.MaxRune+wordBits)/wordBits)
	if err := r.spend(8 * len(set)); err != nil {
		return nil, err
	}
	err := r.pieces(chars, func(piece string) error {
		for _, c := range piece {
			set[c/wordBits] |= 1 << (c % wordBits)
		}
		return nil
	})
	return func(c rune) bool { return set[c/wordBits]&(1<<(c%wordBits)) != 0 }, err
}

// mapASCII applies change to the pieces of a text. It returns an error for letters whose cases may differ between
// Python and Go.
func (r *run) mapASCII(s string, change func(string) string) (any, error) {
	out := buffer{run: r}
	err := r.pieces(s, func(piece string) error {
		for i := range len(piece) {
			if piece[i] >= utf8.RuneSelf {
				return errors.New("the case of non-ASCII letters is not supported")
			}
		}
		return out.add(change(piece))
	})
	return out.String(), err
}

func (r *run) upper(s string) (any, error) { return r.mapASCII(s, strings.ToUpper) }
func (r *run) lower(s string) (any, error) { return r.mapASCII(s, strings.ToLower) }

// repeat returns a text n times.
func (r *run) repeat(s string, n int64) (any, error) {
	if n <= 0 || s == "" {
		return "", nil
	}
	if n > int64(MaxOutput/len(s)) {
		return nil, ErrTooMuch
	}
	if err := r.made(len(s) * int(n)); err != nil {
		return nil, err
	}
	return strings.Repeat(s, int(n)), nil
}

// replace replaces all occurrences of a text.
func (r *run) replace(s, from, to string) (any, error) {
	out := buffer{run: r}
	if from == "" { // an empty text matches before each code point and at the end
		err := r.pieces(s, func(piece string) error {
			for piece != "" {
				_, n := utf8.DecodeRuneInString(piece)
				if err := out.add(to); err != nil {
					return err
				}
				if err := out.add(piece[:n]); err != nil {
					return err
				}
				piece = piece[n:]
			}
			return nil
		})
		if err == nil {
			err = out.add(to)
		}
		return out.String(), err
	}
	parts := 0
	err := r.split(s, from, -1, func(part string) error {
		if parts++; parts > 1 {
			if err := out.add(to); err != nil {
				return err
			}
		}
		return out.add(part)
	})
	return out.String(), err
}

// letters returns a list of the code points of a text.
func (r *run) letters(s string) (items []any, err error) {
	err = r.pieces(s, func(piece string) error {
		if err := r.made(2 * itemBytes * utf8.RuneCountInString(piece)); err != nil {
			return err
		}
		for piece != "" {
			_, n := utf8.DecodeRuneInString(piece)
			items = append(items, piece[:n])
			piece = piece[n:]
		}
		return nil
	})
	return items, err
}

// every returns every by-th code point of a text with n code points.
func (r *run) every(s string, n, at, until, by int) (any, error) {
	if err := r.made(4 * n); err != nil {
		return nil, err
	}
	runes := make([]rune, 0, n)
	if err := r.pieces(s, func(piece string) error {
		for _, c := range piece {
			runes = append(runes, c)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	out := buffer{run: r}
	var piece []byte
	for ; by > 0 && at < until || by < 0 && at > until; at += by {
		if piece = utf8.AppendRune(piece, runes[at]); len(piece) >= pieceBytes {
			if err := out.add(string(piece)); err != nil {
				return nil, err
			}
			piece = piece[:0]
		}
	}
	err := out.add(string(piece))
	return out.String(), err
}

// sorted returns texts in order.
func (r *run) sorted(texts []string) ([]string, error) {
	if err := r.made(itemBytes * len(texts)); err != nil {
		return nil, err
	}
	var failed error
	list := slices.Clone(texts)
	slices.SortFunc(list, func(a, b string) int {
		if failed != nil {
			return 0 // ends the sorting soon
		}
		by, err := r.before(a, b)
		if err == nil {
			err = r.spend(matchWork)
		}
		failed = err
		return by
	})
	return list, failed
}
