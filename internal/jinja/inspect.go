package jinja

import "slices"

// walk calls f for a node and all below it.
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

// Reads are the names that the template reads and nowhere assigns, in order of their first place.
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

// LoopsOver reports whether a loop may go through what has a name: a variable or an item of it, or what was assigned
// from that, or given to a macro. It may say so of a template that does not, and not the other way round.
func (t *Template) LoopsOver(name string) bool {
	// leads has where a value may go: from a name, a macro's arguments, or a statement that assigns or loops
	type arguments string
	leads := map[any][]any{}
	lead := func(from []*node, to any) {
		for _, n := range from {
			walk(n, func(n *node) {
				text, _ := n.val.(string)
				switch {
				case n.op == opName || n.op == opAttr:
					leads[n.name] = append(leads[n.name], to)
				case n.op == opConst && text == name:
					leads[name] = append(leads[name], to)
				}
			})
		}
	}
	assign := func(from any, names []string) {
		for _, name := range names {
			leads[from] = append(leads[from], name)
		}
	}
	walk(t.root, func(n *node) {
		switch n.op {
		case opSet:
			lead(n.kids, n)
			assign(n, n.names)
		case opSetAttr:
			lead(n.kids, n.name)
		case opFor:
			lead(n.kids[:1], n)
			assign(n, n.names)
		case opMacro:
			assign(arguments(n.name), n.names)
		case opCall:
			args := slices.Clone(n.kids[1:])
			for _, a := range n.named {
				args = append(args, a.node)
			}
			if n.kids[0].op == opName {
				lead(args, arguments(n.kids[0].name))
			}
		}
	})
	seen, open := map[any]bool{name: true}, []any{name}
	for len(open) > 0 {
		last := open[len(open)-1]
		open = open[:len(open)-1]
		if n, is := last.(*node); is && n.op == opFor {
			return true
		}
		for _, to := range leads[last] {
			if !seen[to] {
				seen[to] = true
				open = append(open, to)
			}
		}
	}
	return false
}
