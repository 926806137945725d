package jinja

import (
	"errors"
	"slices"
	"strings"
	"unicode/utf8"
)

// dictMethods are the attributes that Python's dict has.
var dictMethods = []string{"clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault",
	"update", "values"}

// listMethods are the attributes that Python's lists, tuples, ranges, views and generators have.
var listMethods = []string{"append", "clear", "close", "copy", "count", "extend", "index", "insert", "isdisjoint",
	"mapping", "pop", "remove", "reverse", "send", "sort", "start", "step", "stop", "throw"}

// numberMethods are the attributes that Python's numbers have.
var numberMethods = []string{"as_integer_ratio", "bit_count", "bit_length", "conjugate", "denominator", "from_bytes",
	"fromhex", "hex", "imag", "is_integer", "numerator", "real", "to_bytes"}

// strMethods are the attributes that Python's str has.
var strMethods = []string{"capitalize", "casefold", "center", "count", "encode", "endswith", "expandtabs", "find",
	"format", "format_map", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
	"isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "maketrans",
	"partition",
	"removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
	"splitlines", "startswith", "strip", "swapcase", "title", "translate", "upper", "zfill"}

var errMethod = errors.New("this method is not known here, or not with these arguments")

// method calls a method of a str or a dict.
func (r *run) method(m method, pos []any, kw []argument) (any, error) {
	if len(kw) > 0 {
		return nil, errMethod
	}
	switch v := m.of.(type) {
	case string:
		return r.strMethod(v, m.name, pos)
	case *Dict:
		switch {
		case m.name == "items" && len(pos) == 0:
			items, err := r.pairs(v)
			return &list{aView, items}, err
		case m.name == "keys" && len(pos) == 0:
			items, err := r.iterate(v)
			return &list{aView, items}, err
		case m.name == "values" && len(pos) == 0:
			if err := r.made(itemBytes * len(v.keys)); err != nil {
				return nil, err
			}
			l := &list{form: aView}
			for _, k := range v.keys {
				l.items = append(l.items, v.of[k])
			}
			return l, nil
		case m.name == "get" && (len(pos) == 1 || len(pos) == 2):
			key, is := pos[0].(string)
			if !is {
				return nil, errMethod
			}
			if x, has := v.of[key]; has {
				return x, nil
			}
			if len(pos) == 2 {
				return pos[1], nil
			}
			return nil, nil
		}
	}
	return nil, errMethod
}

func (r *run) strMethod(s, name string, pos []any) (any, error) {
	if err := r.work(len(s)); err != nil {
		return nil, err
	}
	texts := make([]string, len(pos))
	all := true
	for i, v := range pos {
		var is bool
		texts[i], is = v.(string)
		all = all && is
	}
	switch {
	case len(pos) <= 1 && (name == "strip" || name == "lstrip" || name == "rstrip"):
		var chars any = missing{}
		if len(pos) > 0 {
			chars = pos[0]
		}
		return strip(s, chars, name != "rstrip", name != "lstrip")
	case name == "split" || name == "rsplit":
		return r.split(s, name == "rsplit", pos)
	case len(pos) == 1 && (name == "startswith" || name == "endswith"):
		if l, is := pos[0].(*list); is && l.form == aTuple {
			pos = l.items
		}
		for _, v := range pos {
			t, is := v.(string)
			if !is {
				return nil, errMethod
			}
			if err := r.work(len(t)); err != nil {
				return nil, err
			}
			if name == "startswith" && strings.HasPrefix(s, t) || name == "endswith" && strings.HasSuffix(s, t) {
				return true, nil
			}
		}
		return false, nil
	case name == "upper" && len(pos) == 0:
		return r.text(upper(s))
	case name == "lower" && len(pos) == 0:
		return r.text(lower(s))
	case name == "replace" && len(pos) == 2 && all:
		return r.replace(s, texts[0], texts[1])
	case name == "removeprefix" && len(pos) == 1 && all:
		return strings.TrimPrefix(s, texts[0]), nil
	case name == "removesuffix" && len(pos) == 1 && all:
		return strings.TrimSuffix(s, texts[0]), nil
	case (name == "find" || name == "rfind") && len(pos) == 1 && all:
		i := strings.Index(s, texts[0])
		if name == "rfind" {
			i = strings.LastIndex(s, texts[0])
		}
		if i > 0 {
			i = utf8.RuneCountInString(s[:i])
		}
		return int64(i), nil
	case name == "count" && len(pos) == 1 && all:
		return int64(strings.Count(s, texts[0])), nil
	case name == "join" && len(pos) == 1:
		items, err := r.iterate(pos[0])
		if err != nil {
			return nil, err
		}
		parts := make([]string, len(items))
		for i, v := range items {
			var is bool
			if parts[i], is = v.(string); !is {
				return nil, errMethod
			}
		}
		return r.join(parts, s)
	}
	return nil, errMethod
}

func upper(s string) (string, error) { return strings.ToUpper(s), ascii(s) }
func lower(s string) (string, error) { return strings.ToLower(s), ascii(s) }

// strip removes code points from the ends of a text; by default those that are space.
func strip(s string, chars any, left, right bool) (any, error) {
	of := IsSpace
	switch c := chars.(type) {
	case nil, missing:
	case string:
		in := map[rune]bool{}
		for _, r := range c {
			in[r] = true
		}
		of = func(r rune) bool { return in[r] }
	default:
		return nil, errMethod
	}
	if left {
		s = strings.TrimLeftFunc(s, of)
	}
	if right {
		s = strings.TrimRightFunc(s, of)
	}
	return s, nil
}

func (r *run) replace(s, from, to string) (any, error) {
	n := strings.Count(s, from)
	if n > 0 && len(to) > (MaxOutput-len(s))/n {
		return nil, ErrTooMuch
	}
	return r.text(strings.ReplaceAll(s, from, to), nil)
}

func (r *run) join(texts []string, between string) (any, error) {
	n := itemBytes*len(texts) + len(between)*max(0, len(texts)-1)
	for _, text := range texts {
		n += len(text)
	}
	if err := r.made(n); err != nil {
		return nil, err
	}
	return strings.Join(texts, between), nil
}

// split is Python's str.split and str.rsplit.
func (r *run) split(s string, fromRight bool, pos []any) (any, error) {
	most := int64(-1)
	if len(pos) == 2 {
		_, n, whole, ok := numeric(pos[1])
		if !ok || !whole {
			return nil, errMethod
		}
		most = n
	}
	if err := r.made(len(s)); err != nil {
		return nil, err
	}
	var parts []string
	switch by := any(nil); {
	case len(pos) > 2:
		return nil, errMethod
	case len(pos) == 0 || pos[0] == by:
		if most >= 0 {
			return nil, errMethod
		}
		for part := range strings.FieldsFuncSeq(s, IsSpace) {
			if err := r.made(2 * itemBytes); err != nil {
				return nil, err
			}
			parts = append(parts, part)
		}
	default:
		sep, is := pos[0].(string)
		if !is || sep == "" {
			return nil, errMethod
		}
		cuts := int64(strings.Count(s, sep))
		if most >= 0 {
			cuts = min(cuts, most)
		}
		if err := r.made(2 * itemBytes * int(cuts+1)); err != nil {
			return nil, err
		}
		if !fromRight {
			parts = strings.SplitN(s, sep, int(cuts)+1)
			break
		}
		rest := s // in which others are found than from the left if the separator overlaps with itself
		for ; cuts > 0; cuts-- {
			i := strings.LastIndex(rest, sep)
			parts = append(parts, rest[i+len(sep):])
			rest = rest[:i]
		}
		parts = append(parts, rest)
		slices.Reverse(parts)
	}
	l := &list{items: make([]any, len(parts))}
	for i, part := range parts {
		l.items[i] = part
	}
	return l, nil
}
