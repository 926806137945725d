package jinja

// walk calls f for a node and all its descendants.
func walk(n *node, f func(*node)) {
	if n == nil {
		return
	}
	f(n)
	for _, kid := range n.kids {
		walk(kid, f)
	}
	for _, a := range n.named {
		walk(a.node, f)
	}
}

// Reads returns the names that the template reads but never assigns, in order of their first occurrence.
func (t *Template) Reads() (names []string) {
	assigned := map[string]bool{"loop": true}
	walk(t.root, func(n *node) {
		switch n.op {
		case opFor, opSet, opSetBlock, opMacro:
			for _, name := range n.names {
				assigned[name] = true
			}
			assigned[n.name] = true
		}
	})
	seen := map[string]bool{}
	walk(t.root, func(n *node) {
		if n.op == opName && !assigned[n.name] && !seen[n.name] {
			seen[n.name] = true
			names = append(names, n.name)
		}
	})
	return names
}

// LoopsOver reports whether a loop may iterate over a value with the name: over the variable or an item of it, or over
// a value that was assigned from it or passed to a macro. A false positive is possible, a false negative is not.
func (t *Template) LoopsOver(name string) bool {
	f := flows{name: name, leads: map[any][]any{}}
	f.visit(t.root, nil)
	seen, open := map[any]bool{name: true}, []any{name}
	for len(open) > 0 {
		last := open[len(open)-1]
		open = open[:len(open)-1]
		if n, is := last.(*node); is && n.op == opFor {
			return true
		}
		for _, to := range f.leads[last] {
			if !seen[to] {
				seen[to] = true
				open = append(open, to)
			}
		}
	}
	return false
}

// flows are the possible paths of values. Its size is linear in the size of the template.
type flows struct {
	name string

	// leads maps a source to the possible destinations of its value. A source is a name, the parameters of a macro, the
	// arguments of a call, or a statement that assigns or loops.
	leads map[any][]any
}

// parameters are the parameters of a macro, and passed the arguments of a call.
type (
	parameters string
	passed     struct{ call *node }
)

func (f *flows) lead(from, to any) {
	if to != nil {
		f.leads[from] = append(f.leads[from], to)
	}
}

// visit follows the values of a node and its descendants to their destination to; nil means no destination.
func (f *flows) visit(n *node, to any) {
	if n == nil {
		return
	}
	text, _ := n.val.(string)
	targets := func(from any) {
		for _, name := range n.names {
			f.lead(from, name)
		}
	}
	switch {
	case n.op == opName || n.op == opAttr:
		f.lead(n.name, to)
	case n.op == opConst && text == f.name:
		f.lead(text, to)
	case n.op == opSet:
		targets(n)
		to = n
	case n.op == opSetAttr:
		to = n.name
	case n.op == opFor:
		targets(n)
		f.visit(n.kids[0], n)
		for _, kid := range n.kids[1:] {
			f.visit(kid, nil)
		}
		return
	case n.op == opMacro:
		targets(parameters(n.name))
	case n.op == opCall:
		f.visit(n.kids[0], to)
		f.lead(passed{n}, to)
		if n.kids[0].op == opName {
			f.lead(passed{n}, parameters(n.kids[0].name))
		}
		for _, kid := range n.kids[1:] {
			f.visit(kid, passed{n})
		}
		for _, a := range n.named {
			f.visit(a.node, passed{n})
		}
		return
	}
	for _, kid := range n.kids {
		f.visit(kid, to)
	}
	for _, a := range n.named {
		f.visit(a.node, to)
	}
}
