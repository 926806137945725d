package jetstream

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/nats-io/nats-server/v2/server"
)

// TestCloseDuringALookup: Close returns while the lookup of a server's name hangs, as for a stopped container. Without
// the limit of the dialer, Close would wait for the lookup.
func TestCloseDuringALookup(t *testing.T) {
	t.Parallel()
	hang, asked := make(chan struct{}), make(chan struct{}, 1)
	defer close(hang)
	resolver := &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		select {
		case asked <- struct{}{}:
		default:
		}
		<-hang
		return nil, net.ErrClosed
	}}
	srv := plainServer(t, &server.Options{JetStream: true, StoreDir: t.TempDir()})
	c, err := Connect(ctxFor(t), ConnOptions{URLs: []string{srv.ClientURL(), "nats://stopped.example:4222"},
		Wait: true, ConnectTimeout: 100 * time.Millisecond, resolver: resolver})
	if err != nil {
		t.Fatal(err)
	}
	srv.Shutdown()
	<-asked
	c.Close()
}

// TestSlowLookup: a dial that gives up does not end the lookup. Later dials join the lookup, so a resolver that needs
// longer than a dial may wait is no obstacle.
func TestSlowLookup(t *testing.T) {
	t.Parallel()
	answer, asked := make(chan struct{}), make(chan struct{}, 100)
	resolver := &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		asked <- struct{}{}
		<-answer
		return nil, net.ErrClosed
	}}
	for range 3 {
		_, err := (dialer{50 * time.Millisecond, resolver}).lookup("slow.example")
		if dns, is := errors.AsType[*net.DNSError](err); !is || !dns.IsTimeout {
			t.Fatalf("a lookup without an answer: %v", err)
		}
	}
	<-asked
	if n := 1 + len(asked); n > 2 { // A and AAAA
		t.Errorf("three dials sent %d queries", n)
	}
	close(answer)
	_, err := (dialer{time.Minute, resolver}).lookup("slow.example")
	if dns, is := errors.AsType[*net.DNSError](err); !is || dns.IsTimeout {
		t.Errorf("%v, want the answer of the resolver", err)
	}
}

// TestDialerTriesAllAddresses: a name with a dead and a live address leads to the live one.
func TestDialerTriesAllAddresses(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // localhost may also be ::1
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for range 10 {
		conn, err := dialer{timeout: time.Minute}.Dial("tcp", net.JoinHostPort("localhost", port))
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
	if _, err := (dialer{timeout: time.Minute}).Dial("tcp", loopback.Reserve(t)); err == nil {
		t.Error("a port without a listener has a connection")
	}
	if addrs, err := (dialer{timeout: time.Minute}).lookup("fe80::1%lo"); err != nil || addrs[0].String() != "fe80::1%lo" {
		t.Errorf("an address with a zone: %v, %v", addrs, err)
	}
	if _, err := (dialer{timeout: time.Minute}).Dial("tcp", "127.0.0.1"); err == nil {
		t.Error("an address without a port has a connection")
	}
}
