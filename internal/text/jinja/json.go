package jinja

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"unicode/utf16"
)

// maxIndent bounds the spaces of tojson before each level.
const maxIndent = 64

// toJSON is the filter tojson, Python's json.dumps.
func (r *run) toJSON(v any, pos []any, kw []argument) (any, error) {
	vals, err := bind(pos, kw, "ensure_ascii", "indent", "separators", "sort_keys")
	if err != nil {
		return nil, err
	}
	given := func(i int) bool { _, is := vals[i].(missing); return !is && vals[i] != nil }
	w := &writer{buffer: buffer{run: r}, indent: -1, item: ", ", key: ": "}
	w.ascii = given(0) && truth(vals[0])
	w.sort = given(3) && truth(vals[3])
	if given(1) {
		n, is := vals[1].(int64)
		if !is || n < 0 || n > maxIndent {
			return nil, fmt.Errorf("%s as an indent is not supported", typeName(vals[1]))
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
	return w.String(), nil
}

// writer writes JSON as Python does.
type writer struct {
	buffer
	ascii     bool
	sort      bool
	indent    int // negative: a single line
	item, key string
}

func (w *writer) write(v any, depth int) error {
	if err := w.run.step(); err != nil {
		return err
	}
	if depth > maxDepth {
		return ErrTooMuch
	}
	switch v := v.(type) {
	case nil:
		return w.add("null")
	case bool:
		return w.add(strconv.FormatBool(v))
	case int64, big:
		text, _ := str(v)
		return w.add(text)
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return errors.New("a number is not finite")
		}
		return w.add(floatText(v))
	case string:
		return w.quote(v)
	case *list:
		if v.form > aTuple {
			return errors.New("a view or generator has no JSON form")
		}
		return w.collection("[", "]", len(v.items), depth, func(i int) error { return w.write(v.items[i], depth+1) })
	case *Dict:
		keys := v.keys
		if w.sort {
			var err error
			if keys, err = w.run.sorted(keys); err != nil {
				return err
			}
		}
		return w.collection("{", "}", len(keys), depth, func(i int) error {
			if err := w.quote(keys[i]); err != nil {
				return err
			}
			if err := w.add(w.key); err != nil {
				return err
			}
			x, _, err := w.run.get(v, keys[i])
			if err != nil {
				return err
			}
			return w.write(x, depth+1)
		})
	}
	return fmt.Errorf("%s has no JSON form", typeName(v))
}

func (w *writer) collection(opening, closing string, n, depth int, write func(i int) error) error {
	line := func(depth int) error {
		if w.indent < 0 || n == 0 {
			return nil
		}
		return w.add("\n" + spaces[:w.indent*depth])
	}
	if err := w.add(opening); err != nil {
		return err
	}
	for i := range n {
		if i > 0 {
			if err := w.add(w.item); err != nil {
				return err
			}
		}
		if err := line(depth + 1); err != nil {
			return err
		}
		if err := write(i); err != nil {
			return err
		}
	}
	if err := line(depth); err != nil {
		return err
	}
	return w.add(closing)
}

func (w *writer) quote(s string) error {
	if err := w.add(`"`); err != nil {
		return err
	}
	if err := w.addMapped(s, w.escape); err != nil {
		return err
	}
	return w.add(`"`)
}

// escape returns the escape sequence of a code point; empty without an escape.
func (w *writer) escape(c rune) string {
	switch {
	case c >= ' ' && c != '"' && c != '\\' && (!w.ascii || c <= '~'):
		return ""
	case c > 0xffff:
		high, low := utf16.EncodeRune(c)
		return escapeUnit(high) + escapeUnit(low)
	}
	switch c {
	case '"', '\\':
		return `\` + string(c)
	case '\n':
		return `\n`
	case '\r':
		return `\r`
	case '\t':
		return `\t`
	case '\b':
		return `\b`
	case '\f':
		return `\f`
	}
	return escapeUnit(c)
}

func escapeUnit(unit rune) string {
	const digits = "0123456789abcdef"
	return string([]byte{'\\', 'u', digits[unit>>12&15], digits[unit>>8&15], digits[unit>>4&15], digits[unit&15]})
}
