package jinja

import (
	"errors"
	"fmt"
	"math"
)

// globals are the functions that every template may call. A variable may shadow a function.
var globals = map[string]any{
	"raise_exception": counted(func(_ *run, _ any, pos []any, kw []argument) (any, error) {
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
	"namespace": counted(func(r *run, _ any, pos []any, kw []argument) (any, error) {
		if err := r.made(dictBytes + 2*itemBytes*len(kw)); err != nil {
			return nil, err
		}
		ns := &namespace{map[string]any{}}
		if len(pos) > 0 {
			return nil, errors.New("namespace supports only named arguments")
		}
		for _, a := range kw {
			ns.attrs[a.name] = a.val
		}
		return ns, nil
	}),
	"range": counted(func(r *run, _ any, pos []any, kw []argument) (any, error) {
		vals := []int64{0, 0, 1}
		if len(pos) == 0 || len(pos) > 3 || len(kw) > 0 {
			return nil, errors.New("range requires one to three integers")
		}
		for i, v := range pos {
			_, n, whole, ok := numeric(v)
			if !ok || !whole || n > math.MaxInt32 || n < math.MinInt32 {
				return nil, fmt.Errorf("range requires integers, not %s", typeName(v))
			}
			vals[i] = n
		}
		if len(pos) == 1 {
			vals[0], vals[1] = 0, vals[0]
		}
		if vals[2] == 0 {
			return nil, errors.New("range with a step of 0")
		}
		l := &list{form: aTuple}
		for i := vals[0]; vals[2] > 0 && i < vals[1] || vals[2] < 0 && i > vals[1]; i += vals[2] {
			if err := r.made(2 * itemBytes); err != nil {
				return nil, err
			}
			if l.items = append(l.items, i); len(l.items) > 100000 { // the limit of Jinja2's sandbox
				return nil, errors.New("range is too large")
			}
		}
		return l, nil
	}),
	"strftime_now": builtin{do: func(r *run, _ any, pos []any, kw []argument) (any, error) {
		vals, err := bind(pos, kw, "format")
		if err != nil {
			return nil, err
		}
		format, is := vals[0].(string)
		if !is {
			return nil, fmt.Errorf("strftime_now requires a str, not %s", typeName(vals[0]))
		}
		return r.strftime(format)
	}},
}

// layouts are Go's layouts for the directives of strftime.
var layouts = map[byte]string{'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'd': "02", 'm': "01", 'y': "06",
	'Y': "2006", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002"}

func (r *run) strftime(format string) (any, error) {
	out := buffer{run: r}
	from := 0 // start of the text to copy
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			continue
		}
		text := format[from:i]
		i++
		from = i + 1
		switch {
		case i < len(format) && format[i] == '%':
			text += "%"
		case i == len(format) || layouts[format[i]] == "":
			return nil, fmt.Errorf("strftime_now(%.40q) is not supported", format)
		default:
			text += r.now.Format(layouts[format[i]])
		}
		if err := errors.Join(r.step(), out.add(text)); err != nil {
			return nil, err
		}
	}
	err := out.add(format[min(from, len(format)):])
	return out.String(), err
}
