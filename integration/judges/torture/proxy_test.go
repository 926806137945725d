//go:build judges

package torture

import (
	"net"
	"sync"
	"testing"
)

// proxy carries TCP connections to a target, until it is told to be a bad network: cut them all, hold everything back for a
// while, take nobody for a while. Whatever was held back arrives later, in order, as on a network that stalls.
type proxy struct {
	target string
	l      net.Listener
	done   sync.WaitGroup

	mu       sync.Mutex
	change   sync.Cond // of stalled, and of a connection's end
	conns    map[*link]bool
	stalled  bool
	refusing bool
	ended    bool
}

// link is one connection through a proxy, both halves of it.
type link struct {
	client, server net.Conn
	cut            bool
}

func (k *link) close() {
	k.cut = true
	k.client.Close()
	k.server.Close()
}

func startProxy(t testing.TB, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{target: target, l: l, conns: map[*link]bool{}}
	p.change.L = &p.mu
	p.done.Go(p.serve)
	return p
}

func (p *proxy) addr() string { return p.l.Addr().String() }

func (p *proxy) serve() {
	for {
		client, err := p.l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		refusing := p.refusing || p.ended
		p.mu.Unlock()
		if refusing {
			client.Close()
			continue
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			client.Close()
			continue
		}
		k := &link{client: client, server: server}
		p.mu.Lock()
		p.conns[k] = true
		p.mu.Unlock()
		p.done.Go(func() { p.pipe(k, server, client) })
		p.done.Go(func() { p.pipe(k, client, server) })
	}
}

func (p *proxy) pipe(k *link, to, from net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		for p.stalled && !k.cut && !p.ended {
			p.change.Wait()
		}
		p.mu.Unlock()
		if n > 0 {
			if _, failed := to.Write(buf[:n]); failed != nil {
				err = failed
			}
		}
		if err != nil {
			break
		}
	}
	p.mu.Lock()
	k.close()
	delete(p.conns, k)
	p.change.Broadcast()
	p.mu.Unlock()
}

// cut ends every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.conns {
		k.close()
	}
	p.change.Broadcast()
}

// set says whether bytes are held back, and whether new connections are refused.
func (p *proxy) set(stalled, refusing bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stalled, p.refusing = stalled, refusing
	p.change.Broadcast()
}

func (p *proxy) stop() {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.l.Close()
	p.cut()
	p.done.Wait()
}
