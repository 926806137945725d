// Package loopback gives tests addresses for servers that stop and start again where they were.
//
// A port that the system chose (port 0) is anybody's as soon as its server stops: another test's server or connection
// may be given it before it starts again. [Reserve] takes one from below those that the system chooses from (Linux:
// net.ipv4.ip_local_port_range, 32768 to 60999), and holds the same port of UDP for as long as the test lasts, so that
// no other process that reserves is given it either.
package loopback

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// Reserve returns a HOST:PORT of 127.0.0.1 on which nobody listens. It is the test's until that ends. It is called from
// the test's goroutine.
func Reserve(t testing.TB) string {
	t.Helper()
	return ReserveRow(t, 1)[0]
}

// ReserveRow is [Reserve] for n addresses with consecutive ports.
func ReserveRow(t testing.TB, n int) []string {
	t.Helper()
	for range 1000 {
		if row := tryRow(t, 10_000+rand.IntN(20_000-n), n); row != nil {
			return row
		}
	}
	t.Fatal("no port is free")
	return nil
}

// tryRow reserves n ports from the first on, or none of them.
func tryRow(t testing.TB, first, n int) (row []string) {
	var all []net.PacketConn
	free := func() {
		for _, held := range all {
			_ = held.Close()
		}
	}
	for port := first; port < first+n; port++ {
		addr := fmt.Sprint("127.0.0.1:", port)
		held, err := net.ListenPacket("udp4", addr)
		if err != nil {
			free()
			return nil
		}
		all = append(all, held)
		// Nobody may listen there. It is not tried by listening: a process that another test starts just then would
		// have a copy of the socket for a moment, and the port would stay taken so long.
		if c, err := net.Dial("tcp4", addr); err == nil {
			_ = c.Close()
			free()
			return nil
		}
		row = append(row, addr)
	}
	t.Cleanup(free)
	return row
}
