package jetstream

import (
	"context"
	"math/rand/v2"
	"net"
	"time"
)

// dialer dials NATS servers. nats.go holds its lock during a dial, so calls such as Close wait for the dial. dialer
// therefore bounds the lookup of a name too, which nats.go does not.
type dialer struct{ timeout time.Duration }

// Dial connects to an address of a host, in a random order of the addresses. Each address has an equal share of the
// remaining time.
func (d dialer) Dial(network, address string) (conn net.Conn, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), d.timeout)
	defer cancel()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host) // LookupHost may ignore ctx
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	rand.Shuffle(len(addrs), func(i, j int) { addrs[i], addrs[j] = addrs[j], addrs[i] })
	deadline, _ := ctx.Deadline()
	for i, addr := range addrs {
		one := net.Dialer{Timeout: time.Until(deadline) / time.Duration(len(addrs)-i)}
		if conn, err = one.DialContext(ctx, network, net.JoinHostPort(addr.Unmap().String(), port)); err == nil {
			return conn, nil
		}
	}
	return nil, err
}
