//go:build judges

package torture

import (
	"net"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/tools/loopback"
)

// proxy carries TCP connections to a target, and simulates a bad network: it can close all connections, delay all bytes
// for a while, and refuse connections for a while. Delayed bytes arrive later in order, as on a stalled network.
type proxy struct {
	target string
	at     string
	done   sync.WaitGroup

	mu       sync.Mutex
	l        net.Listener // nil without a listener
	change   sync.Cond    // of stalled, and of a connection's end
	conns    map[*link]bool
	stalled  bool
	refusing bool
	ended    bool
}

// link is both halves of a connection through a proxy.
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
	p := &proxy{target: target, at: loopback.Reserve(t), conns: map[*link]bool{}}
	p.change.L = &p.mu
	if err := p.open(); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *proxy) addr() string { return p.at }

// open starts the listener, if not running.
func (p *proxy) open() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.l != nil || p.ended {
		return nil
	}
	l, err := net.Listen("tcp", p.at)
	if err != nil {
		return err
	}
	p.l = l
	p.done.Go(func() { p.serve(l) })
	return nil
}

// leave closes all connections and the listener, as the end of a process does.
func (p *proxy) leave() {
	p.mu.Lock()
	if p.l != nil {
		p.l.Close()
		p.l = nil
	}
	p.mu.Unlock()
	p.cut()
}

func (p *proxy) serve(l net.Listener) {
	for {
		client, err := l.Accept()
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

// set sets whether bytes are delayed, and whether new connections are refused.
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
	p.leave()
	p.done.Wait()
}
