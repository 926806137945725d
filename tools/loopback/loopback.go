// Package loopback reserves fixed addresses for tests of servers that stop and restart.
//
// A port from the system (port 0) is free again after the server stops, so another server or connection may get the
// port before the restart. [Reserve] selects a port below the system's range (Linux: net.ipv4.ip_local_port_range,
// 32768 to 60999). During the test, a UDP socket on the same port blocks the port for other processes with Reserve.
package loopback

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// Reserve returns a HOST:PORT of 127.0.0.1 without a listener, reserved until the end of the test. Only the test's
// goroutine may call Reserve.
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

// tryRow reserves n consecutive ports from first, or no port.
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
		// No process may listen at the port. A trial listener would be wrong: a process that another test starts at the same
		// moment inherits a copy of the socket, and the port stays in use.
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
