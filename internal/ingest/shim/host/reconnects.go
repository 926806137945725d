package host

import "sync"

// Reconnects renews the leases of a process's ranks when its connection to NATS is back. Its methods are safe for
// concurrent use.
type Reconnects struct {
	mu   sync.Mutex
	last int
	all  map[int]func()
}

// Notify has f called at each reconnect until end is called. It does nothing on nil.
func (n *Reconnects) Notify(f func()) (end func()) {
	if n == nil {
		return func() {}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.all == nil {
		n.all = map[int]func(){}
	}
	n.last++
	this := n.last
	n.all[this] = f
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.all, this)
	}
}

// Reconnected calls the functions of Notify.
func (n *Reconnects) Reconnected() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, f := range n.all {
		f()
	}
}
