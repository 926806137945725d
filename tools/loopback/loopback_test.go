package loopback

import (
	"net"
	"strconv"
	"testing"
)

// TestReserveRow: the ports of a row are consecutive, and free.
func TestReserveRow(t *testing.T) {
	first := 0
	for i, addr := range ReserveRow(t, 3) {
		_, port, _ := net.SplitHostPort(addr)
		n, err := strconv.Atoi(port)
		if i == 0 {
			first = n
		}
		if err != nil || n != first+i {
			t.Errorf("port %d of the row is %s", i, addr)
		}
		if l, err := net.Listen("tcp4", addr); err != nil {
			t.Error(err)
		} else {
			l.Close()
		}
	}
}

// TestReserve reserves some addresses. All addresses must differ, allow repeated listeners, and be free after the test.
func TestReserve(t *testing.T) {
	seen := map[string]bool{}
	var last string
	t.Run("while it lasts", func(t *testing.T) {
		for range 100 {
			addr := Reserve(t)
			if seen[addr] {
				t.Fatalf("%s is given twice", addr)
			}
			seen[addr], last = true, addr
			for range 2 {
				l, err := net.Listen("tcp4", addr)
				if err != nil {
					t.Fatal(err)
				}
				l.Close()
			}
		}
		if held, err := net.ListenPacket("udp4", last); err == nil {
			held.Close()
			t.Errorf("%s is not held", last)
		}
	})
	held, err := net.ListenPacket("udp4", last)
	if err != nil {
		t.Fatalf("%s is held for ever: %v", last, err)
	}
	held.Close()
}
