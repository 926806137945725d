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
func TestCloseDuringALookup(t *testing.T) { // not parallel: it replaces the resolver of the process
	hang, asked := make(chan struct{}), make(chan struct{}, 1)
	defer func(was *net.Resolver) { net.DefaultResolver = was }(net.DefaultResolver)
	defer close(hang)
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		select {
		case asked <- struct{}{}:
		default:
		}
		<-hang
		return nil, net.ErrClosed
	}}
	srv := plainServer(t, &server.Options{JetStream: true, StoreDir: t.TempDir()})
	c, err := Connect(ctxFor(t), ConnOptions{URLs: []string{srv.ClientURL(), "nats://stopped.example:4222"},
		ConnectTimeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	srv.Shutdown()
	<-asked
	c.Close()
}

// TestSlowLookup: a dial that gives up does not end the lookup. A later dial joins the lookup and connects, so a
// resolver that needs longer than a dial may wait is no obstacle.
func TestSlowLookup(t *testing.T) { // not parallel: it replaces the resolver of the process
	answer, asked := make(chan struct{}), make(chan struct{}, 100)
	defer func(was *net.Resolver) { net.DefaultResolver = was }(net.DefaultResolver)
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		asked <- struct{}{}
		<-answer
		return nil, net.ErrClosed
	}}
	if _, err := (dialer{10 * time.Millisecond}).lookup("slow.example"); err == nil {
		t.Fatal("a lookup without an answer has a result")
	}
	<-asked
	queries := len(asked) // A and AAAA
	done := make(chan error, 1)
	go func() {
		_, err := (dialer{time.Minute}).lookup("slow.example")
		done <- err
	}()
	close(answer)
	dns, is := errors.AsType[*net.DNSError](<-done)
	if !is || dns.IsTimeout || queries > 2 {
		t.Errorf("%v after %d queries, want the result of the first lookup", dns, queries)
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
		conn, err := dialer{time.Minute}.Dial("tcp", net.JoinHostPort("localhost", port))
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
	if _, err := (dialer{time.Minute}).Dial("tcp", loopback.Reserve(t)); err == nil {
		t.Error("a port without a listener has a connection")
	}
	if addrs, err := (dialer{time.Minute}).lookup("fe80::1%lo"); err != nil || addrs[0].String() != "fe80::1%lo" {
		t.Errorf("an address with a zone: %v, %v", addrs, err)
	}
	if _, err := (dialer{time.Minute}).Dial("tcp", "127.0.0.1"); err == nil {
		t.Error("an address without a port has a connection")
	}
}
