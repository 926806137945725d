package jetstream

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// proxy is a TCP connection that can be cut, or drop the bytes of one direction, at a chosen byte.
type proxy struct {
	l      net.Listener
	target string
	deaf   atomic.Bool  // drops the server's bytes
	budget atomic.Int64 // bytes from the client until spent is called; negative: unlimited
	spent  func()       // set before the budget; default: cut

	mu    sync.Mutex
	conns map[net.Conn]struct{}
	done  sync.WaitGroup
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{l: l, target: target, conns: make(map[net.Conn]struct{})}
	p.budget.Store(-1)
	p.spent = p.cut
	p.done.Add(1)
	go p.serve()
	t.Cleanup(func() {
		l.Close()
		p.cut()
		p.done.Wait()
	})
	return p
}

func (p *proxy) url() string { return "nats://" + p.l.Addr().String() }

func (p *proxy) serve() {
	defer p.done.Done()
	for {
		client, err := p.l.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			client.Close()
			continue
		}
		p.mu.Lock()
		p.conns[client], p.conns[server] = struct{}{}, struct{}{}
		p.mu.Unlock()
		p.done.Add(2)
		go p.pipe(server, client, true)
		go p.pipe(client, server, false)
	}
}

func (p *proxy) pipe(to, from net.Conn, up bool) {
	defer p.done.Done()
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		b := buf[:n]
		if up {
			if left := p.budget.Load(); left >= 0 {
				if int64(n) < left {
					p.budget.Add(-int64(n))
				} else {
					_, _ = to.Write(b[:left]) // after a failure, later writes fail too
					b = b[left:]
					p.budget.Store(-1)
					p.spent()
				}
			}
		} else if p.deaf.Load() {
			b = nil
		}
		if len(b) > 0 {
			if _, werr := to.Write(b); werr != nil {
				err = werr
			}
		}
		if err != nil {
			return
		}
	}
}

// cut closes every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
		delete(p.conns, c)
	}
}
