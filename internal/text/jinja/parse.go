package jinja

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// op is the operation of a node.
type op uint8

const (
	opBlock      op = iota // kids in sequence
	opData                 // name is the text
	opPrint                // kids[0]
	opIf                   // condition, then, else or nil
	opFor                  // iterable, test or nil, body, else or nil; names are the targets
	opSet                  // names = kids[0]
	opSetAttr              // names[0].name = kids[0]
	opSetBlock             // names[0] = output of kids[0]
	opMacro                // kids[0] is the body, kids[1:] the defaults of the last parameters; names are the parameters
	opGeneration           // kids[0]
	opBreak
	opContinue

	opConst   // val
	opName    // name
	opList    // kids
	opTuple   // kids
	opDict    // kids: alternating keys and values
	opAttr    // kids[0].name
	opItem    // kids[0][kids[1]]
	opSlice   // kids[0][kids[1]:kids[2]:kids[3]]; the last three may be nil
	opCall    // kids[0](kids[1:], named)
	opFilter  // kids[0]|name(kids[1:], named)
	opTest    // kids[0] is name(kids[1:], named)
	opNot     // kids[0]
	opNeg     // kids[0]
	opPos     // kids[0]
	opAnd     // kids[0], kids[1]
	opOr      // kids[0], kids[1]
	opMath    // kids[0] name kids[1]
	opConcat  // kids
	opCompare // kids[0] names[0] kids[1] names[1] kids[2] …
	opCond    // kids[1] if kids[0] else kids[2]; kids[2] may be nil
)

// node is a statement or an expression.
type node struct {
	op    op
	line  int
	name  string
	names []string
	val   any
	kids  []*node
	named []named
}

// named is an argument with a name.
type named struct {
	name string
	node *node
}

// Bounds of a template's text.
const (
	MaxTemplate = 1 << 20 // bytes
	maxName     = 1000    // bytes of a name
	maxNesting  = 100     // nesting of statements and expressions
	maxChain    = 1000    // nesting by a sequence of operators, filters or calls
	maxNames    = 1000    // arguments of a call, and parameters of a macro
)

// Template is a chat template.
type Template struct{ root *node }

// Parse parses a template. The error names the first unsupported feature, or is the context's after the end of ctx.
func Parse(ctx context.Context, text string) (*Template, error) {
	if len(text) > MaxTemplate {
		return nil, fmt.Errorf("the template has %d bytes, more than %d", len(text), MaxTemplate)
	}
	tokens, err := lex(ctx, text)
	if err != nil {
		return nil, err
	}
	p := &parser{ctx: ctx, tokens: tokens}
	root := p.block()
	if p.err == nil && p.cur().kind != tokEnd {
		p.fail("unexpected %v", p.cur())
	}
	if p.err != nil {
		return nil, p.err
	}
	if n := below(root, maxChain); n != nil {
		return nil, fmt.Errorf("line %d: more than %d operators, filters or calls in sequence", n.line, maxChain)
	}
	return &Template{root}, nil
}

// below returns a descendant of a node at the given depth; nil if there is none.
func below(n *node, depth int) *node {
	if n == nil || depth == 0 {
		return n
	}
	for _, kid := range n.kids {
		if deep := below(kid, depth-1); deep != nil {
			return deep
		}
	}
	for _, a := range n.named {
		if deep := below(a.node, depth-1); deep != nil {
			return deep
		}
	}
	return nil
}

// parser parses tokens. After the first error all methods do nothing, and cur is the end.
type parser struct {
	ctx    context.Context
	tokens []token
	at     int
	depth  int
	check  int // index of the token at the next check of the context
	loops  int // number of enclosing loops
	err    error
}

func (p *parser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = fmt.Errorf("line %d: "+format, append([]any{p.tokens[p.at].line}, args...)...)
	}
	p.at = len(p.tokens) - 1
}

func (p *parser) cur() token { return p.tokens[p.at] }

func (p *parser) next() token {
	t := p.tokens[p.at]
	if t.kind != tokEnd {
		p.at++
	}
	return t
}

func (p *parser) is(k kind, val string) bool { t := p.cur(); return t.kind == k && t.val == val }

func (p *parser) skip(k kind, val string) bool {
	if p.is(k, val) {
		p.at++
		return true
	}
	return false
}

func (p *parser) expect(k kind, val string) {
	if !p.skip(k, val) {
		p.fail("got %v instead of %q", p.cur(), val)
	}
}

func (p *parser) word() string {
	t := p.next()
	if t.kind != tokName {
		p.fail("got %v instead of a name", t)
		return ""
	}
	return t.val
}

func (p *parser) node(o op, kids ...*node) *node { return &node{op: o, line: p.cur().line, kids: kids} }

// deeper counts a level of nesting. The returned function ends the level. deeper stops the parser if the context is
// done.
func (p *parser) deeper() func() {
	if p.at >= p.check {
		p.check = p.at + tokensPerCheck
		if err := p.ctx.Err(); err != nil && p.err == nil {
			p.err = err
			p.at = len(p.tokens) - 1
		}
	}
	if p.depth++; p.depth > maxNesting {
		p.fail("nesting is deeper than %d", maxNesting)
	}
	return func() { p.depth-- }
}

// block parses statements up to the end, or to a tag with one of the words. The word is the next token then.
func (p *parser) block(words ...string) *node {
	defer p.deeper()()
	b := p.node(opBlock)
	for {
		switch t := p.next(); t.kind {
		case tokData:
			b.kids = append(b.kids, &node{op: opData, line: t.line, name: t.val})
		case tokPrint:
			n := p.node(opPrint, p.expression())
			p.expect(tokClose, "}}")
			b.kids = append(b.kids, n)
		case tokBlock:
			if w := p.cur(); w.kind == tokName && slices.Contains(words, w.val) {
				return b
			}
			if n := p.statement(); n != nil {
				b.kids = append(b.kids, n)
			}
		default:
			if len(words) > 0 {
				p.fail("%s is missing", words[len(words)-1])
			}
			return b
		}
	}
}

// body parses the rest of a tag, and then a block.
func (p *parser) body(words ...string) *node {
	p.expect(tokClose, "%}")
	return p.block(words...)
}

func (p *parser) statement() *node {
	n := p.node(opBlock)
	switch word := p.word(); word {
	case "if":
		p.conditions(n)
	case "for":
		n.op = opFor
		n.names = p.targets()
		p.expect(tokName, "in")
		iterable, test := p.or(), (*node)(nil)
		if p.skip(tokName, "if") {
			test = p.expression()
		}
		p.loops++
		n.kids = []*node{iterable, test, p.body("else", "endfor"), nil}
		p.loops--
		if p.next().val == "else" {
			n.kids[3] = p.body("endfor")
			p.next()
		}
	case "set":
		n.op, n.names = opSet, p.targets()
		switch {
		case len(n.names) == 1 && p.skip(tokOp, "."):
			n.op, n.name = opSetAttr, p.word()
			fallthrough
		case p.is(tokOp, "="):
			p.expect(tokOp, "=")
			n.kids = []*node{p.tuple()}
		case len(n.names) == 1 && p.is(tokClose, "%}"):
			n.op, n.kids = opSetBlock, []*node{p.body("endset")}
			p.next()
		default:
			p.fail("got %v in a set", p.cur())
		}
	case "macro":
		n.op, n.name, n.kids = opMacro, p.word(), []*node{nil}
		p.expect(tokOp, "(")
		for p.err == nil && !p.skip(tokOp, ")") {
			if len(n.names) > 0 {
				p.expect(tokOp, ",")
			}
			if n.names = append(n.names, p.word()); len(n.names) > maxNames {
				p.fail("a macro has more than %d parameters", maxNames)
			}
			if p.skip(tokOp, "=") {
				n.kids = append(n.kids, p.expression())
			} else if len(n.kids) > 1 {
				p.fail("a parameter without a default follows a parameter with a default")
			}
		}
		loops := p.loops
		p.loops = 0
		n.kids[0] = p.body("endmacro")
		p.loops = loops
		p.next()
	case "generation":
		loops := p.loops
		p.loops = 0
		n.op, n.kids = opGeneration, []*node{p.body("endgeneration")}
		p.loops = loops
		p.next()
	case "break", "continue":
		if n.op = opBreak; word == "continue" {
			n.op = opContinue
		}
		if p.loops == 0 {
			p.fail("%s is outside of a loop", word)
		}
	default:
		p.fail("the statement %.40q is not supported", word)
	}
	p.expect(tokClose, "%}")
	return n
}

// conditions parses the rest of an if after its keyword, up to the keyword of its end.
func (p *parser) conditions(n *node) {
	n.op = opIf
	n.kids = []*node{p.or(), p.body("elif", "else", "endif"), nil}
	switch p.next().val {
	case "elif":
		defer p.deeper()()
		n.kids[2] = p.node(opIf)
		p.conditions(n.kids[2])
	case "else":
		n.kids[2] = p.body("endif")
		p.next()
	}
}

// targets parses the names of an assignment.
func (p *parser) targets() (names []string) {
	closing := p.skip(tokOp, "(")
	for {
		name := p.word()
		if slices.Contains(reserved, name) || name == "loop" {
			p.fail("%.40q cannot be assigned to", name)
		}
		names = append(names, name)
		if !p.skip(tokOp, ",") {
			break
		}
	}
	if closing {
		p.expect(tokOp, ")")
	}
	return names
}

// reserved names have an unsupported meaning in Jinja2.
var reserved = []string{"self", "super", "caller", "varargs", "kwargs", "dict", "lipsum", "cycler", "joiner", "true",
	"false", "none", "True", "False", "None"}

// tuple parses an expression, or several expressions separated by commas.
func (p *parser) tuple() *node {
	n := p.expression()
	if !p.is(tokOp, ",") {
		return n
	}
	n = p.node(opTuple, n)
	for p.skip(tokOp, ",") && p.cur().kind != tokClose && !p.is(tokOp, ")") {
		n.kids = append(n.kids, p.expression())
	}
	return n
}

func (p *parser) expression() *node {
	defer p.deeper()()
	n := p.or()
	for p.skip(tokName, "if") {
		n = p.node(opCond, p.or(), n, nil)
		if p.skip(tokName, "else") {
			n.kids[2] = p.expression()
		}
	}
	return n
}

func (p *parser) or() *node {
	n := p.and()
	for p.skip(tokName, "or") {
		n = p.node(opOr, n, p.and())
	}
	return n
}

func (p *parser) and() *node {
	n := p.not()
	for p.skip(tokName, "and") {
		n = p.node(opAnd, n, p.not())
	}
	return n
}

func (p *parser) not() *node {
	if p.skip(tokName, "not") {
		defer p.deeper()()
		return p.node(opNot, p.not())
	}
	return p.compare()
}

func (p *parser) compare() *node {
	n := p.node(opCompare, p.sum())
	for {
		t := p.cur()
		switch {
		case t.kind == tokOp && slices.Contains([]string{"==", "!=", "<", "<=", ">", ">="}, t.val), p.is(tokName, "in"):
			p.next()
		case p.is(tokName, "not") && p.tokens[p.at+1].kind == tokName && p.tokens[p.at+1].val == "in":
			p.next()
			p.next()
			t.val = "not in"
		default:
			if len(n.names) == 0 {
				return n.kids[0]
			}
			return n
		}
		n.names = append(n.names, t.val)
		n.kids = append(n.kids, p.sum())
	}
}

func (p *parser) math(sub func() *node, ops ...string) *node {
	n := sub()
	for p.cur().kind == tokOp && slices.Contains(ops, p.cur().val) {
		m := p.node(opMath, n)
		m.name = p.next().val
		m.kids = append(m.kids, sub())
		n = m
	}
	return n
}

func (p *parser) sum() *node { return p.math(p.concat, "+", "-") }

func (p *parser) concat() *node {
	n := p.product()
	if !p.is(tokOp, "~") {
		return n
	}
	n = p.node(opConcat, n)
	for p.skip(tokOp, "~") {
		n.kids = append(n.kids, p.product())
	}
	return n
}

func (p *parser) product() *node {
	return p.math(func() *node { return p.unary(true) }, "*", "/", "//", "%")
}

func (p *parser) unary(filters bool) *node {
	defer p.deeper()()
	var n *node
	switch {
	case p.skip(tokOp, "-"):
		n = p.node(opNeg, p.unary(false))
	case p.skip(tokOp, "+"):
		n = p.node(opPos, p.unary(false))
	default:
		n = p.primary()
	}
	n = p.postfix(n)
	if !filters {
		return n
	}
	for p.err == nil {
		switch {
		case p.skip(tokOp, "|"):
			f := p.node(opFilter, n)
			if f.name = p.word(); !known(filterNames, f.name) {
				p.fail("the filter %.40q is not supported", f.name)
			}
			if p.skip(tokOp, "(") {
				p.arguments(f)
			}
			n = f
		case p.skip(tokName, "is"):
			n = p.test(n)
		case p.is(tokOp, "("):
			n = p.postfix(n)
		default:
			return n
		}
	}
	return n
}

func known(builtins map[string]builtin, name string) bool { _, is := builtins[name]; return is }

// test parses a test after the keyword is.
func (p *parser) test(of *node) *node {
	n := p.node(opTest, of)
	negated := p.skip(tokName, "not")
	if n.name = p.word(); !known(testNames, n.name) {
		p.fail("the test %.40q is not supported", n.name)
	}
	switch t := p.cur(); {
	case p.skip(tokOp, "("):
		p.arguments(n)
	case t.kind == tokName && (t.val == "else" || t.val == "or" || t.val == "and"):
	case t.kind == tokName && t.val == "is":
		p.fail("a test follows a test")
	case t.kind == tokName || t.kind == tokString || t.kind == tokInt || t.kind == tokFloat ||
		t.kind == tokOp && (t.val == "[" || t.val == "{"):
		n.kids = append(n.kids, p.postfix(p.primary()))
	}
	if negated {
		return p.node(opNot, n)
	}
	return n
}

// arguments parses arguments after an opening parenthesis.
func (p *parser) arguments(n *node) {
	for first := true; p.err == nil && !p.skip(tokOp, ")"); first = false {
		if !first {
			p.expect(tokOp, ",")
			if p.skip(tokOp, ")") {
				return
			}
		}
		if t := p.cur(); t.kind == tokName && p.tokens[p.at+1].kind == tokOp && p.tokens[p.at+1].val == "=" {
			p.at += 2
			if slices.ContainsFunc(n.named, func(a named) bool { return a.name == t.val }) {
				p.fail("the argument %.40q is given twice", t.val)
			}
			if n.named = append(n.named, named{t.val, p.expression()}); len(n.named) > maxNames {
				p.fail("a call has more than %d named arguments", maxNames)
			}
			continue
		}
		if len(n.named) > 0 {
			p.fail("a positional argument follows a named argument")
		}
		n.kids = append(n.kids, p.expression())
	}
}

func (p *parser) postfix(n *node) *node {
	for p.err == nil {
		switch {
		case p.skip(tokOp, "."):
			t := p.next()
			switch i, err := strconv.ParseInt(t.val, 10, 64); {
			case t.kind == tokName:
				n = p.node(opAttr, n)
				n.name = t.val
			case t.kind == tokInt && err == nil:
				n = p.node(opItem, n, &node{op: opConst, val: i})
			default:
				p.fail("got %v after a dot", t)
			}
		case p.skip(tokOp, "["):
			n = p.subscript(n)
		case p.skip(tokOp, "("):
			n = p.node(opCall, n)
			p.arguments(n)
		default:
			return n
		}
	}
	return n
}

func (p *parser) subscript(of *node) *node {
	n := p.node(opSlice, of, nil, nil, nil)
	for i := 1; ; i++ {
		if !p.is(tokOp, ":") && !p.is(tokOp, "]") {
			n.kids[i] = p.expression()
		}
		if p.skip(tokOp, "]") {
			switch {
			case i > 1:
			case n.kids[1] == nil:
				p.fail("the brackets are empty")
			default:
				n.op, n.kids = opItem, n.kids[:2]
			}
			return n
		}
		if p.expect(tokOp, ":"); i == 3 || p.err != nil {
			p.fail("a slice has more than three parts")
			return n
		}
	}
}

// constants are the names of constant values.
var constants = map[string]any{"true": true, "True": true, "false": false, "False": false, "none": nil, "None": nil}

func (p *parser) primary() *node {
	n := p.node(opConst)
	switch t := p.next(); {
	case t.kind == tokName:
		var is bool
		if n.val, is = constants[t.val]; is {
			break
		}
		if slices.Contains(reserved, t.val) || t.val == "in" || t.val == "is" || t.val == "and" || t.val == "or" ||
			t.val == "not" || t.val == "if" || t.val == "else" {
			p.fail("%.40q is not supported", t.val)
		}
		n.op, n.name = opName, t.val
	case t.kind == tokString:
		if p.cur().kind != tokString {
			n.val = t.val
			break
		}
		var whole strings.Builder
		for ; t.kind == tokString; t = p.next() {
			whole.WriteString(t.val)
			if p.cur().kind != tokString {
				break
			}
		}
		n.val = whole.String()
	case t.kind == tokInt:
		i, err := strconv.ParseInt(t.val, 10, 64)
		if err != nil {
			p.fail("the number %s is too large", t.val)
		}
		n.val = i
	case t.kind == tokFloat:
		n.val, _ = strconv.ParseFloat(t.val, 64)
	case t.kind == tokOp && t.val == "(":
		if p.skip(tokOp, ")") {
			n.op = opTuple
			break
		}
		n = p.tuple()
		p.expect(tokOp, ")")
	case t.kind == tokOp && t.val == "[":
		n.op = opList
		for p.err == nil && !p.skip(tokOp, "]") {
			n.kids = append(n.kids, p.expression())
			if !p.is(tokOp, "]") {
				p.expect(tokOp, ",")
			}
		}
	case t.kind == tokOp && t.val == "{":
		n.op = opDict
		for p.err == nil && !p.skip(tokOp, "}") {
			key := p.expression()
			p.expect(tokOp, ":")
			n.kids = append(n.kids, key, p.expression())
			if !p.is(tokOp, "}") {
				p.expect(tokOp, ",")
			}
		}
	default:
		p.fail("got %v instead of a value", t)
	}
	return n
}
