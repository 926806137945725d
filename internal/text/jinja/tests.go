package jinja

import (
	"errors"
	"fmt"
)

// test evaluates one of [testNames].
func (r *run) test(name string, v any, pos []any, kw []argument) (any, error) {
	is, err := r.invoke(testNames[name], v, pos, kw)
	if err == nil && len(kw) > 0 {
		err = errors.New("named arguments are not supported")
	}
	if err != nil {
		return nil, fmt.Errorf("test %s: %w", name, err)
	}
	return is, nil
}

// kindTest returns a test without arguments.
func kindTest(is func(v any) bool) builtin {
	return counted(func(_ *run, v any, pos []any, _ []argument) (any, error) {
		if len(pos) > 0 {
			return false, errors.New("the test has no arguments")
		}
		return is(v), nil
	})
}

// withOther returns a test with one argument.
func withOther(is func(r *run, v, other any) (bool, error)) builtin {
	return counted(func(r *run, v any, pos []any, _ []argument) (any, error) {
		if len(pos) != 1 {
			return false, errors.New("the test requires one argument")
		}
		return is(r, v, pos[0])
	})
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

func same(r *run, v, other any) (bool, error) { return r.equal(v, other, 0) }

func different(r *run, v, other any) (bool, error) {
	is, err := r.equal(v, other, 0)
	return !is, err
}

var testNames = map[string]builtin{
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
	"in":   withOther(func(r *run, v, other any) (bool, error) { return r.contains(other, v) }),
	"odd":  kindTest(func(v any) bool { i, is := v.(int64); return is && i%2 != 0 }),
	"even": kindTest(func(v any) bool { i, is := v.(int64); return is && i%2 == 0 }),
}
