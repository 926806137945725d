package jinja

import (
	"errors"
	"fmt"
	"strconv"
)

// taking returns a filter with the given parameters. do receives the value and the arguments in the order of the
// parameters.
func taking(do func(r *run, v any, vals []any) (any, error), params ...string) builtin {
	return builtin{do: func(r *run, v any, pos []any, kw []argument) (any, error) {
		vals, err := bind(pos, kw, params...)
		if err != nil {
			return nil, err
		}
		return do(r, v, vals)
	}}
}

// onText returns a filter from a function of the value's text.
func onText(do func(r *run, text string) (any, error)) builtin {
	return taking(func(r *run, v any, _ []any) (any, error) {
		text, err := plain(v)
		if err != nil {
			return nil, err
		}
		return do(r, text)
	})
}

// plain is str for values that are not safe. Jinja2 keeps safe texts, and filters of safe texts escape.
func plain(v any) (string, error) {
	if _, is := v.(markup); is {
		return "", errors.New("changing a text of the filter safe is not supported")
	}
	return str(v)
}

// plains applies plain to every value.
func plains(list []any) (texts []string, err error) {
	texts = make([]string, len(list))
	for i, v := range list {
		if texts[i], err = plain(v); err != nil {
			return nil, err
		}
	}
	return texts, nil
}

var filterNames map[string]builtin

func init() { // an init function, because filters such as select refer to the tables
	filterNames = map[string]builtin{
		"trim":   counts(taking(trimFilter, "chars")),
		"upper":  onText((*run).upper),
		"lower":  onText((*run).lower),
		"string": onText((*run).text),
		"safe": counts(taking(func(_ *run, v any, _ []any) (any, error) {
			text, err := str(v)
			return markup(text), err
		})),
		"length": counts(taking(lengthFilter)), "count": counts(taking(lengthFilter)),
		"tojson":  {do: (*run).toJSON},
		"default": counts(taking(defaultFilter, "default_value", "boolean")),
		"d":       counts(taking(defaultFilter, "default_value", "boolean")),
		"replace": taking(replaceFilter, "old", "new", "count"),
		"join":    taking(joinFilter, "d", "attribute"),
		"first":   counts(taking(firstFilter)),
		"last":    counts(taking(lastFilter)),
		"list":    counts(taking(listFilter)),
		"items":   counts(taking(itemsFilter)),
		"map":     counted(mapFilter),
		"select":  choose(false, true), "reject": choose(false, false),
		"selectattr": choose(true, true), "rejectattr": choose(true, false),
	}
}

func trimFilter(r *run, v any, vals []any) (any, error) {
	text, err := plain(v)
	if err != nil {
		return nil, err
	}
	return r.strip(text, vals[0], true, true)
}

func replaceFilter(r *run, v any, vals []any) (any, error) {
	if _, is := vals[2].(missing); !is && vals[2] != nil {
		return nil, errors.New("a count is not supported")
	}
	texts, err := plains([]any{v, vals[0], vals[1]})
	if err != nil {
		return nil, err
	}
	return r.replace(texts[0], texts[1], texts[2])
}

func joinFilter(r *run, v any, vals []any) (any, error) {
	if _, is := vals[1].(missing); !is {
		return nil, errors.New("an attribute is not supported")
	}
	between, err := "", error(nil)
	if _, is := vals[0].(missing); !is {
		if between, err = plain(vals[0]); err != nil {
			return nil, err
		}
	}
	items, err := r.iterate(v)
	if err != nil {
		return nil, err
	}
	return r.join(items, between, plain)
}

func firstFilter(r *run, v any, _ []any) (any, error) {
	items, err := r.iterate(v)
	if err != nil || len(items) == 0 {
		return undefined{"the first item"}, err
	}
	if l, is := v.(*list); is && l.form == generator {
		l.items = items[1:] // the generator keeps the remaining items
	}
	return items[0], nil
}

func lastFilter(r *run, v any, _ []any) (any, error) {
	if l, is := v.(*list); is && l.form == generator {
		return nil, errors.New("the result of a filter cannot be reversed")
	}
	items, err := r.iterate(v)
	if err != nil || len(items) == 0 {
		return undefined{"the last item"}, err
	}
	return items[len(items)-1], nil
}

func listFilter(r *run, v any, _ []any) (any, error) {
	items, err := r.iterate(v)
	if err != nil {
		return nil, err
	}
	return &list{aList, items}, nil
}

func itemsFilter(r *run, v any, _ []any) (any, error) {
	switch v := v.(type) {
	case undefined:
		return &list{form: generator}, nil
	case *Dict:
		items, err := r.pairs(v)
		return &list{generator, items}, err
	}
	return nil, fmt.Errorf("%s has no items", typeName(v))
}

// counts marks a builtin that counts its own work.
func counts(b builtin) builtin {
	b.counts = true
	return b
}

func lengthFilter(r *run, v any, _ []any) (any, error) {
	n, err := r.length(v)
	return int64(n), err
}

func defaultFilter(_ *run, v any, vals []any) (any, error) {
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

func (r *run) pairs(d *Dict) ([]any, error) {
	if err := r.made(6 * itemBytes * len(d.keys)); err != nil {
		return nil, err
	}
	items := make([]any, len(d.keys))
	for i, k := range d.keys {
		items[i] = &list{aTuple, []any{k, d.of[k]}}
	}
	return items, nil
}

// path returns v.a.b for the name "a.b", as in the attribute arguments of filters.
func (r *run) path(v any, name any) (any, error) {
	text, is := name.(string)
	if !is {
		return nil, fmt.Errorf("%s as the name of an attribute is not supported", typeName(name))
	}
	err := r.split(text, ".", -1, func(part string) (err error) {
		var key any = part
		if i, err := strconv.ParseInt(part, 10, 64); err == nil && i >= 0 {
			key = i
		}
		if err = r.step(); err == nil {
			v, err = r.item(v, key)
		}
		return err
	})
	return v, err
}

func mapFilter(r *run, v any, pos []any, kw []argument) (any, error) {
	each := func(v any) (any, error) { return r.path(v, kw[0].val) }
	if len(pos) > 0 {
		name, _ := pos[0].(string)
		if !known(filterNames, name) {
			return nil, fmt.Errorf("the filter %.40q is not supported", name)
		}
		each = func(v any) (any, error) { return r.invoke(filterNames[name], v, pos[1:], kw) }
	} else if len(kw) != 1 || kw[0].name != "attribute" {
		return nil, errors.New("map requires the name of a filter, or an attribute")
	}
	items, err := r.iterate(v)
	if err != nil {
		return nil, err
	}
	if err := r.made(itemBytes * len(items)); err != nil {
		return nil, err
	}
	made := &list{generator, make([]any, len(items))}
	for i, v := range items {
		if err := r.step(); err != nil {
			return nil, err
		}
		if made.items[i], err = each(v); err != nil {
			return nil, err
		}
	}
	return made, nil
}

// choose returns the filters select, reject, selectattr and rejectattr.
func choose(attribute, keep bool) builtin {
	return counted(func(r *run, v any, pos []any, kw []argument) (any, error) {
		of := func(v any) (any, error) { return v, nil }
		if attribute {
			if len(pos) == 0 {
				return nil, errors.New("the name of an attribute is required")
			}
			name := pos[0]
			of = func(v any) (any, error) { return r.path(v, name) }
			pos = pos[1:]
		}
		is := func(v any) (any, error) { return truth(v), nil }
		if len(pos) > 0 {
			name, _ := pos[0].(string)
			if !known(testNames, name) {
				return nil, fmt.Errorf("the test %.40q is not supported", name)
			}
			is = func(v any) (any, error) { return r.test(name, v, pos[1:], kw) }
		}
		items, err := r.iterate(v)
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
				if err := r.made(itemBytes); err != nil {
					return nil, err
				}
				kept.items = append(kept.items, v)
			}
		}
		return kept, nil
	})
}
