package jinja

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/importer"
	goparser "go/parser"
	gotoken "go/token"
	"go/types"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// TestMain collects garbage less often. The tests make texts of several MiB, and need a third less processor time this
// way.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

// pacer is the context of a rendering. It measures the work and the time between two checks, and is done at a given
// check.
type pacer struct {
	context.Context
	run     *run
	most    int
	checks  int
	work    int64 // at the last check
	gap     int64 // maximum between two checks
	last    time.Time
	longest time.Duration
}

// paced returns a rendering that ends after the given number of checks.
func paced(ctx context.Context, most int) (*run, *pacer) {
	p := &pacer{Context: ctx, most: most, last: time.Now()}
	p.run = &run{ctx: p, now: at}
	return p.run, p
}

func (p *pacer) Err() error {
	now := time.Now()
	p.gap, p.longest = max(p.gap, p.run.work-p.work), max(p.longest, now.Sub(p.last))
	p.work, p.last = p.run.work, now
	if p.checks++; p.checks >= p.most {
		return context.Canceled
	}
	return nil
}

const (
	// patience is a generous bound for the work between two checks, which lasts about 0.1 ms.
	patience = time.Minute

	// enough checks are about 0.1 s of work.
	enough = 500
)

// registered returns all builtins by kind and name.
func registered() map[string]builtin {
	all := map[string]builtin{}
	for kind, of := range map[string]map[string]builtin{"filter": filterNames, "test": testNames, "str": strBuiltins,
		"dict": dictBuiltins} {
		for name, b := range of {
			all[kind+" "+name] = b
		}
	}
	for name, v := range globals {
		all["function "+name] = v.(builtin)
	}
	return all
}

// large is a call of a builtin with large operands.
type large struct {
	v    any
	pos  []any
	kw   []argument
	work int // minimum work of the call
}

const largeBytes = 2 << 20

// largeCalls returns calls of all builtins.
func largeCalls() map[string][]large {
	n := largeBytes
	ascii := strings.Repeat("a", n)
	wide := strings.Repeat("\u4e00\u4e8c\U0001f600\n", n/11)
	blank := strings.Repeat(" ", n)
	short := strings.Repeat("a ", n/32) // lists of its parts stay within the bound
	period := strings.Repeat("a"+strings.Repeat("b", 16), n/17)
	numbers := make([]any, 100_000)
	for i := range numbers {
		numbers[i] = int64(i)
	}
	many, keys, sorted := List(numbers...).(*list), NewDict(), NewDict()
	texts := &list{form: aTuple}
	for i := range 20_000 {
		keys.Set(fmt.Sprintf("%0200d", i), int64(i))
		texts.items = append(texts.items, fmt.Sprintf("%0200d", i))
	}
	for i := range 200_000 {
		sorted.Set(strconv.Itoa(i*7919%200_000), nil)
	}
	chars := []large{{v: ascii}, {v: blank, work: n}, {v: wide, pos: []any{wide}, work: n},
		{v: ascii, pos: []any{"a"}, work: n}, {v: "x", pos: []any{wide}, work: n}}
	search := []large{{v: ascii, pos: []any{"b"}, work: n}, {v: ascii, pos: []any{ascii[1:] + "b"}, work: n},
		{v: wide, pos: []any{"x"}, work: n}, {v: period, pos: []any{period[:n/2] + "c"}, work: n},
		{v: ascii, pos: []any{ascii[:n/2] + "b"}, work: n}}
	kind := []large{{v: ascii}, {v: many}, {v: keys}}
	pick := func(args ...any) []large {
		return []large{{v: many, pos: args, work: len(numbers)}, {v: texts, pos: args, work: len(texts.items)}}
	}
	return map[string][]large{
		"filter trim":  append(chars, large{v: "x", kw: []argument{{"chars", wide}}, work: n}),
		"filter upper": {{v: ascii, work: n}}, "filter lower": {{v: ascii, work: n}, {v: wide, work: n}},
		"filter string": {{v: ascii, work: n}, {v: big(ascii), work: n}}, "filter safe": kind,
		"filter length": {{v: wide, work: n}, {v: many}}, "filter count": {{v: wide, work: n}, {v: keys}},
		"filter tojson": {{v: wide, work: n}, {v: wide, kw: []argument{{"ensure_ascii", true}}, work: 2 * n},
			{v: many, kw: []argument{{"indent", int64(64)}}, work: 64 * len(numbers)},
			{v: &list{items: numbers[:10]}, kw: []argument{{"separators", &list{items: []any{ascii, ascii}}}}, work: 8 * n},
			{v: keys, kw: []argument{{"sort_keys", true}}, work: 220 * len(keys.keys)},
			{v: sorted, kw: []argument{{"sort_keys", true}}, work: 16 * 16 * len(sorted.keys)}},
		"filter default": kind, "filter d": kind,
		"filter replace": {{v: ascii, pos: []any{"a", "b"}, work: n}, {v: ascii, pos: []any{"", ""}, work: n},
			{v: wide, pos: []any{"\n", "x"}, work: n}, {v: period, pos: []any{period[:n/2] + "c", ""}, work: n},
			{v: "x", pos: []any{"x", ascii}, work: n}, {v: ascii, pos: []any{"a", ascii}, work: n}},
		"filter join": {{v: many, work: len(numbers)}, {v: texts, pos: []any{ascii}, work: n}, {v: wide, work: n},
			{v: many, pos: []any{"x"}, work: len(numbers)}},
		"filter first": {{v: wide, work: n}, {v: many}}, "filter last": {{v: wide, work: n}, {v: many}},
		"filter list":  {{v: wide, work: n}, {v: keys, work: len(keys.keys)}},
		"filter items": {{v: keys, work: len(keys.keys)}},
		"filter map": {{v: &list{items: numbers[:4]}, pos: []any{"trim", wide}, work: 4 * n},
			{v: &list{items: []any{wide, wide}}, pos: []any{"tojson"}, kw: []argument{{"ensure_ascii", true}}, work: 4 * n},
			{v: texts, kw: []argument{{"attribute", ascii}}, work: n},
			{v: &list{items: []any{keys}}, kw: []argument{{"attribute", strings.Repeat("0.", n/2)}}, work: 1},
			{v: texts, pos: []any{"map", "trim", wide}, work: len(texts.items)}},
		"filter select": pick("in", many), "filter reject": pick("eq", ascii),
		"filter selectattr": pick("x", "eq", ascii), "filter rejectattr": pick(ascii),

		"test defined": kind, "test undefined": kind, "test none": kind, "test true": kind, "test false": kind,
		"test boolean": kind, "test string": kind, "test mapping": kind, "test sequence": kind, "test iterable": kind,
		"test number": kind, "test integer": kind, "test float": kind, "test odd": kind, "test even": kind,
		"test equalto": equals(ascii, many, keys), "test eq": equals(ascii, many, keys),
		"test ==": equals(ascii, many, keys), "test ne": equals(ascii, many, keys), "test !=": equals(ascii, many, keys),
		"test in": {{v: "b", pos: []any{ascii}, work: n}, {v: ascii[1:] + "b", pos: []any{ascii}, work: n},
			{v: period[:n/2] + "c", pos: []any{period}, work: n}, {v: ascii, pos: []any{keys}, work: n},
			{v: int64(-1), pos: []any{many}, work: len(numbers)}},

		"function raise_exception": {{pos: []any{ascii}}},
		"function namespace":       {{kw: []argument{{"a", ascii}}}},
		"function range":           {{pos: []any{int64(99_999)}, work: len(numbers)}},
		"function strftime_now": {{pos: []any{ascii}, work: n}, {pos: []any{strings.Repeat("%A", n/2)}, work: n},
			{pos: []any{strings.Repeat("%%", n/2)}, work: n}, {pos: []any{ascii + "%"}, work: n}},

		"str strip": chars, "str lstrip": chars, "str rstrip": chars,
		"str split": append(search, large{v: short, work: len(short)}, large{v: blank, work: n},
			large{v: short, pos: []any{"a"}, work: len(short)}, large{v: period, pos: []any{period}, work: n}),
		"str rsplit": append(search, large{v: short, work: len(short)}, large{v: short, pos: []any{"a"}, work: len(short)}),
		"str startswith": {{v: ascii, pos: []any{ascii}, work: n}, {v: "x", pos: []any{texts}, work: len(texts.items)},
			{v: ascii, pos: []any{&list{aTuple, []any{ascii[1:] + "b", ascii[1:] + "b"}}}, work: 2 * n}},
		"str endswith": {{v: ascii, pos: []any{ascii}, work: n},
			{v: ascii, pos: []any{&list{aTuple, []any{"b" + ascii[1:], ascii}}}, work: n}},
		"str upper": {{v: ascii, work: n}}, "str lower": {{v: ascii, work: n}, {v: wide, work: n}},
		"str replace": {{v: ascii, pos: []any{"a", "b"}, work: n}, {v: wide, pos: []any{"", "x"}, work: n},
			{v: period, pos: []any{period[:n/2] + "c", ""}, work: n}},
		"str removeprefix": {{v: ascii, pos: []any{ascii}, work: n}, {v: "x", pos: []any{ascii}, work: n}},
		"str removesuffix": {{v: ascii, pos: []any{ascii}, work: n}, {v: "x", pos: []any{ascii}, work: n}},
		"str find":         search, "str rfind": append(search, large{v: "b" + wide, pos: []any{"b"}, work: n}),
		"str count": append(search, large{v: wide, pos: []any{""}, work: n}, large{v: ascii, pos: []any{"a"}, work: n}),
		"str join":  {{v: ascii, pos: []any{texts}, work: n}, {v: "", pos: []any{wide}, work: n}},

		"dict items": {{v: keys, work: len(keys.keys)}}, "dict keys": {{v: keys, work: len(keys.keys)}},
		"dict values": {{v: keys, work: 200 * len(keys.keys)}}, "dict get": {{v: keys, pos: []any{ascii}, work: n}},
	}
}

// equals returns comparisons of values that are equal, or nearly equal.
func equals(text string, of *list, d *Dict) []large {
	other, same := NewDict(), strings.Clone(text)
	for _, k := range d.keys {
		other.Set(strings.Clone(k), d.of[k])
	}
	return []large{{v: text, pos: []any{same}, work: len(text)}, {v: text, pos: []any{text[1:] + "b"}, work: len(text)},
		{v: of, pos: []any{&list{items: slices.Clone(of.items)}}, work: len(of.items)},
		{v: d, pos: []any{other}, work: 200 * len(d.keys)}}
}

// TestBuiltinsCount calls every builtin with several MiB. The builtin counts all work, and ends at the check at which
// the context is done.
func TestBuiltinsCount(t *testing.T) {
	testkit.Sequential(t)
	all, calls := registered(), largeCalls()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		b, list := all[name], calls[name]
		if len(list) == 0 {
			t.Errorf("%s has no call here: add one with large operands", name)
		}
		for i, c := range list {
			r, p := paced(t.Context(), enough)
			_, err := r.invoke(b, c.v, c.pos, c.kw)
			done := p.checks
			_ = p.Err()
			if r.work < int64(c.work) && !errors.Is(err, ErrTooMuch) {
				t.Errorf("%s, call %d: work %d of at least %d: %v", name, i, r.work, c.work, err)
			}
			// A text is copied without a check.
			if most := int64(4*largeBytes + 2*checkWork); p.gap > most || p.longest > patience {
				t.Errorf("%s, call %d: work %d between two checks, and %v", name, i, p.gap, p.longest)
			}
			if done < 2 {
				continue
			}
			r, p = paced(t.Context(), done/2)
			if _, err := r.invoke(b, c.v, c.pos, c.kw); !errors.Is(err, context.Canceled) || p.checks > done/2 {
				t.Errorf("%s, call %d: done at check %d, ended at %d: %v", name, i, done/2, p.checks, err)
			}
		}
	}
	for name := range calls {
		if _, is := all[name]; !is {
			t.Errorf("%s is not a builtin", name)
		}
	}
}

// TestOperatorsCount evaluates other expressions with several MiB.
func TestOperatorsCount(t *testing.T) {
	testkit.Sequential(t)
	n, d := largeBytes, NewDict()
	text, name := strings.Repeat("\u4e00bc", n/5), strings.Repeat("x", 60)
	d.Set(text, "x")
	vars := Vars{"s": text, "same": strings.Clone(text), "d": d, "p": strings.Repeat("a"+strings.Repeat("b", 16), n/17),
		"l": List(make([]any, 100_000)...), name: int64(1)}
	for template, work := range map[string]int{
		"{{ s[::2]|length }}":                             n,
		"{{ s[::-1]|length }}":                            n,
		"{{ s[5:-5]|length }}":                            n,
		"{{ s[-1000000] }}":                               n / 3,
		"{{ s[9000000] }}":                                n,
		"{{ s[1000000] }}":                                n / 3,
		"{{ l[::2]|length }}":                             50_000,
		"{{ s == same }}":                                 n,
		"{{ s < same }}":                                  n,
		"{{ s in d }}":                                    n,
		"{{ d[s] }}":                                      n,
		"{{ s[s] }}":                                      n,
		"{{ {s: 1}|length }}":                             n,
		"{{ 'x' in s }}":                                  n,
		"{{ p[:2000000] ~ 'x' in p }}":                    20 * n,
		"{{ (s + s)|length }}":                            2 * n,
		"{{ (s ~ s)|length }}":                            2 * n,
		"{{ (s * 3)|length }}":                            3 * n,
		"{{ (l + l)|length }}":                            3_000_000,
		"{{ s }}{{ s }}":                                  2 * n,
		"{% for c in s %}{% endfor %}":                    n,
		"{% for c in l if c %}{% endfor %}":               100_000 * stepWork,
		"{% set x %}{{ s }}{% endset %}":                  n,
		"{% set a, b = s %}":                              n,
		"{{ ns[s] }}{% set ns = namespace() %}":           0,
		"{% set ns = namespace() %}{{ ns[s] }}":           n,
		"{% macro m(a) %}{{ a }}{% endmacro %}{{ m(s) }}": 2 * n,
		"{{ l == l[:] }}":                                 100_000,
		"{{ s != p ~ s }}":                                n,
		"{% for i in l %}{{ " + name + " }}{% endfor %}":  100_000 * stepWork,
	} {
		tpl, err := Parse(t.Context(), template)
		if err != nil {
			t.Fatal(err)
		}
		r, p := paced(t.Context(), enough)
		_, err = r.render(tpl, vars)
		done := p.checks
		_ = p.Err()
		if most := int64(4*n + 2*checkWork); r.work < int64(work) && !errors.Is(err, ErrTooMuch) || p.gap > most ||
			p.longest > patience {
			t.Errorf("%.80s: work %d of at least %d, %d between two checks, and %v: %v", template, r.work, work, p.gap,
				p.longest, err)
		}
		if done < 2 {
			continue
		}
		r, p = paced(t.Context(), done/2)
		if _, err := r.render(tpl, vars); !errors.Is(err, context.Canceled) || p.checks > done/2+1 {
			t.Errorf("%.80s: done at check %d, ended at %d: %v", template, done/2, p.checks, err)
		}
	}
}

// TestParse parses the largest templates of requests, in the most expensive forms. Parsing and inspection end
// within a time proportional to the size, and when the context is done.
func TestParse(t *testing.T) {
	testkit.Sequential(t)
	const templateBytes = 64 << 10 // bound on the template of a request
	fill := func(begin, middle, end string) string {
		return begin + strings.Repeat(middle, (templateBytes-len(begin)-len(end))/len(middle)) + end
	}
	calls := "f(" + strings.Repeat("f(a,", 80) + "a" + strings.Repeat(")", 80) + ")"
	for _, template := range []string{
		fill("{{ ", `""`, " }}"), fill("{{ ", `"a"`, " }}"), fill("{{ [", "1,", "] }}"), fill("{{ f(", "a,", "a) }}"),
		fill("", "{{f(a)}}", ""), fill("", "{{"+calls+"}}", ""), fill("{{ a", "~a", " }}"), fill("{{ a", "<a", " }}"),
		fill("", "{##}", ""), fill("", "{%set a=a%}", ""), fill("{{ {", "a:f(a),", "} }}"),
		fill("", " \n{%- set a=1 -%}", ""),
		fill("", "{%macro f(a)%}{{f(a)}}{%endmacro%}", ""), fill("{{ '", `\u0041`, "' }}"), fill("{{", " ", "}}"),
		fill("{{ a", "|trim", " }}"), fill("{% for a in f(", "a(", ""), fill("{{ x[", ":,", ""), fill("", "{", ""),
		fill("{% if a %}", "{% elif a %}", "{% endif %}"), fill("{{ f(", numbered("a%d=1,", 900), ") }}"),
		fill("", "{{ f("+numbered("a%d=1,", 900)+") }}", ""), fill("", "{", ""), fill("", "{{ a }}{", ""),
	} {
		begun := time.Now()
		tpl, err := Parse(t.Context(), template)
		if err == nil {
			tpl.Reads()
			tpl.LoopsOver("content")
		}
		if took := time.Since(begun); took > patience {
			t.Errorf("%.40s needed %v: %v", template, took, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, done := Parse(ctx, template); err == nil && strings.Count(template, "{#") == 0 &&
			!errors.Is(done, context.Canceled) {
			t.Errorf("%.40s is parsed although the context is done: %v", template, done)
		}
	}
}

// TestSearchIsBounded searches a text for which the package strings would need the product of both lengths.
func TestSearchIsBounded(t *testing.T) {
	text := strings.Repeat("a"+strings.Repeat("b", 16), 4<<20/17)
	sub := text[:2<<20] + "c"
	begun := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if is, err := Contains(ctx, text, sub); is || err == nil || time.Since(begun) > patience {
		t.Errorf("%v, %v after %v", is, err, time.Since(begun))
	}
}

// TestTextsAreCounted finds builtins that read texts without counting: only text.go may range over a text, or use the
// packages for texts. It also finds calls of builtins outside of invoke.
func TestTextsAreCounted(t *testing.T) {
	testkit.Sequential(t)
	files := gotoken.NewFileSet()
	uncounted := map[string]bool{"strings": true, "bytes": true, "unicode": true, "unicode/utf8": true, "regexp": true,
		"sort": true}
	var list []*ast.File
	for _, name := range []string{"doc.go", "decode.go", "eval.go", "filters.go", "globals.go", "inspect.go", "json.go",
		"lex.go", "meter.go", "methods.go", "parse.go", "tests.go", "text.go", "value.go"} {
		f, err := goparser.ParseFile(files, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, f)
	}
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	build.Default.GOROOT = strings.TrimSpace(string(goroot)) // -trimpath leaves it out
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	config := types.Config{Importer: importer.ForCompiler(files, "source", nil)}
	if _, err := config.Check("jinja", files, list, info); err != nil {
		t.Fatal(err)
	}
	isText := func(e ast.Expr) bool {
		b, is := info.TypeOf(e).Underlying().(*types.Basic)
		return is && b.Info()&types.IsString != 0
	}
	for _, f := range list {
		name := files.File(f.Pos()).Name()
		reads := slices.Contains([]string{"text.go", "decode.go", "lex.go", "parse.go", "inspect.go"}, name)
		for _, i := range f.Imports {
			if path, _ := strconv.Unquote(i.Path.Value); uncounted[path] && !reads {
				t.Errorf("%s imports %s: use or add a function of text.go", name, path)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.RangeStmt:
				if isText(n.X) && !reads {
					t.Errorf("%s: a loop goes through a text: use or add a function of text.go", files.Position(n.Pos()))
				}
			case *ast.CallExpr:
				if to, is := info.TypeOf(n.Fun).(*types.Slice); is && len(n.Args) == 1 && isText(n.Args[0]) && !reads {
					t.Errorf("%s: a text becomes %v: use or add a function of text.go", files.Position(n.Pos()), to)
				}
				if s, is := n.Fun.(*ast.SelectorExpr); is && s.Sel.Name == "do" && name != "meter.go" &&
					strings.HasSuffix(info.TypeOf(s.X).String(), "jinja.builtin") {
					t.Errorf("%s: a builtin is called: use invoke", files.Position(n.Pos()))
				}
			}
			return true
		})
	}
}

// TestTextFunctions compares the counting functions with the package strings, on texts of a few pieces.
func TestTextFunctions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	alphabets := [][]string{{"a", "b"}, {"a", " ", "\n"}, {"\u4e00", "a", "\U0001f600"}, {" ", "\u3000"}, {"a"}}
	random := func(n int) string {
		from, b := alphabets[rng.IntN(len(alphabets))], strings.Builder{}
		for b.Len() < n {
			b.WriteString(strings.Repeat(from[rng.IntN(len(from))], 1+rng.IntN(40)))
		}
		return b.String()
	}
	for range testkit.Rounds(300) {
		r := &run{ctx: t.Context()}
		s := random(rng.IntN(3 * pieceBytes))
		points := []rune(s)
		from := rng.IntN(len(points) + 1)
		sub := string(points[from:min(len(points), from+rng.IntN(60))])
		if rng.IntN(2) == 0 {
			sub = random(rng.IntN(3))
		}
		var split, right, words []string
		n, err0 := r.codePoints(s)
		offset, err1 := r.offset(s, from)
		index, err2 := r.index(s, sub)
		last, err3 := r.lastIndex(s, sub)
		trimmed, err4 := r.strip(s, sub, true, true)
		plain, err5 := r.strip(s, nil, true, true)
		replaced, err6 := r.replace(s, sub, "<>")
		letters, err7 := r.letters(s)
		err8 := r.words(s, func(w string) error { words = append(words, w); return nil })
		back, err9 := r.every(s, n, n-1, -1, -1)
		if sub != "" {
			err8 = errors.Join(err8, r.split(s, sub, -1, func(w string) error { split = append(split, w); return nil }),
				r.splitRight(s, sub, 1, func(w string) error { right = append(right, w); return nil }))
		}
		if err := errors.Join(err0, err1, err2, err3, err4, err5, err6, err7, err8, err9); err != nil {
			t.Fatal(err)
		}
		slices.Reverse(points)
		var texts []string
		for _, v := range letters {
			texts = append(texts, v.(string))
		}
		switch {
		case n != len(points), offset != len(string([]rune(s)[:from])), index != strings.Index(s, sub),
			last != strings.LastIndex(s, sub), trimmed != strings.Trim(s, sub), plain != strings.TrimFunc(s, IsSpace),
			replaced != strings.ReplaceAll(s, sub, "<>"), !slices.Equal(texts, strings.Split(s, "")),
			!slices.Equal(words, strings.FieldsFunc(s, IsSpace)), back != string(points),
			sub != "" && !slices.Equal(split, strings.Split(s, sub)),
			sub != "" && last >= 0 && !slices.Equal(right, []string{s[last+len(sub):], s[:last]}):
			t.Fatalf("%.100q of %d bytes, %q", s, len(s), sub)
		}
	}
}
