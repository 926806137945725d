package jinja

import (
	"errors"
	"slices"
)

// dictMethods are the attributes of Python's dict.
var dictMethods = []string{"clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault",
	"update", "values"}

// listMethods are the attributes of Python's lists, tuples, ranges, views and generators.
var listMethods = []string{"append", "clear", "close", "copy", "count", "extend", "index", "insert", "isdisjoint",
	"mapping", "pop", "remove", "reverse", "send", "sort", "start", "step", "stop", "throw"}

// numberMethods are the attributes of Python's numbers.
var numberMethods = []string{"as_integer_ratio", "bit_count", "bit_length", "conjugate", "denominator", "from_bytes",
	"fromhex", "hex", "imag", "is_integer", "numerator", "real", "to_bytes"}

// strMethods are the attributes of Python's str.
var strMethods = []string{"capitalize", "casefold", "center", "count", "encode", "endswith", "expandtabs", "find",
	"format", "format_map", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
	"isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "maketrans",
	"partition",
	"removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
	"splitlines", "startswith", "strip", "swapcase", "title", "translate", "upper", "zfill"}

var errMethod = errors.New("the method is not supported with these arguments")

// method calls a method of a str or a dict.
func (r *run) method(m method, pos []any, kw []argument) (any, error) {
	var b builtin
	has := false
	switch m.of.(type) {
	case string:
		b, has = strBuiltins[m.name]
	case *Dict:
		b, has = dictBuiltins[m.name]
	}
	if !has {
		return nil, errMethod
	}
	return r.invoke(b, m.of, pos, kw)
}

// dictBuiltins are the supported methods of a dict.
var dictBuiltins = map[string]builtin{
	"items": dictMethod(0, func(r *run, d *Dict, _ []any) (any, error) {
		items, err := r.pairs(d)
		return &list{aView, items}, err
	}),
	"keys": dictMethod(0, func(r *run, d *Dict, _ []any) (any, error) {
		items, err := r.iterate(d)
		return &list{aView, items}, err
	}),
	"values": dictMethod(0, func(r *run, d *Dict, _ []any) (any, error) {
		if err := r.made(itemBytes * len(d.keys)); err != nil {
			return nil, err
		}
		l := &list{form: aView}
		for _, k := range d.keys {
			v, _, err := r.get(d, k)
			if err != nil {
				return nil, err
			}
			l.items = append(l.items, v)
		}
		return l, nil
	}),
	"get": dictMethod(2, func(r *run, d *Dict, pos []any) (any, error) {
		if len(pos) == 0 {
			return nil, errMethod
		}
		key, is := pos[0].(string)
		if !is {
			return nil, errMethod
		}
		v, has, err := r.get(d, key)
		if !has && len(pos) == 2 {
			v = pos[1]
		}
		return v, err
	}),
}

// dictMethod returns a method with at most the given number of arguments. The method counts its own work.
func dictMethod(most int, do func(r *run, d *Dict, pos []any) (any, error)) builtin {
	return counted(func(r *run, v any, pos []any, kw []argument) (any, error) {
		if len(pos) > most || len(kw) > 0 {
			return nil, errMethod
		}
		return do(r, v.(*Dict), pos)
	})
}

// strBuiltins are the supported methods of a str.
var strBuiltins = map[string]builtin{
	"strip":  stripMethod(true, true),
	"lstrip": stripMethod(true, false),
	"rstrip": stripMethod(false, true),
	"split":  strMethod(0, 2, func(r *run, s string, pos []any) (any, error) { return r.parts(s, false, pos) }),
	"rsplit": strMethod(0, 2, func(r *run, s string, pos []any) (any, error) { return r.parts(s, true, pos) }),
	"startswith": strMethod(1, 1, func(r *run, s string, pos []any) (any, error) {
		return anyText(pos[0], func(t string) (bool, error) { return r.hasPrefix(s, t) })
	}),
	"endswith": strMethod(1, 1, func(r *run, s string, pos []any) (any, error) {
		return anyText(pos[0], func(t string) (bool, error) { return r.hasSuffix(s, t) })
	}),
	"upper": strMethod(0, 0, func(r *run, s string, _ []any) (any, error) { return r.upper(s) }),
	"lower": strMethod(0, 0, func(r *run, s string, _ []any) (any, error) { return r.lower(s) }),
	"replace": textsMethod(2, func(r *run, s string, of []string) (any, error) {
		return r.replace(s, of[0], of[1])
	}),
	"removeprefix": textsMethod(1, func(r *run, s string, of []string) (any, error) {
		is, err := r.hasPrefix(s, of[0])
		if is {
			s = s[len(of[0]):]
		}
		return s, err
	}),
	"removesuffix": textsMethod(1, func(r *run, s string, of []string) (any, error) {
		is, err := r.hasSuffix(s, of[0])
		if is {
			s = s[:len(s)-len(of[0])]
		}
		return s, err
	}),
	"find":  findMethod((*run).index),
	"rfind": findMethod((*run).lastIndex),
	"count": textsMethod(1, func(r *run, s string, of []string) (any, error) {
		n := int64(-1)
		if of[0] == "" {
			points, err := r.codePoints(s)
			return int64(points) + 1, err
		}
		err := r.split(s, of[0], -1, func(string) error { n++; return nil })
		return n, err
	}),
	"join": strMethod(1, 1, func(r *run, s string, pos []any) (any, error) {
		items, err := r.iterate(pos[0])
		if err != nil {
			return nil, err
		}
		return r.join(items, s, func(v any) (string, error) {
			text, is := v.(string)
			if !is {
				return "", errMethod
			}
			return text, nil
		})
	}),
}

// stripMethod returns a method that removes code points from one or both ends of a text.
func stripMethod(left, right bool) builtin {
	return strMethod(0, 1, func(r *run, s string, pos []any) (any, error) { return r.strip(s, first(pos), left, right) })
}

// findMethod returns a method that finds a text in another. The result is in code points, or -1.
func findMethod(index func(r *run, s, sub string) (int, error)) builtin {
	return textsMethod(1, func(r *run, s string, of []string) (any, error) {
		at, err := index(r, s, of[0])
		if at > 0 && err == nil {
			at, err = r.codePoints(s[:at])
		}
		return int64(at), err
	})
}

// strMethod returns a method with a minimum and maximum number of arguments.
func strMethod(least, most int, do func(r *run, s string, pos []any) (any, error)) builtin {
	return builtin{do: func(r *run, v any, pos []any, kw []argument) (any, error) {
		if len(pos) < least || len(pos) > most || len(kw) > 0 {
			return nil, errMethod
		}
		return do(r, v.(string), pos)
	}}
}

// textsMethod returns a method with the given number of text arguments.
func textsMethod(n int, do func(r *run, s string, of []string) (any, error)) builtin {
	return strMethod(n, n, func(r *run, s string, pos []any) (any, error) {
		of := make([]string, n)
		for i, v := range pos {
			var is bool
			if of[i], is = v.(string); !is {
				return nil, errMethod
			}
		}
		return do(r, s, of)
	})
}

// first returns the first argument, if any.
func first(pos []any) any {
	if len(pos) == 0 {
		return missing{}
	}
	return pos[0]
}

// anyText reports whether is returns true for a text, or for a text of a tuple.
func anyText(v any, is func(string) (bool, error)) (any, error) {
	texts := []any{v}
	if l, isList := v.(*list); isList && l.form == aTuple {
		texts = l.items
	}
	for _, v := range texts {
		text, isText := v.(string)
		if !isText {
			return nil, errMethod
		}
		if yes, err := is(text); yes || err != nil {
			return yes, err
		}
	}
	return false, nil
}

// strip removes code points from the ends of a text; by default, white space.
func (r *run) strip(s string, chars any, left, right bool) (any, error) {
	of, err := IsSpace, error(nil)
	switch c := chars.(type) {
	case nil, missing:
	case string:
		of, err = r.class(c)
	default:
		err = errMethod
	}
	if left && err == nil {
		s, err = r.trimLeft(s, of)
	}
	if right && err == nil {
		s, err = r.trimRight(s, of)
	}
	return s, err
}

// join returns the texts of items, joined by another text.
func (r *run) join(items []any, between string, text func(v any) (string, error)) (any, error) {
	out := buffer{run: r}
	for i, v := range items {
		text, err := text(v)
		if err == nil && i > 0 {
			err = out.add(between)
		}
		if err == nil {
			err = r.made(itemBytes)
		}
		if err == nil {
			err = out.add(text)
		}
		if err != nil {
			return nil, err
		}
	}
	return out.String(), nil
}

// parts splits a string, as str.split and str.rsplit of Python do.
func (r *run) parts(s string, fromRight bool, pos []any) (any, error) {
	cuts := int64(-1)
	if len(pos) == 2 {
		_, n, whole, ok := numeric(pos[1])
		if !ok || !whole {
			return nil, errMethod
		}
		cuts = max(n, -1)
	}
	l := &list{}
	part := func(text string) error {
		l.items = append(l.items, text)
		return r.made(2*itemBytes + len(text))
	}
	if sep := first(pos); sep == nil || sep == any(missing{}) {
		if cuts >= 0 {
			return nil, errMethod
		}
		return l, r.words(s, part)
	}
	sep, is := pos[0].(string)
	if !is || sep == "" {
		return nil, errMethod
	}
	if !fromRight {
		return l, r.split(s, sep, cuts, part)
	}
	err := r.splitRight(s, sep, cuts, part)
	slices.Reverse(l.items)
	return l, err
}
