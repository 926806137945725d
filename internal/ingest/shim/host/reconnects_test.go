package host

import "testing"

// TestReconnects checks that a function is removed, and not called, after its end.
func TestReconnects(t *testing.T) {
	var n Reconnects
	a, b := 0, 0
	endA, endB := n.Notify(func() { a++ }), n.Notify(func() { b++ })
	n.Reconnected()
	endA()
	n.Reconnected()
	endB()
	if n.Reconnected(); a != 1 || b != 2 || len(n.all) != 0 {
		t.Errorf("called %d and %d times, %d are left", a, b, len(n.all))
	}
}
