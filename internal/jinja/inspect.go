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
	walk(t.root, func(n *node) {
		if n.op == opName && !assigned[n.name] && !slices.Contains(names, n.name) {
			names = append(names, n.name)
		}
	})
	return names
}

// LoopsOver reports whether a loop may go through what has a name: a variable or an item of it, or what was assigned
// from that, or given to a macro. It may say so of a template that does not, and not the other way round.
func (t *Template) LoopsOver(name string) bool {
	tainted := map[string]bool{name: true}
	mentions := func(list []*node) (is bool) {
		for _, n := range list {
			walk(n, func(n *node) {
				text, _ := n.val.(string)
				is = is || (n.op == opName || n.op == opAttr) && tainted[n.name] || n.op == opConst && text == name
			})
		}
		return is
	}
	taint := func(names ...string) {
		for _, name := range names {
			tainted[name] = true
		}
	}
	for before := 0; before != len(tainted); {
		before = len(tainted)
		walk(t.root, func(n *node) {
			switch n.op {
			case opSet:
				if mentions(n.kids) {
					taint(n.names...)
				}
			case opSetAttr:
				if mentions(n.kids) {
					taint(n.name)
				}
			case opFor:
				if mentions(n.kids[:1]) {
					taint(n.names...)
				}
			case opCall:
				args := slices.Clone(n.kids[1:])
				for _, a := range n.named {
					args = append(args, a.node)
				}
				if n.kids[0].op == opName && mentions(args) {
					walk(t.root, func(m *node) {
						if m.op == opMacro && m.name == n.kids[0].name {
							taint(m.names...)
						}
					})
				}
			}
		})
	}
	loops := false
	walk(t.root, func(n *node) { loops = loops || n.op == opFor && mentions(n.kids[:1]) })
	return loops
}
