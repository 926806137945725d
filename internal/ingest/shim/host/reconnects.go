package host

import "sync"

// Reconnects renews the leases of a process's ranks when the connection to NATS is back. A Reconnects is safe for
// concurrent use.
type Reconnects struct {
	mu   sync.Mutex
	last int
	all  map[int]func()
}

// Notify calls f at every reconnect until the caller calls end. Notify does nothing on nil.
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
