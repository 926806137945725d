package harness

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Link is a TCP proxy with a delay, which a test can cut.
type Link struct {
	Addr string

	to    string
	delay time.Duration // of each direction

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
}

// StartLink runs a link to an address until the end of the test.
func StartLink(t testing.TB, to string, delay time.Duration) *Link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &Link{Addr: listener.Addr().String(), to: to, delay: delay, conns: map[net.Conn]bool{}}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			all.Go(func() { l.serve(from) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		l.Cut()
		all.Wait()
	})
	return l
}

// Cut ends all connections, and ends new ones at once.
func (l *Link) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = true
	for c := range l.conns {
		c.Close()
	}
}

// Heal ends a cut.
func (l *Link) Heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
}

// open adds a connection, or closes it while the link is cut.
func (l *Link) open(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		c.Close()
		return false
	}
	l.conns[c] = true
	return true
}

func (l *Link) close(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
	c.Close()
}

func (l *Link) serve(from net.Conn) {
	if !l.open(from) {
		return
	}
	defer l.close(from)
	to, err := net.Dial("tcp", l.to)
	if err != nil || !l.open(to) {
		return
	}
	defer l.close(to)
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{from, to}, {to, from}} {
		both.Go(func() {
			l.carry(way[0], way[1])
			from.Close()
			to.Close()
		})
	}
	both.Wait()
}

// carry copies one direction. Bytes wait for the delay in a queue of bounded size.
func (l *Link) carry(from io.Reader, to io.Writer) {
	type piece struct {
		data []byte
		due  time.Time
	}
	queue, broken := make(chan piece, 1024), make(chan struct{})
	var sender sync.WaitGroup
	sender.Go(func() {
		defer close(broken)
		for p := range queue {
			time.Sleep(time.Until(p.due))
			if _, err := to.Write(p.data); err != nil {
				return
			}
		}
	})
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			select {
			case queue <- piece{append([]byte{}, buf[:n]...), time.Now().Add(l.delay)}:
			case <-broken:
				err = io.ErrClosedPipe
			}
		}
		if err != nil {
			break
		}
	}
	close(queue)
	sender.Wait()
}
