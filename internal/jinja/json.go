package jinja

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
)

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
