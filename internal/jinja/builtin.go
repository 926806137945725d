package jinja

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// globals are the functions that every template has. Their variables may have the same names.
var globals = map[string]any{
	"raise_exception": global(func(_ *run, pos []any, kw []argument) (any, error) {
		vals, err := bind(pos, kw, "message")
		if err != nil {
			return nil, err
		}
		text, err := str(vals[0])
		if err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("it says: %.400s", text)
	}),
	"namespace": global(func(_ *run, pos []any, kw []argument) (any, error) {
		ns := &namespace{map[string]any{}}
		if len(pos) > 0 {
			return nil, errors.New("namespace takes names only here")
		}
		for _, a := range kw {
			ns.of[a.name] = a.val
		}
		return ns, nil
	}),
	"range": global(func(_ *run, pos []any, kw []argument) (any, error) {
		vals := []int64{0, 0, 1}
		if len(pos) == 0 || len(pos) > 3 || len(kw) > 0 {
			return nil, errors.New("range takes one to three integers")
		}
		for i, v := range pos {
			_, n, whole, ok := numeric(v)
			if !ok || !whole || n > math.MaxInt32 || n < math.MinInt32 {
				return nil, fmt.Errorf("range takes integers, not %s", what(v))
			}
			vals[i] = n
		}
		if len(pos) == 1 {
			vals[0], vals[1] = 0, vals[0]
		}
		if vals[2] == 0 {
			return nil, errors.New("range with steps of 0")
		}
		l := &list{form: aTuple}
		for i := vals[0]; vals[2] > 0 && i < vals[1] || vals[2] < 0 && i > vals[1]; i += vals[2] {
			if l.items = append(l.items, i); len(l.items) > 100000 { // as in Jinja2's sandbox
				return nil, errors.New("range is too large")
			}
		}
		return l, nil
	}),
	"strftime_now": global(func(r *run, pos []any, kw []argument) (any, error) {
		vals, err := bind(pos, kw, "format")
		if err != nil {
			return nil, err
		}
		format, is := vals[0].(string)
		if !is {
			return nil, fmt.Errorf("strftime_now takes a str, not %s", what(vals[0]))
		}
		return r.strftime(format)
	}),
}

// layouts are what strftime's letters stand for, in Go's layouts.
var layouts = map[byte]string{'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'd': "02", 'm': "01", 'y': "06",
	'Y': "2006", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002"}

func (r *run) strftime(format string) (any, error) {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		i++
		if i < len(format) && format[i] == '%' {
			b.WriteByte('%')
			continue
		}
		if i == len(format) || layouts[format[i]] == "" {
			return nil, fmt.Errorf("strftime_now(%.40q) is not known here", format)
		}
		b.WriteString(r.now.Format(layouts[format[i]]))
	}
	return r.text(b.String(), nil)
}

// filter is one of [filterNames].
type filter func(r *run, v any, pos []any, kw []argument) (any, error)

// onText makes a filter of a function of the value's text.
func onText(do func(string) (string, error)) filter {
	return func(r *run, v any, pos []any, kw []argument) (any, error) {
		if _, err := bind(pos, kw); err != nil {
			return nil, err
		}
		text, err := plain(v)
		if err != nil {
			return nil, err
		}
		return r.text(do(text))
	}
}

// plain is str of what is not safe already: Jinja2 keeps that, and filters of it escape.
func plain(v any) (string, error) {
	if _, is := v.(markup); is {
		return "", errors.New("text of the filter safe is changed, which is not known here")
	}
	return str(v)
}

var filterNames map[string]filter

func init() { // since select and the like look filters and tests up themselves
	filterNames = map[string]filter{
		"trim": func(r *run, v any, pos []any, kw []argument) (any, error) {
			vals, err := bind(pos, kw, "chars")
			if err != nil {
				return nil, err
			}
			text, err := plain(v)
			if err != nil {
				return nil, err
			}
			return strip(text, vals[0], true, true)
		},
		"upper":  onText(upper),
		"lower":  onText(lower),
		"string": onText(func(s string) (string, error) { return s, nil }),
		"safe": func(_ *run, v any, pos []any, kw []argument) (any, error) {
			if _, err := bind(pos, kw); err != nil {
				return nil, err
			}
			text, err := str(v)
			return markup(text), err
		},
		"length": lengthFilter, "count": lengthFilter,
		"tojson": func(r *run, v any, pos []any, kw []argument) (any, error) {
			return r.toJSON(v, pos, kw)
		},
		"default": defaultFilter, "d": defaultFilter,
		"replace": func(r *run, v any, pos []any, kw []argument) (any, error) {
			vals, err := bind(pos, kw, "old", "new", "count")
			if err != nil {
				return nil, err
			}
			if _, is := vals[2].(missing); !is && vals[2] != nil {
				return nil, errors.New("a count is not known here")
			}
			var texts [3]string
			for i, v := range []any{v, vals[0], vals[1]} {
				if texts[i], err = plain(v); err != nil {
					return nil, err
				}
			}
			return r.replace(texts[0], texts[1], texts[2])
		},
		"join": func(r *run, v any, pos []any, kw []argument) (any, error) {
			vals, err := bind(pos, kw, "d", "attribute")
			if err != nil {
				return nil, err
			}
			if _, is := vals[1].(missing); !is {
				return nil, errors.New("an attribute is not known here")
			}
			between := ""
			if _, is := vals[0].(missing); !is {
				if between, err = plain(vals[0]); err != nil {
					return nil, err
				}
			}
			items, err := iterate(v)
			if err != nil {
				return nil, err
			}
			texts := make([]string, len(items))
			for i, v := range items {
				if texts[i], err = plain(v); err != nil {
					return nil, err
				}
			}
			return r.text(strings.Join(texts, between), nil)
		},
		"first": func(_ *run, v any, pos []any, kw []argument) (any, error) {
			if _, err := bind(pos, kw); err != nil {
				return nil, err
			}
			items, err := iterate(v)
			if err != nil || len(items) == 0 {
				return undefined{"the first item"}, err
			}
			if l, is := v.(*list); is && l.form == generator {
				l.items = items[1:] // the others are still to come
			}
			return items[0], nil
		},
		"last": func(_ *run, v any, pos []any, kw []argument) (any, error) {
			if _, err := bind(pos, kw); err != nil {
				return nil, err
			}
			if l, is := v.(*list); is && l.form == generator {
				return nil, errors.New("what a filter returned cannot be reversed")
			}
			items, err := iterate(v)
			if err != nil || len(items) == 0 {
				return undefined{"the last item"}, err
			}
			return items[len(items)-1], nil
		},
		"list": func(r *run, v any, pos []any, kw []argument) (any, error) {
			if _, err := bind(pos, kw); err != nil {
				return nil, err
			}
			items, err := iterate(v)
			if err != nil {
				return nil, err
			}
			return &list{aList, items}, r.made(16 * len(items))
		},
		"items": func(_ *run, v any, pos []any, kw []argument) (any, error) {
			if _, err := bind(pos, kw); err != nil {
				return nil, err
			}
			switch v := v.(type) {
			case undefined:
				return &list{form: generator}, nil
			case *Dict:
				return &list{generator, pairs(v)}, nil
			}
			return nil, fmt.Errorf("%s has no items", what(v))
		},
		"map":    mapFilter,
		"select": choose(false, true), "reject": choose(false, false),
		"selectattr": choose(true, true), "rejectattr": choose(true, false),
	}
}

func lengthFilter(_ *run, v any, pos []any, kw []argument) (any, error) {
	if _, err := bind(pos, kw); err != nil {
		return nil, err
	}
	n, err := length(v)
	return int64(n), err
}

func defaultFilter(_ *run, v any, pos []any, kw []argument) (any, error) {
	vals, err := bind(pos, kw, "default_value", "boolean")
	if err != nil {
		return nil, err
	}
	_, isMissing := vals[1].(missing)
	_, isUndefined := v.(undefined)
	if !isUndefined && (isMissing || !truth(vals[1]) || truth(v)) {
		return v, nil
	}
	if _, is := vals[0].(missing); is {
		return "", nil
	}
	return vals[0], nil
}

func pairs(d *Dict) []any {
	items := make([]any, len(d.keys))
	for i, k := range d.keys {
		items[i] = &list{aTuple, []any{k, d.of[k]}}
	}
	return items
}

// path is v.a.b for "a.b", as filters take attributes.
func path(v any, name any) (any, error) {
	text, is := name.(string)
	if !is {
		return nil, fmt.Errorf("%s is an attribute's name, which is not known here", what(name))
	}
	for _, part := range strings.Split(text, ".") {
		var key any = part
		if i, err := strconv.ParseInt(part, 10, 64); err == nil && i >= 0 {
			key = i
		}
		var err error
		if v, err = item(v, key); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func mapFilter(r *run, v any, pos []any, kw []argument) (any, error) {
	each := func(v any) (any, error) { return path(v, kw[0].val) }
	if len(pos) > 0 {
		name, _ := pos[0].(string)
		f := filterNames[name]
		if f == nil {
			return nil, fmt.Errorf("the filter %.40q is not known here", name)
		}
		each = func(v any) (any, error) { return f(r, v, pos[1:], kw) }
	} else if len(kw) != 1 || kw[0].name != "attribute" {
		return nil, errors.New("it takes the name of a filter, or an attribute")
	}
	items, err := iterate(v)
	if err != nil {
		return nil, err
	}
	made := &list{generator, make([]any, len(items))}
	for i, v := range items {
		if made.items[i], err = each(v); err != nil {
			return nil, err
		}
	}
	return made, nil
}

// choose makes the filters select, reject, selectattr and rejectattr.
func choose(attribute, keep bool) filter {
	return func(r *run, v any, pos []any, kw []argument) (any, error) {
		of := func(v any) (any, error) { return v, nil }
		if attribute {
			if len(pos) == 0 {
				return nil, errors.New("it takes an attribute's name")
			}
			name := pos[0]
			of = func(v any) (any, error) { return path(v, name) }
			pos = pos[1:]
		}
		is := func(v any) (any, error) { return truth(v), nil }
		if len(pos) > 0 {
			name, _ := pos[0].(string)
			if testNames[name] == nil {
				return nil, fmt.Errorf("the test %.40q is not known here", name)
			}
			is = func(v any) (any, error) { return r.test(name, v, pos[1:], kw) }
		}
		items, err := iterate(v)
		if err != nil {
			return nil, err
		}
		kept := &list{form: generator}
		for _, v := range items {
			if err := r.step(); err != nil {
				return nil, err
			}
			x, err := of(v)
			if err != nil {
				return nil, err
			}
			yes, err := is(x)
			if err != nil {
				return nil, err
			}
			if yes == keep {
				kept.items = append(kept.items, v)
			}
		}
		return kept, nil
	}
}

// test evaluates one of [testNames].
func (r *run) test(name string, v any, pos []any, kw []argument) (any, error) {
	is, err := testNames[name](v, pos)
	if len(kw) > 0 {
		err = errors.New("it takes no names")
	}
	if err != nil {
		return nil, fmt.Errorf("test %s: %w", name, err)
	}
	return is, nil
}

// kindTest makes a test without arguments.
func kindTest(is func(v any) bool) func(any, []any) (bool, error) {
	return func(v any, pos []any) (bool, error) {
		if len(pos) > 0 {
			return false, errors.New("it takes no arguments")
		}
		return is(v), nil
	}
}

// withOther makes a test with one argument.
func withOther(is func(v, other any) (bool, error)) func(any, []any) (bool, error) {
	return func(v any, pos []any) (bool, error) {
		if len(pos) != 1 {
			return false, errors.New("it takes one argument")
		}
		return is(v, pos[0])
	}
}

func isDefined(v any) bool { _, is := v.(undefined); return !is }

func isText(v any) bool {
	switch v.(type) {
	case string, markup:
		return true
	}
	return false
}

func isSequence(v any) bool {
	switch v := v.(type) {
	case string, markup, *Dict, undefined:
		return true
	case *list:
		return v.form <= aTuple
	}
	return false
}

func isNumber(v any) bool { _, _, _, ok := numeric(v); return ok || isBig(v) }

func same(v, other any) (bool, error) { return equal(v, other) }

func different(v, other any) (bool, error) {
	is, err := equal(v, other)
	return !is, err
}

var testNames = map[string]func(v any, pos []any) (bool, error){
	"defined":   kindTest(isDefined),
	"undefined": kindTest(func(v any) bool { return !isDefined(v) }),
	"none":      kindTest(func(v any) bool { return v == nil }),
	"true":      kindTest(func(v any) bool { return v == true }),
	"false":     kindTest(func(v any) bool { return v == false }),
	"boolean":   kindTest(func(v any) bool { _, is := v.(bool); return is }),
	"string":    kindTest(isText),
	"mapping":   kindTest(func(v any) bool { _, is := v.(*Dict); return is }),
	"sequence":  kindTest(isSequence),
	"iterable":  kindTest(func(v any) bool { _, is := v.(*list); return is || isSequence(v) }),
	"number":    kindTest(isNumber),
	"integer":   kindTest(func(v any) bool { _, is := v.(int64); return is || isBig(v) }),
	"float":     kindTest(func(v any) bool { _, is := v.(float64); return is }),
	"equalto":   withOther(same), "eq": withOther(same), "==": withOther(same),
	"ne": withOther(different), "!=": withOther(different),
	"in":   withOther(func(v, other any) (bool, error) { return contains(other, v) }),
	"odd":  kindTest(func(v any) bool { i, is := v.(int64); return is && i%2 != 0 }),
	"even": kindTest(func(v any) bool { i, is := v.(int64); return is && i%2 == 0 }),
}

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
			return &list{aView, pairs(v)}, nil
		case m.name == "keys" && len(pos) == 0:
			items, err := iterate(v)
			return &list{aView, items}, err
		case m.name == "values" && len(pos) == 0:
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
		items, err := iterate(pos[0])
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
		return r.text(strings.Join(parts, s), nil)
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
		of = func(r rune) bool { return strings.ContainsRune(c, r) }
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
	var parts []string
	switch by := any(nil); {
	case len(pos) > 2:
		return nil, errMethod
	case len(pos) == 0 || pos[0] == by:
		if most >= 0 {
			return nil, errMethod
		}
		parts = strings.FieldsFunc(s, IsSpace)
	default:
		sep, is := pos[0].(string)
		switch {
		case !is || sep == "":
			return nil, errMethod
		case most < 0 || most >= int64(strings.Count(s, sep)):
			parts = strings.Split(s, sep)
		case !fromRight:
			parts = strings.SplitN(s, sep, int(most)+1)
		default:
			for ; most > 0; most-- {
				i := strings.LastIndex(s, sep)
				parts = append(parts, s[i+len(sep):])
				s = s[:i]
			}
			parts = append(parts, s)
			slices.Reverse(parts)
		}
	}
	l := &list{items: make([]any, len(parts))}
	for i, part := range parts {
		l.items[i] = part
	}
	return l, r.made(len(s) + 16*len(parts))
}

// toJSON is the filter tojson: Python's json.dumps.
func (r *run) toJSON(v any, pos []any, kw []argument) (any, error) {
	vals, err := bind(pos, kw, "ensure_ascii", "indent", "separators", "sort_keys")
	if err != nil {
		return nil, err
	}
	given := func(i int) bool { _, is := vals[i].(missing); return !is && vals[i] != nil }
	w := &writer{indent: -1, item: ", ", key: ": ", run: r}
	w.ascii = given(0) && truth(vals[0])
	w.sort = given(3) && truth(vals[3])
	if given(1) {
		n, is := vals[1].(int64)
		if !is || n < 0 || n > 64 {
			return nil, fmt.Errorf("an indent that is %s is not known here", what(vals[1]))
		}
		w.indent, w.item = int(n), ","
	}
	if given(2) {
		l, is := vals[2].(*list)
		if !is || l.form > aTuple || len(l.items) != 2 || !isText(l.items[0]) || !isText(l.items[1]) {
			return nil, errors.New("separators are not two texts")
		}
		w.item, _ = str(l.items[0])
		w.key, _ = str(l.items[1])
	}
	if err := w.write(v, 0); err != nil {
		return nil, err
	}
	return r.text(w.b.String(), nil)
}

// writer writes JSON as Python does.
type writer struct {
	b         strings.Builder
	run       *run
	ascii     bool
	sort      bool
	indent    int // negative: all in a line
	item, key string
}

func (w *writer) write(v any, depth int) error {
	if err := w.run.step(); err != nil {
		return err
	}
	if depth > maxDepth || w.b.Len() > MaxOutput {
		return ErrTooMuch
	}
	switch v := v.(type) {
	case nil:
		w.b.WriteString("null")
	case bool:
		w.b.WriteString(strconv.FormatBool(v))
	case int64, big:
		text, _ := str(v)
		w.b.WriteString(text)
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return errors.New("a number is not finite")
		}
		w.b.WriteString(floatText(v))
	case string:
		w.quote(v)
	case *list:
		if v.form > aTuple {
			return errors.New("a view or generator is no JSON")
		}
		return w.collection('[', ']', len(v.items), depth, func(i int) error { return w.write(v.items[i], depth+1) })
	case *Dict:
		keys := v.keys
		if w.sort {
			keys = slices.Sorted(slices.Values(keys))
		}
		return w.collection('{', '}', len(keys), depth, func(i int) error {
			w.quote(keys[i])
			w.b.WriteString(w.key)
			return w.write(v.of[keys[i]], depth+1)
		})
	default:
		return fmt.Errorf("%s is no JSON", what(v))
	}
	return nil
}

func (w *writer) collection(opening, closing byte, n, depth int, write func(i int) error) error {
	line := func(depth int) {
		if w.indent >= 0 && n > 0 {
			w.b.WriteByte('\n')
			w.b.WriteString(strings.Repeat(" ", w.indent*depth))
		}
	}
	w.b.WriteByte(opening)
	for i := range n {
		if i > 0 {
			w.b.WriteString(w.item)
		}
		line(depth + 1)
		if err := write(i); err != nil {
			return err
		}
	}
	line(depth)
	w.b.WriteByte(closing)
	return nil
}

func (w *writer) quote(s string) {
	w.b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			w.b.WriteByte('\\')
			w.b.WriteRune(r)
		case r < ' ' || w.ascii && r > '~':
			if i := strings.IndexRune("\n\r\t\b\f", r); i >= 0 {
				w.b.WriteByte('\\')
				w.b.WriteByte("nrtbf"[i])
				break
			}
			for _, unit := range utf16.Encode([]rune{r}) {
				fmt.Fprintf(&w.b, `\u%04x`, unit)
			}
		default:
			w.b.WriteRune(r)
		}
	}
	w.b.WriteByte('"')
}
