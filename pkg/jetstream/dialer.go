package jetstream

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"time"
)

// dialer dials NATS servers. nats.go holds its lock during a dial, so calls such as Close wait for the dial. dialer
// therefore bounds the wait for the lookup of a name too, which nats.go does not. The wait and the dial have timeout
// each.
type dialer struct {
	timeout  time.Duration
	resolver *net.Resolver // of names; nil is [net.DefaultResolver]
}

// lookupFor is the longest time of a lookup. It is longer than the wait of a dial: a resolver with a dead name server
// needs five seconds and more. The next dial joins the running lookup.
const lookupFor = 30 * time.Second

// Dial connects to an address of a host, in a random order of the addresses. Each address has an equal share of the
// remaining time.
func (d dialer) Dial(network, address string) (conn net.Conn, err error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	addrs, err := d.lookup(host)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	rand.Shuffle(len(addrs), func(i, j int) { addrs[i], addrs[j] = addrs[j], addrs[i] })
	deadline := time.Now().Add(d.timeout)
	for i, addr := range addrs {
		one := net.Dialer{Timeout: time.Until(deadline) / time.Duration(len(addrs)-i)}
		if conn, err = one.Dial(network, net.JoinHostPort(addr.String(), port)); err == nil {
			return conn, nil
		}
	}
	return nil, err
}

// lookup returns the addresses of a host, at least one.
func (d dialer) lookup(host string) ([]net.IPAddr, error) {
	type result struct {
		addrs []net.IPAddr
		err   error
	}
	done, resolver := make(chan result, 1), cmp.Or(d.resolver, net.DefaultResolver)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), lookupFor)
		defer cancel()
		addrs, err := resolver.LookupIPAddr(ctx, host) // joins a lookup of the same name
		if err == nil && len(addrs) == 0 {
			err = &net.DNSError{Err: "the name has no address", Name: host, IsNotFound: true}
		}
		done <- result{addrs, err}
	}()
	select {
	case r := <-done:
		return r.addrs, r.err
	case <-time.After(d.timeout):
		return nil, &net.DNSError{Err: fmt.Sprintf("no answer after %v", d.timeout), Name: host, IsTimeout: true}
	}
}
