package jinja

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// undefined is the value of a missing name or key.
type undefined struct{ name string }

// big is the decimal text of an integer beyond int64.
type big string

// markup is the result of the filter safe: a text for printing only.
type markup string

// form is the kind of a list in Python.
type form uint8

const (
	aList     form = iota
	aTuple         // a tuple, or a range
	aView          // a view of a dictionary: it has a length and no indexes
	generator      // has no length, and supports one iteration
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

// NewDict returns an empty dictionary.
func NewDict() *Dict { return &Dict{of: map[string]any{}} }

// Get returns the value of a key.
func (d *Dict) Get(key string) (any, bool) { v, ok := d.of[key]; return v, ok }

// Keys returns the keys in order. The slice must not be modified.
func (d *Dict) Keys() []string { return d.keys }

// Set sets the value of a key: a nil, bool, int64, float64, string, *Dict or a result of [List].
func (d *Dict) Set(key string, v any) {
	if _, ok := d.of[key]; !ok {
		d.keys = append(d.keys, key)
	}
	d.of[key] = v
}

// List returns a list of values.
func List(items ...any) any { return &list{aList, items} }

// Items returns the items of a list from [Decode] or [List].
func Items(v any) ([]any, bool) {
	if l, ok := v.(*list); ok {
		return l.items, true
	}
	return nil, false
}

// namespace is the result of the function namespace.
type namespace struct{ attrs map[string]any }

// method is a bound method of a value.
type method struct {
	of   any
	name string
}

type argument struct {
	name string
	val  any
}

// typeName returns the name of a value's type in Python.
func typeName(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case undefined:
		return fmt.Sprintf("the undefined %.40q", v.name)
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
	return "", fmt.Errorf("the text of %s is not supported", typeName(v))
}

// numeric returns a number as a float, and as an integer if it is integral.
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

// exact is the largest integer up to which floats represent all integers.
const exact = 1 << 53

// equal is Python's == for values at a nesting depth.
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
		return false, errors.New("comparing integers of more than 64 bits is not supported")
	}
	if oka && okb {
		if wa && wb {
			return ia == ib, nil
		}
		if wa != wb && (math.Abs(fa) > exact || math.Abs(fb) > exact) {
			return false, errors.New("comparing a float with a large integer is not supported")
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
		return r.equalLists(a, l, depth)
	case *Dict:
		d, is := b.(*Dict)
		if !is {
			return false, nil
		}
		return r.equalDicts(a, d, depth)
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
	return false, errors.New("comparing functions is not supported")
}

func (r *run) equalLists(a, b *list, depth int) (bool, error) {
	if a.form > aTuple || b.form > aTuple {
		return false, errors.New("comparing results of filters is not supported")
	}
	if a.form != b.form || len(a.items) != len(b.items) {
		return false, nil
	}
	for i := range a.items {
		if same, err := r.equal(a.items[i], b.items[i], depth+1); !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

func (r *run) equalDicts(a, b *Dict, depth int) (bool, error) {
	if len(a.keys) != len(b.keys) {
		return false, nil
	}
	for _, k := range a.keys {
		v, has, err := r.get(b, k)
		if !has || err != nil {
			return false, err
		}
		if same, err := r.equal(a.of[k], v, depth+1); !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

func isBig(v any) bool { _, is := v.(big); return is }

// order returns -1, 0 or 1 if a is less than, equal to or greater than b.
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
	return 0, fmt.Errorf("%s and %s have no order", typeName(a), typeName(b))
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

// length returns the length of a value, as len of Python does.
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
	return 0, fmt.Errorf("%s has no length", typeName(v))
}

// iterate returns the items for a loop over a value.
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
	return nil, fmt.Errorf("%s cannot be iterated", typeName(v))
}

// contains reports whether a value contains another, as the operator in of Python does.
func (r *run) contains(v, item any) (bool, error) {
	switch v := v.(type) {
	case undefined:
		return false, nil
	case string:
		s, is := item.(string)
		if !is {
			return false, fmt.Errorf("%s cannot be in a str", typeName(item))
		}
		i, err := r.index(v, s)
		return i >= 0, err
	case *Dict:
		switch k := item.(type) {
		case string:
			_, has, err := r.get(v, k)
			return has, err
		case *list, *Dict:
			return false, fmt.Errorf("%s cannot be a key", typeName(item))
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
	return false, fmt.Errorf("%s cannot contain values", typeName(v))
}

// part is Python's v[from:to:step]; nil is an omitted part.
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
		return nil, fmt.Errorf("a slice of %s is not supported", typeName(v))
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

// section returns a part of a text, by code point indexes.
func (r *run) section(text string, at, until int) (any, error) {
	from, err := r.offset(text, at)
	if err != nil {
		return nil, err
	}
	text = text[from:]
	to, err := r.offset(text, max(until-at, 0))
	return text[:to], err
}

// get returns the value of a key. It counts the bytes of the key, because the key is hashed.
func (r *run) get(d *Dict, key string) (v any, has bool, err error) {
	v, has = d.of[key]
	return v, has, r.spend(len(key))
}

// place returns an index; nil is an omitted index.
func place(v any, unset int) (int, error) {
	if v == nil {
		return unset, nil
	}
	_, i, whole, ok := numeric(v)
	if !ok || !whole {
		return 0, fmt.Errorf("%s is not an index", typeName(v))
	}
	return int(min(max(i, -math.MaxInt32), math.MaxInt32)), nil
}

// item returns the value of v[key] in Jinja2.
func (r *run) item(v, key any) (any, error) {
	name, isName := key.(string)
	switch v := v.(type) {
	case undefined:
		return nil, fmt.Errorf("%s has no items", typeName(v))
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
		name = typeName(key)
	}
	return undefined{name}, nil
}

// attribute returns the value of v.name in Jinja2, or of v[name] if the value has no such item.
func (r *run) attribute(v any, name string, noItem bool) (any, error) {
	if err := r.spend(len(name)); err != nil {
		return nil, err
	}
	if name != "" && name[0] == '_' {
		return nil, fmt.Errorf("the attribute %.40q is not supported", name)
	}
	switch v := v.(type) {
	case undefined:
		return nil, fmt.Errorf("%s has no attributes", typeName(v))
	case *loop:
		return v.attr(name)
	case *namespace:
		if x, has := v.attrs[name]; has {
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
		return nil, fmt.Errorf("attributes of %s are not supported", typeName(v))
	}
	return undefined{name}, nil
}
