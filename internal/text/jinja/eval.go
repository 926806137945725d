package jinja

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// Vars are the variables of a rendering. The permitted values are those of [Dict.Set].
type Vars map[string]any

// Render returns the rendered text. The possible errors are an error of the template (raise_exception), an unsuitable
// value, an unsupported feature, [ErrTooMuch], and the context's error.
func (t *Template) Render(ctx context.Context, vars Vars) (text string, err error) {
	return t.RenderAt(ctx, vars, time.Now())
}

// RenderAt is Render with a given time for strftime_now.
func (t *Template) RenderAt(ctx context.Context, vars Vars, now time.Time) (text string, err error) {
	return (&run{ctx: ctx, now: now}).render(t, vars)
}

func (r *run) render(t *Template, vars Vars) (text string, err error) {
	defer func() {
		if bug := recover(); bug != nil {
			text, err = "", fmt.Errorf("rendering the template failed: %v", bug)
		}
	}()
	top := &scope{vars: vars}
	out := buffer{run: r}
	if _, err := r.exec(t.root, &scope{up: top}, &out); err != nil {
		return "", err
	}
	return out.String(), nil
}

// scope contains the variables of a template, of a loop's iteration or of a macro's call.
type scope struct {
	up   *scope
	vars map[string]any
}

func (s *scope) get(name string) (any, bool) {
	for ; s != nil; s = s.up {
		if v, ok := s.vars[name]; ok {
			return v, true
		}
	}
	v, ok := globals[name]
	return v, ok
}

func (s *scope) set(name string, v any) {
	if s.vars == nil {
		s.vars = map[string]any{}
	}
	s.vars[name] = v
}

// assign assigns a value to a name, or the parts of the value to several names.
func (r *run) assign(s *scope, names []string, v any) error {
	if len(names) == 1 {
		s.set(names[0], v)
		return nil
	}
	parts, err := r.iterate(v)
	if err != nil {
		return err
	}
	if len(parts) != len(names) {
		return fmt.Errorf("cannot assign %d names from %d values", len(names), len(parts))
	}
	for i, name := range names {
		s.set(name, parts[i])
	}
	return nil
}

// macro is a macro with its defining scope.
type macro struct {
	node  *node
	scope *scope
}

// flow is the way in which a block ended.
type flow uint8

const (
	normal flow = iota
	breaks
	continues
)

// exec executes a statement.
func (r *run) exec(n *node, s *scope, out *buffer) (flow, error) {
	defer func() { r.depth-- }()
	if err := r.deeper(); err != nil {
		return normal, err
	}
	f, err := r.statement(n, s, out)
	var at *atLine
	if err != nil && n.op != opBlock && !errors.As(err, &at) && !errors.Is(err, ErrTooMuch) && r.ctx.Err() == nil {
		err = &atLine{n.line, err}
	}
	return f, err
}

// atLine is an error with its line.
type atLine struct {
	line int
	err  error
}

func (e *atLine) Error() string { return fmt.Sprintf("line %d of the template: %v", e.line, e.err) }
func (e *atLine) Unwrap() error { return e.err }

func (r *run) statement(n *node, s *scope, out *buffer) (flow, error) {
	switch n.op {
	case opBlock:
		for _, kid := range n.kids {
			if f, err := r.exec(kid, s, out); f != normal || err != nil {
				return f, err
			}
		}
	case opData:
		return normal, out.add(n.name)
	case opPrint:
		v, err := r.eval(n.kids[0], s)
		if err != nil {
			return normal, err
		}
		text, err := str(v)
		if err != nil {
			return normal, err
		}
		return normal, out.add(text)
	case opIf:
		v, err := r.eval(n.kids[0], s)
		switch {
		case err != nil:
			return normal, err
		case truth(v):
			return r.exec(n.kids[1], s, out)
		case n.kids[2] != nil:
			return r.exec(n.kids[2], s, out)
		}
	case opFor:
		return r.loop(n, s, out)
	case opSet, opSetAttr:
		v, err := r.eval(n.kids[0], s)
		if err != nil {
			return normal, err
		}
		if n.op == opSet {
			return normal, r.assign(s, n.names, v)
		}
		to, _ := s.get(n.names[0])
		ns, is := to.(*namespace)
		if !is {
			return normal, fmt.Errorf("%.40q is not a namespace", n.names[0])
		}
		ns.attrs[n.name] = v
	case opSetBlock:
		text, f, err := r.capture(n.kids[0], &scope{up: s})
		if f == normal && err == nil { // otherwise the block was left early
			s.set(n.names[0], text)
		}
		return f, err
	case opMacro:
		s.set(n.name, &macro{n, s})
		return normal, r.made(dictBytes)
	case opGeneration:
		text, _, err := r.capture(n.kids[0], &scope{up: s})
		if err != nil {
			return normal, err
		}
		return normal, out.add(text)
	case opBreak:
		return breaks, nil
	case opContinue:
		return continues, nil
	}
	return normal, nil
}

// capture renders a block into a separate text.
func (r *run) capture(n *node, s *scope) (string, flow, error) {
	b := buffer{run: r}
	f, err := r.exec(n, s, &b)
	return b.String(), f, err
}

// loop is the loop variable.
type loop struct {
	items []any
	at    int
}

func (l *loop) attr(name string) (any, error) {
	n := len(l.items)
	near := func(at int) any {
		if at < 0 || at >= n {
			return undefined{name}
		}
		return l.items[at]
	}
	switch name {
	case "index":
		return int64(l.at + 1), nil
	case "index0":
		return int64(l.at), nil
	case "revindex":
		return int64(n - l.at), nil
	case "revindex0":
		return int64(n - l.at - 1), nil
	case "first":
		return l.at == 0, nil
	case "last":
		return l.at == n-1, nil
	case "length":
		return int64(n), nil
	case "previtem":
		return near(l.at - 1), nil
	case "nextitem":
		return near(l.at + 1), nil
	}
	return nil, fmt.Errorf("loop.%.40s is not supported", name)
}

func (r *run) loop(n *node, s *scope, out *buffer) (flow, error) {
	v, err := r.eval(n.kids[0], s)
	if err != nil {
		return normal, err
	}
	items, err := r.iterate(v)
	if err != nil {
		return normal, err
	}
	if test := n.kids[1]; test != nil {
		var kept []any
		for _, v := range items {
			// Jinja2 does not define loop inside the test.
			round := &scope{up: s, vars: map[string]any{"loop": undefined{"loop"}}}
			if err := r.assign(round, n.names, v); err != nil {
				return normal, err
			}
			is, err := r.eval(test, round)
			if err != nil {
				return normal, err
			}
			if truth(is) {
				if err := r.made(itemBytes); err != nil {
					return normal, err
				}
				kept = append(kept, v)
			}
		}
		items = kept
	}
	l, whole := &loop{items: items}, false // whole: an iteration has reached its end, so Jinja2 skips the else block
	for at, v := range items {
		l.at = at
		round := &scope{up: s, vars: map[string]any{"loop": l}}
		if err := r.assign(round, n.names, v); err != nil {
			return normal, err
		}
		f, err := r.exec(n.kids[2], round, out)
		if err != nil {
			return normal, err
		}
		if f == breaks {
			break
		}
		whole = whole || f == normal
	}
	if !whole && n.kids[3] != nil {
		return r.exec(n.kids[3], &scope{up: s}, out)
	}
	return normal, nil
}

// eval returns the value of an expression.
func (r *run) eval(n *node, s *scope) (any, error) {
	defer func() { r.depth-- }()
	if err := r.deeper(); err != nil {
		return nil, err
	}
	switch n.op {
	case opConst:
		return n.val, nil
	case opName:
		if v, ok := s.get(n.name); ok {
			return v, nil
		}
		return undefined{n.name}, nil
	case opCond:
		is, err := r.eval(n.kids[0], s)
		switch {
		case err != nil:
			return nil, err
		case truth(is):
			return r.eval(n.kids[1], s)
		case n.kids[2] != nil:
			return r.eval(n.kids[2], s)
		}
		return undefined{"the missing else of an if"}, nil
	case opAnd, opOr:
		v, err := r.eval(n.kids[0], s)
		if err != nil || truth(v) == (n.op == opOr) {
			return v, err
		}
		return r.eval(n.kids[1], s)
	case opCompare:
		return r.compare(n, s)
	}
	vals := make([]any, len(n.kids))
	for i, kid := range n.kids {
		if kid == nil {
			continue
		}
		v, err := r.eval(kid, s)
		if err != nil {
			return nil, err
		}
		vals[i] = v
	}
	var kw []argument
	for _, a := range n.named {
		v, err := r.eval(a.node, s)
		if err != nil {
			return nil, err
		}
		kw = append(kw, argument{a.name, v})
	}
	return r.apply(n, vals, kw)
}

// apply returns the value of an expression with the operands vals and kw.
func (r *run) apply(n *node, vals []any, kw []argument) (any, error) {
	switch n.op {
	case opList:
		return &list{aList, vals}, r.made(itemBytes * (len(vals) + 1))
	case opTuple:
		return &list{aTuple, vals}, r.made(itemBytes * (len(vals) + 1))
	case opDict:
		return r.dict(vals)
	case opAttr:
		return r.attribute(vals[0], n.name, false)
	case opItem:
		return r.item(vals[0], vals[1])
	case opSlice:
		return r.part(vals[0], vals[1], vals[2], vals[3])
	case opCall:
		return r.call(vals[0], vals[1:], kw)
	case opFilter:
		v, err := r.invoke(filterNames[n.name], vals[0], vals[1:], kw)
		if err != nil {
			return nil, fmt.Errorf("filter %s: %w", n.name, err)
		}
		return v, nil
	case opTest:
		return r.test(n.name, vals[0], vals[1:], kw)
	case opNot:
		return !truth(vals[0]), nil
	case opNeg:
		return signed(-1, vals[0])
	case opPos:
		return signed(1, vals[0])
	case opMath:
		return r.math(n.name, vals[0], vals[1])
	case opConcat:
		return r.concat(vals)
	}
	return nil, fmt.Errorf("unknown node %d", n.op)
}

// signed returns a number multiplied by a sign, which is 1 or -1.
func signed(sign int64, v any) (any, error) {
	f, i, whole, ok := numeric(v)
	switch {
	case !ok || i == math.MinInt64:
		return nil, fmt.Errorf("%s has no sign", typeName(v))
	case whole:
		return sign * i, nil
	}
	return float64(sign) * f, nil
}

// concat returns the values as one text.
func (r *run) concat(vals []any) (any, error) {
	b := buffer{run: r}
	for _, v := range vals {
		text, err := str(v)
		if err == nil {
			err = b.add(text)
		}
		if err != nil {
			return nil, err
		}
	}
	return b.String(), nil
}

// dict returns a dictionary from alternating keys and values.
func (r *run) dict(vals []any) (any, error) {
	if err := r.made(dictBytes + 2*itemBytes*len(vals)); err != nil {
		return nil, err
	}
	d := NewDict()
	for i := 0; i < len(vals); i += 2 {
		key, is := vals[i].(string)
		if !is {
			return nil, fmt.Errorf("%s as a key is not supported", typeName(vals[i]))
		}
		if err := r.spend(len(key)); err != nil {
			return nil, err
		}
		d.Set(key, vals[i+1])
	}
	return d, nil
}

func (r *run) compare(n *node, s *scope) (any, error) {
	left, err := r.eval(n.kids[0], s)
	if err != nil {
		return nil, err
	}
	for i, op := range n.names {
		right, err := r.eval(n.kids[i+1], s)
		if err != nil {
			return nil, err
		}
		var is bool
		switch op {
		case "==":
			is, err = r.equal(left, right, 0)
		case "!=":
			is, err = r.equal(left, right, 0)
			is = !is
		case "in":
			is, err = r.contains(right, left)
		case "not in":
			is, err = r.contains(right, left)
			is = !is
		default:
			var by int
			by, err = r.order(left, right)
			is = op == "<" && by < 0 || op == "<=" && by <= 0 || op == ">" && by > 0 || op == ">=" && by >= 0
		}
		if err != nil || !is {
			return false, err
		}
		left = right
	}
	return true, nil
}

func (r *run) math(op string, a, b any) (any, error) {
	fa, ia, wa, oka := numeric(a)
	fb, ib, wb, okb := numeric(b)
	sa, isA := a.(string)
	sb, isB := b.(string)
	la, isLA := a.(*list)
	lb, isLB := b.(*list)
	switch {
	case op == "+" && isA && isB:
		if err := r.made(len(sa) + len(sb)); err != nil {
			return nil, err
		}
		return sa + sb, nil
	case op == "+" && isLA && isLB && la.form == lb.form && la.form <= aTuple:
		if err := r.made(itemBytes * (len(la.items) + len(lb.items))); err != nil {
			return nil, err
		}
		return &list{la.form, append(append(make([]any, 0, len(la.items)+len(lb.items)), la.items...), lb.items...)}, nil
	case op == "*" && isA && okb && wb:
		return r.repeat(sa, ib)
	case !oka || !okb:
		return nil, fmt.Errorf("unsupported operation: %s %s %s", typeName(a), op, typeName(b))
	case (op == "/" || op == "//" || op == "%") && fb == 0:
		return nil, errors.New("division by 0")
	case op == "/":
		if wa && wb && (math.Abs(fa) > exact || math.Abs(fb) > exact) {
			break
		}
		return fa / fb, nil
	case wa && wb:
		// Numbers with less than 31 bits do not overflow.
		if math.Abs(fa) >= 1<<31 || math.Abs(fb) >= 1<<31 {
			break
		}
		switch op {
		case "+":
			return ia + ib, nil
		case "-":
			return ia - ib, nil
		case "*":
			return ia * ib, nil
		case "//":
			return int64(math.Floor(fa / fb)), nil
		case "%":
			return (ia%ib + ib) % ib, nil
		}
	case op == "+":
		return fa + fb, nil
	case op == "-":
		return fa - fb, nil
	case op == "*":
		return fa * fb, nil
	}
	return nil, fmt.Errorf("%s of these numbers is not supported", op)
}

// call calls a value.
func (r *run) call(f any, pos []any, kw []argument) (any, error) {
	switch f := f.(type) {
	case builtin:
		return r.invoke(f, nil, pos, kw)
	case method:
		v, err := r.method(f, pos, kw)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		return v, nil
	case *macro:
		return r.macro(f, pos, kw)
	}
	return nil, fmt.Errorf("%s cannot be called", typeName(f))
}

func (r *run) macro(m *macro, pos []any, kw []argument) (any, error) {
	if r.calls++; r.calls > maxCalls {
		return nil, ErrTooMuch
	}
	defer func() { r.calls-- }()
	if err := r.spend(len(kw) * len(m.node.names)); err != nil {
		return nil, err
	}
	vals, err := bind(pos, kw, m.node.names...)
	if err != nil {
		return nil, fmt.Errorf("macro %s: %w", m.node.name, err)
	}
	s := &scope{up: m.scope}
	defaults := m.node.kids[1:]
	for i, name := range m.node.names {
		v := vals[i]
		if _, is := v.(missing); is {
			v = undefined{name}
			if d := i - (len(m.node.names) - len(defaults)); d >= 0 {
				if v, err = r.eval(defaults[d], s); err != nil {
					return nil, err
				}
			}
		}
		s.set(name, v)
	}
	text, _, err := r.capture(m.node.kids[0], s)
	return text, err
}

// missing is an omitted argument.
type missing struct{}

// bind sorts arguments into the order of names.
func bind(pos []any, kw []argument, names ...string) ([]any, error) {
	if len(pos) > len(names) {
		return nil, fmt.Errorf("%d arguments, more than %d", len(pos), len(names))
	}
	vals := make([]any, len(names))
	for i := range vals {
		if vals[i] = any(missing{}); i < len(pos) {
			vals[i] = pos[i]
		}
	}
	for _, a := range kw {
		i := slices.Index(names, a.name)
		if i < 0 || i < len(pos) {
			return nil, fmt.Errorf("unknown or repeated argument %.40q", a.name)
		}
		vals[i] = a.val
	}
	return vals, nil
}
