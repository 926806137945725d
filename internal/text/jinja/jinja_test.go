package jinja

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// at is the time at which testdata/cases.json was generated.
var at = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func decodeVars(t *testing.T, data []byte) Vars {
	t.Helper()
	v, err := Decode(t.Context(), data)
	if err != nil {
		t.Fatal(err)
	}
	d := v.(*Dict)
	vars := Vars{}
	for _, k := range d.Keys() {
		vars[k], _ = d.Get(k)
	}
	return vars
}

// TestCases compares with the output of Jinja2. Templates that fail in Jinja2 fail here too, with other texts.
func TestCases(t *testing.T) {
	data, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Vars  json.RawMessage
		Cases []struct{ Template, Text, Error string }
	}
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	vars := decodeVars(t, file.Vars)
	for _, c := range file.Cases {
		got, err := render(t.Context(), c.Template, vars)
		switch {
		case (err != nil) != (c.Error != ""):
			t.Errorf("%q: %v, and in Jinja2 %q", c.Template, err, c.Error)
		case got != c.Text:
			t.Errorf("%q:\n%q, not\n%q", c.Template, got, c.Text)
		}
	}
}

func render(ctx context.Context, template string, vars Vars) (string, error) {
	tpl, err := Parse(ctx, template)
	if err != nil {
		return "", err
	}
	return tpl.RenderAt(ctx, vars, at)
}

// TestRefused covers templates that Jinja2 renders and this package refuses, to avoid a different result.
func TestRefused(t *testing.T) {
	for _, c := range [][2]string{
		{"{% include 'x' %}", `the statement "include" is not supported`},
		{"{% import 'x' as y %}", `the statement "import" is not supported`},
		{"{% extends 'x' %}", "extends"},
		{"{% block a %}{% endblock %}", "block"},
		{"{% raw %}{{ x }}{% endraw %}", "raw blocks"},
		{"{% call m() %}{% endcall %}", "call"},
		{"a\n{{ x|escape }}", `line 2: the filter "escape" is not supported`},
		{"{{ x is divisibleby 3 }}", `the test "divisibleby"`},
		{"{{ lipsum() }}", `"lipsum"`},
		{"{{ dict(a=1) }}", `"dict"`},
		{"{{ 2 ** 3 }}", ""},
		{"{{ 1e5 }}", "the number"},
		{"{{ [1] }}", "the text of a list"},
		{"{{ d.items }}", "the text of an object"},
		{"{{ none|items }}", "None has no items"},
		{"{{ (l|select)|last }}", "cannot be reversed"},
		{"{{ d }}", "the text of a dict"},
		{"{{ 'é'.upper() }}", "non-ASCII letters"},
		{"{{ s.title() }}", "title: the method"},
		{"{{ s.format(1) }}", "format: the method"},
		{"{{ s.__class__ }}", "__class__"},
		{"{{ s|attr('x') }}", "attr"},
		{"{{ big == 1 }}", "more than 64 bits"},
		{"{{ 4611686018427387904 * 2 }}", "not supported"},
		{"{{ ('<a>'|safe) + '<b>' }}", "an object + a str"},
		{"{{ strftime_now('%c') }}", "strftime_now"},
		{"{% for x in l recursive %}{% endfor %}", ""},
		{"{% for x in l %}", "endfor is missing"},
		{"{% if b %}x", "endif is missing"},
		{"{{ 'x }}", "a string does not end"},
		{"{{ x", "a tag does not end"},
		{"{# x", "a comment does not end"},
		{"{% endif %}", `the statement "endif"`},
		{"{% break %}", "is outside of a loop"},
		{"{{ (1 }}", ""},
		{"{{ 1 ) }}", "has no opening tag"},
		{"\xff", "not UTF-8"},
		{strings.Repeat("{% if b %}", 200), "nesting is deeper than"},
		{"{{ " + strings.Repeat("(", 200) + "1" + strings.Repeat(")", 200) + " }}",
			"nesting is deeper than"},
		{"\n{% macro m() %}{{ m()" + strings.Repeat("+1", 100000) + " }}{% endmacro %}{{ m() }}",
			"line 2: more than 1000 operators, filters or calls"},
		{"{% macro m(" + strings.Repeat("x,", 1000) + "x) %}{% endmacro %}", "more than 1000 parameters"},
		{"{{ namespace(" + numbered("x%d=1,", 1001) + ") }}", "more than 1000 named arguments"},
	} {
		template, want := c[0], c[1]
		vars := Vars{"s": "x", "d": NewDict(), "big": big("99999999999999999999"), "l": List(), "b": true}
		if text, err := render(t.Context(), template, vars); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: %q, %v", template, text, err)
		}
	}
	if _, err := Parse(t.Context(), strings.Repeat("x", MaxTemplate+1)); err == nil {
		t.Error("a large template is accepted")
	}
}

// numbered repeats a text with a running number.
func numbered(format string, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, format, i)
	}
	return b.String()
}

// TestLoopsOver covers the paths of a value into a loop.
func TestLoopsOver(t *testing.T) {
	for template, want := range map[string]bool{
		"{% for p in m.content %}{% endfor %}":                                                   true,
		"{% for p in m['content'] %}{% endfor %}":                                                true,
		"{% for p in m|map(attribute='content') %}{% endfor %}":                                  true,
		"{% for p in m.role %}{{ m.content }}{% endfor %}":                                       false,
		"{% for p in b %}{% endfor %}{% set b = a %}{% set a = m.content %}":                     true,
		"{% set a, b = m.content, 1 %}{% for p in b %}{% endfor %}":                              true,
		"{% set ns.x = m.content %}{% for p in ns.x %}{% endfor %}":                              true,
		"{% set ns.x = m.content %}{% for p in ns.y %}{% endfor %}":                              false,
		"{% for x in [m.content] %}{% for p in x %}{% endfor %}{% endfor %}":                     true,
		"{% macro f(a, b) %}{% for p in b %}{% endfor %}{% endmacro %}{{ f(b=m.content|trim) }}": true,
		"{% macro f(a) %}{{ g(a) }}{% endmacro %}{% macro g(b) %}{% for p in b %}{% endfor %}{% endmacro %}" +
			"{{ f(m.content) }}": true,
		"{% macro f(a) %}{{ a }}{% endmacro %}{% macro g(b) %}{% for p in b %}{% endfor %}{% endmacro %}" +
			"{{ f(m.content) }}": false,
	} {
		tpl, err := Parse(t.Context(), template)
		if err != nil {
			t.Fatal(err)
		}
		if got := tpl.LoopsOver("content"); got != want {
			t.Errorf("%s: %v", template, got)
		}
	}
}

// TestLarge parses templates near the size limit. A quadratic algorithm would need minutes.
func TestLarge(t *testing.T) {
	testkit.Sequential(t)
	var chain strings.Builder // from the end to the beginning
	for i := 35000; i > 0; i-- {
		fmt.Fprintf(&chain, "{%% set a%d = a%d %%}\n", i, i-1)
	}
	done := make(chan bool)
	go func() {
		defer close(done)
		for template, reads := range map[string]int{
			chain.String():               1,
			numbered("{{ a%d }}", 80000): 80000,
			"{% macro f(a) %}{% endmacro %}" + strings.Repeat("{{ f(a0) }}", 80000): 1,
		} {
			tpl, err := Parse(t.Context(), template)
			if err != nil {
				t.Error(err)
				continue
			}
			if got := len(tpl.Reads()); got < reads {
				t.Errorf("%.40s: Reads returns %d names, want %d", template, got, reads)
			}
			if tpl.LoopsOver("a0") {
				t.Errorf("%.40s has no loop", template)
			}
		}
		_, err := Parse(t.Context(), chain.String()+"{{ ? }}")
		if err == nil || !strings.HasPrefix(err.Error(), "line 35001:") {
			t.Error(err)
		}
	}()
	select {
	case <-done:
	case <-time.After(2 * time.Minute):
		t.Fatal("it takes minutes")
	}
}

// TestBounds covers templates with endless work, or with more output than memory.
func TestBounds(t *testing.T) {
	testkit.Sequential(t)
	long, keys := strings.Repeat("a", 1<<20), NewDict()
	for i := range 1000 {
		keys.Set(fmt.Sprint(i), "x")
	}
	vars := Vars{"s": long, "same": strings.Repeat("a", 1<<20), "d": keys, "l": List(make([]any, 1000)...)}
	again := func(what string) string {
		return "{% for i in range(9999) %}{% set x = " + what + " %}{% endfor %}"
	}
	nested := func(n int, what, compare string) string {
		return fmt.Sprintf("{%% set a = namespace(x=1) %%}{%% set b = namespace(x=1) %%}{%% for i in range(%d) %%}"+
			"{%% set a.x = %s %%}{%% set b.x = %s %%}{%% endfor %%}{{ %s }}", n, strings.ReplaceAll(what, "x", "a.x"),
			strings.ReplaceAll(what, "x", "b.x"), compare)
	}
	nine, often := "{% for a in range(99999) %}", "{% for i in range(99) %}"
	for _, template := range []string{
		strings.Repeat(nine, 4) + strings.Repeat("{% endfor %}", 4),
		"{% set ns = namespace(x='0123456789abcdef') %}" + often + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
		"{% set ns = namespace(x='0123456789abcdef') %}" + often + "{% set ns.x = ns.x.replace('0', ns.x) %}{% endfor %}",
		"{% set ns = namespace(x=[1]) %}" + often + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
		"{% set ns = namespace(x=[1]) %}" + often + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
		"{{ 'x' * 999999999 }}",
		"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",

		nested(24, "[x, x]", "a.x == b.x"), nested(24, "{'k': x, 'l': x}", "a.x in [b.x]"),
		nested(24, "(x, x)", "a.x is eq b.x"), nested(300, "[x]", "a.x != b.x"),
		"{{ range(99999)|join('x' * 15000) }}", "{{ s" + strings.Repeat("~s", 700) + " }}",
		again("d.items()"), again("d|items"), again("d.keys()"), again("d.values()"), again("d|map('trim')"),
		again("l[1:]"), again("range(1000)"), again("s[9:2:-1]"),
		"{% for i in range(99) %}{% for c in s %}{% break %}{% endfor %}{% endfor %}",
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if text, err := render(t.Context(), template, vars); !errors.Is(err, ErrTooMuch) {
			t.Errorf("%.80q: %d bytes, %v", template, len(text), err)
		}
		runtime.ReadMemStats(&after)
		if made := after.TotalAlloc - before.TotalAlloc; made > 1<<30 {
			t.Errorf("%.80q allocated %d MiB", template, made>>20)
		}
	}
	for _, what := range []string{"s == same", "s <= same", "'b' in s", "s|length", "s.find('b')", "s[:99999]",
		"s is eq same", "s in [same]", "s[9999:][-999999]", "s.startswith((same, ''))"} {
		tpl, err := Parse(t.Context(), "{{ "+what+" }}")
		if err != nil {
			t.Fatal(err)
		}
		r := &run{ctx: t.Context()}
		if _, err := r.exec(tpl.root, &scope{vars: vars}, &buffer{run: r}); err != nil || r.work < int64(len(long))/2 {
			t.Errorf("%s: work %d, %v", what, r.work, err)
		}
	}
	if text, err := render(t.Context(), "{% for i in range(999) %}{{ s[0] }}{{ s[-1] }}{% endfor %}", vars); err != nil ||
		text != strings.Repeat("aa", 999) {
		t.Errorf("%d bytes, %v", len(text), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := render(ctx, nine+nine+"{% endfor %}{% endfor %}", nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestDecode(t *testing.T) {
	for text, want := range map[string]string{
		`{"b":1,"a":[1.0,-0,1E3,123456789012345678901],"b":"é\u0000"}`: `{"b": "é\u0000", ` +
			`"a": [1.0, 0, 1000.0, 123456789012345678901]}`,
		`null`: "null",
	} {
		v, err := Decode(t.Context(), []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := render(t.Context(), "{{ v|tojson }}", Vars{"v": v}); got != want || err != nil {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
	deep := strings.Repeat("[", 1000) + strings.Repeat("]", 1000)
	for _, text := range []string{"", "{", `{"a":}`, "1 2", "1e999", deep} {
		if v, err := Decode(t.Context(), []byte(text)); err == nil {
			t.Errorf("%.20q: %v", text, v)
		}
	}
}

// FuzzRender finds panics. It also finds uncounted work: the bounds hold, and checks of the context are frequent in
// work and time. The variable large is 1 MiB of the variable s.
func FuzzRender(f *testing.F) {
	data, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		f.Fatal(err)
	}
	var file struct{ Cases []struct{ Template string } }
	if err := json.Unmarshal(data, &file); err != nil {
		f.Fatal(err)
	}
	for _, c := range file.Cases {
		f.Add(c.Template, `{"messages":[{"role":"user","content":"x"}],"l":[1,2],"s":"abc"}`)
	}
	for _, template := range []string{"{{ range(5000)|map('trim', large)|list }}",
		"{{ large[::-1]|tojson(ensure_ascii=true) }}",
		"{{ large.split(s)|join(large) }}", "{% for i in range(9999) %}{{ large|replace(s, large) }}{% endfor %}",
		"{{ strftime_now(large) }}", "{{ (large ~ 'x') in large ~ large }}"} {
		f.Add(template, `{"s":"\u4e00%A%%"}`)
	}
	f.Fuzz(func(t *testing.T, template, vars string) {
		tpl, err := Parse(t.Context(), template)
		if err != nil {
			return
		}
		v, err := Decode(t.Context(), []byte(vars))
		d, is := v.(*Dict)
		if err != nil || !is {
			return
		}
		if s, is := d.of["s"].(string); is && s != "" {
			d.Set("large", strings.Repeat(s, max(1, 1<<20/len(s))))
		}
		r, p := paced(t.Context(), enough)
		if _, err := r.render(tpl, d.of); err != nil && strings.Contains(err.Error(), "template failed") {
			t.Error(err)
		}
		_ = p.Err()
		if p.longest > patience || p.gap > MaxOutput+2*checkWork || r.work > maxWork+MaxOutput || p.checks > enough+2 {
			t.Errorf("%v and work %d between two of %d checks, work %d", p.longest, p.gap, p.checks, r.work)
		}
	})
}
