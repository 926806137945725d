package main

import "testing"

// TestReconnects: who has ended is told no more, and takes no memory.
func TestReconnects(t *testing.T) {
	var n reconnects
	a, b := 0, 0
	endA, endB := n.notify(func() { a++ }), n.notify(func() { b++ })
	n.tell()
	endA()
	n.tell()
	endB()
	if n.tell(); a != 1 || b != 2 || len(n.all) != 0 {
		t.Errorf("told %d and %d times, %d are left", a, b, len(n.all))
	}
}
