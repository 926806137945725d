package cli

import (
	"testing"
	"time"
)

// TestGrowth: an idle process collects often. A busy process collects at most every four seconds, unless it has 128 MiB
// of garbage.
func TestGrowth(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		live, allocated uint64
		in              time.Duration
		want            int
	}{
		{0, 0, time.Second, 100},                    // the start
		{4 * mib, mib, time.Minute, 100},            // idle: 4 MiB of garbage
		{16 * mib, mib, time.Minute, 25},            //
		{16 * mib, 16 * mib, 4 * time.Second, 100},  // four seconds of allocations
		{16 * mib, 16 * mib, time.Second, 400},      // never more than five times its size
		{64 * mib, 1024 * mib, time.Second, 200},    // 128 MiB at most
		{1024 * mib, 4096 * mib, time.Second, 100},  // or its size
		{1024 * mib, 64 * mib, 4 * time.Second, 10}, // a large heap of a quiet process
	} {
		if got := IndexerRoom.growth(c.live, c.allocated, c.in); got != c.want {
			t.Errorf("%d bytes live, %d allocated in %v: %d %%, want %d", c.live, c.allocated, c.in, got, c.want)
		}
	}
}
