package jinja

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// undefined is what a name or a key is that is not there.
type undefined struct{ name string }

// big is an integer beyond int64, as it is printed.
type big string

// markup is what the filter safe returns: text that can only be printed.
type markup string

// form is what a list is in Python.
type form uint8

const (
	aList     form = iota
	aTuple         // a tuple, or a range
	aView          // of a dictionary: it has a length and no places
	generator      // it has no length, and ends when it was gone through
)

type list struct {
	form  form
	items []any
}

// Dict is a dictionary that keeps the order of its keys.
type Dict struct {
	keys []string
	of   map[string]any
}

// NewDict returns one without keys.
func NewDict() *Dict { return &Dict{of: map[string]any{}} }

// Get returns the value of a key.
func (d *Dict) Get(key string) (any, bool) { v, ok := d.of[key]; return v, ok }

// Keys are in order. They are not to be changed.
func (d *Dict) Keys() []string { return d.keys }

// Set gives a key a value: a nil, bool, int64, float64, string, *Dict or what [List] returns.
func (d *Dict) Set(key string, v any) {
	if _, ok := d.of[key]; !ok {
		d.keys = append(d.keys, key)
	}
	d.of[key] = v
}

// List makes a list of values.
func List(items ...any) any { return &list{aList, items} }

// Items are those of a list that [Decode] or [List] made.
func Items(v any) ([]any, bool) {
	if l, ok := v.(*list); ok {
		return l.items, true
	}
	return nil, false
}

// namespace is what the function of that name makes.
type namespace struct{ of map[string]any }

// method is a function of a value.
type method struct {
	of   any
	name string
}

type argument struct {
	name string
	val  any
}

// what is a value's type, as Python calls it.
func what(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case undefined:
		return fmt.Sprintf("%.40q, which is undefined", v.name)
	case bool:
		return "a bool"
	case int64, big:
		return "an int"
	case float64:
		return "a float"
	case string:
		return "a str"
	case *list:
		return "a list"
	case *Dict:
		return "a dict"
	}
	return "an object"
}

// truth is Python's bool of a value.
func truth(v any) bool {
	switch v := v.(type) {
	case nil, undefined:
		return false
	case bool:
		return v
	case int64:
		return v != 0
	case float64:
		return v != 0
	case string:
		return v != ""
	case markup:
		return v != ""
	case *list:
		return v.form == generator || len(v.items) > 0
	case *Dict:
		return len(v.keys) > 0
	}
	return true
}

// str is Python's str of a value.
func str(v any) (string, error) {
	switch v := v.(type) {
	case nil:
		return "None", nil
	case undefined:
		return "", nil
	case bool:
		if v {
			return "True", nil
		}
		return "False", nil
	case int64:
		return strconv.FormatInt(v, 10), nil
	case big:
		return string(v), nil
	case float64:
		return floatText(v), nil
	case string:
		return v, nil
	case markup:
		return string(v), nil
	}
	return "", fmt.Errorf("%s is made text of, which is not known here", what(v))
}

// numeric returns a number as a float, and as an integer if it is one.
func numeric(v any) (f float64, i int64, whole, ok bool) {
	switch v := v.(type) {
	case bool:
		if v {
			return 1, 1, true, true
		}
		return 0, 0, true, true
	case int64:
		return float64(v), v, true, true
	case float64:
		return v, 0, false, true
	}
	return 0, 0, false, false
}

// exact is up to which integers floats hold each.
const exact = 1 << 53

// equal is Python's ==, of values so deep in others.
func (r *run) equal(a, b any, depth int) (bool, error) {
	if depth > maxDepth {
		return false, ErrTooMuch
	}
	if err := r.step(); err != nil {
		return false, err
	}
	if m, ok := a.(markup); ok {
		a = string(m)
	}
	if m, ok := b.(markup); ok {
		b = string(m)
	}
	fa, ia, wa, oka := numeric(a)
	fb, ib, wb, okb := numeric(b)
	if _, is := a.(big); is || isBig(b) {
		return false, errors.New("integers of more than 64 bits are compared, which is not known here")
	}
	if oka && okb {
		if wa && wb {
			return ia == ib, nil
		}
		if wa != wb && (math.Abs(fa) > exact || math.Abs(fb) > exact) {
			return false, errors.New("a float is compared with a large integer, which is not known here")
		}
		return fa == fb, nil
	}
	switch a := a.(type) {
	case nil:
		return b == nil, nil
	case undefined:
		_, is := b.(undefined)
		return is, nil
	case string:
		s, is := b.(string)
		if !is {
			return false, nil
		}
		return r.same(a, s)
	case *list:
		l, is := b.(*list)
		if !is {
			return false, nil
		}
		if a.form > aTuple || l.form > aTuple {
			return false, errors.New("what filters return is compared, which is not known here")
		}
		if a.form != l.form || len(a.items) != len(l.items) {
			return false, nil
		}
		for i := range a.items {
			if same, err := r.equal(a.items[i], l.items[i], depth+1); !same || err != nil {
				return false, err
			}
		}
		return true, nil
	case *Dict:
		d, is := b.(*Dict)
		if !is || len(a.keys) != len(d.keys) {
			return false, nil
		}
		for _, k := range a.keys {
			v, has, err := r.get(d, k)
			if !has || err != nil {
				return false, err
			}
			if same, err := r.equal(a.of[k], v, depth+1); !same || err != nil {
				return false, err
			}
		}
		return true, nil
	case *namespace:
		return any(a) == b, nil
	}
	if oka || okb {
		return false, nil
	}
	switch b.(type) {
	case nil, undefined, string, *list, *Dict, *namespace:
		return false, nil
	}
	return false, errors.New("functions are compared, which is not known here")
}

func isBig(v any) bool { _, is := v.(big); return is }

// order is whether a is before, at or behind b.
func (r *run) order(a, b any) (int, error) {
	fa, ia, wa, oka := numeric(a)
	fb, ib, wb, okb := numeric(b)
	sa, isA := a.(string)
	sb, isB := b.(string)
	switch {
	case isA && isB:
		return r.before(sa, sb)
	case oka && okb && wa && wb:
		return compare(ia, ib), nil
	case oka && okb && math.Abs(fa) <= exact && math.Abs(fb) <= exact:
		return compare(fa, fb), nil
	}
	return 0, fmt.Errorf("%s cannot be ordered with %s", what(a), what(b))
}

func compare[T int64 | float64](a, b T) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// length is Python's len.
func (r *run) length(v any) (int, error) {
	switch v := v.(type) {
	case undefined:
		return 0, nil
	case string:
		return r.codePoints(v)
	case *Dict:
		return len(v.keys), nil
	case *list:
		if v.form != generator {
			return len(v.items), nil
		}
	}
	return 0, fmt.Errorf("%s has no length", what(v))
}

// iterate returns what a loop over a value goes through.
func (r *run) iterate(v any) ([]any, error) {
	switch v := v.(type) {
	case undefined:
		return nil, nil
	case string:
		return r.letters(v)
	case *Dict:
		if err := r.made(2 * itemBytes * len(v.keys)); err != nil {
			return nil, err
		}
		items := make([]any, len(v.keys))
		for i, k := range v.keys {
			items[i] = k
		}
		return items, nil
	case *list:
		items := v.items
		if v.form == generator {
			v.items = nil
		}
		return items, nil
	}
	return nil, fmt.Errorf("%s cannot be gone through", what(v))
}

// contains is Python's in.
func (r *run) contains(v, item any) (bool, error) {
	switch v := v.(type) {
	case undefined:
		return false, nil
	case string:
		s, is := item.(string)
		if !is {
			return false, fmt.Errorf("%s cannot be in a str", what(item))
		}
		i, err := r.index(v, s)
		return i >= 0, err
	case *Dict:
		switch k := item.(type) {
		case string:
			_, has, err := r.get(v, k)
			return has, err
		case *list, *Dict:
			return false, fmt.Errorf("%s cannot be a key", what(item))
		}
		return false, nil
	case *list:
		if v.form == generator {
			break
		}
		for _, x := range v.items {
			if same, err := r.equal(x, item, 0); same || err != nil {
				return same, err
			}
		}
		return false, nil
	}
	return false, fmt.Errorf("nothing can be in %s", what(v))
}

// part is Python's v[from:to:step]; nil is what is not given.
func (r *run) part(v any, from, to, step any) (any, error) {
	n := 0
	text, isText := v.(string)
	l, isList := v.(*list)
	switch {
	case isText:
		var err error
		if n, err = r.codePoints(text); err != nil {
			return nil, err
		}
	case isList && l.form <= aTuple:
		n = len(l.items)
	case v == nil:
		return undefined{"a slice"}, nil
	default:
		return nil, fmt.Errorf("%s is cut, which is not known here", what(v))
	}
	by, err := place(step, 1)
	if err != nil || by == 0 {
		return nil, errors.Join(err, errors.New("a slice's step cannot be 0"))
	}
	low, high := 0, n
	if by < 0 {
		low, high = -1, n-1
	}
	clamp := func(v any, unset int) (int, error) {
		i, err := place(v, unset)
		if v != nil && i < 0 {
			i += n
		}
		return min(max(i, low), high), err
	}
	begin, end := low, high
	if by < 0 {
		begin, end = high, low
	}
	at, err := clamp(from, begin)
	if err != nil {
		return nil, err
	}
	until, err := clamp(to, end)
	if err != nil {
		return nil, err
	}
	switch {
	case isText && by == 1:
		return r.section(text, at, until)
	case isText:
		return r.every(text, n, at, until, by)
	}
	count := 0
	if by > 0 && at < until || by < 0 && at > until {
		count = (until-at)/by + 1
	}
	if err := r.made(itemBytes * count); err != nil {
		return nil, err
	}
	cut := make([]any, 0, count)
	for ; by > 0 && at < until || by < 0 && at > until; at += by {
		cut = append(cut, l.items[at])
	}
	return &list{l.form, cut}, nil
}

// section returns a part of a text by the places of its code points.
func (r *run) section(text string, at, until int) (any, error) {
	from, err := r.offset(text, at)
	if err != nil {
		return nil, err
	}
	text = text[from:]
	to, err := r.offset(text, max(until-at, 0))
	return text[:to], err
}

// get returns the value of a key. It counts the bytes of the key, which are hashed.
func (r *run) get(d *Dict, key string) (v any, has bool, err error) {
	v, has = d.of[key]
	return v, has, r.spend(len(key))
}

// place is an index; nil is one that is not given.
func place(v any, unset int) (int, error) {
	if v == nil {
		return unset, nil
	}
	_, i, whole, ok := numeric(v)
	if !ok || !whole {
		return 0, fmt.Errorf("%s is no place", what(v))
	}
	return int(min(max(i, -math.MaxInt32), math.MaxInt32)), nil
}

// item is what Jinja2 makes of v[key].
func (r *run) item(v, key any) (any, error) {
	name, isName := key.(string)
	switch v := v.(type) {
	case undefined:
		return nil, fmt.Errorf("%s has no items", what(v))
	case *Dict:
		if x, has, err := r.get(v, name); isName && has || err != nil {
			return x, err
		}
	case string, *list:
		_, i, whole, ok := numeric(key)
		l, isList := v.(*list)
		if !ok || !whole || isList && l.form > aTuple {
			break
		}
		if text, is := v.(string); is {
			if letter, has, err := r.letter(text, i); has || err != nil {
				return letter, err
			}
			break
		}
		if n := int64(len(l.items)); i >= -n && i < n {
			return l.items[(i+n)%n], nil
		}
	}
	if isName {
		return r.attribute(v, name, true)
	}
	name, err := str(key)
	if err != nil {
		name = what(key)
	}
	return undefined{name}, nil
}

// attribute returns what Jinja2 makes of v.name, or of v[name] if the value has no such item.
func (r *run) attribute(v any, name string, noItem bool) (any, error) {
	if err := r.spend(len(name)); err != nil {
		return nil, err
	}
	if name != "" && name[0] == '_' {
		return nil, fmt.Errorf("the attribute %.40q is not known here", name)
	}
	switch v := v.(type) {
	case undefined:
		return nil, fmt.Errorf("%s has no attributes", what(v))
	case *loop:
		return v.attr(name)
	case *namespace:
		if x, has := v.of[name]; has {
			return x, nil
		}
	case *Dict:
		if slices.Contains(dictMethods, name) {
			return method{v, name}, nil
		}
		if x, has := v.of[name]; has && !noItem {
			return x, nil
		}
	case string:
		if slices.Contains(strMethods, name) {
			return method{v, name}, nil
		}
	case *list:
		if slices.Contains(listMethods, name) {
			return method{v, name}, nil
		}
	case bool, int64, float64, big:
		if slices.Contains(numberMethods, name) {
			return method{v, name}, nil
		}
	case nil, method:
	default:
		return nil, fmt.Errorf("attributes of %s are not known here", what(v))
	}
	return undefined{name}, nil
}
