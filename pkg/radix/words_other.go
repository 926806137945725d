//go:build !amd64 || race

package radix

import "sync/atomic"

// Words that readers load atomically while the writer stores them, each under a node's version.

func put32(p *uint32, v uint32) { atomic.StoreUint32(p, v) }
func put64(p *uint64, v uint64) { atomic.StoreUint64(p, v) }

// sameRun counts the leading words that are equal, up to len(b), which is at most len(a).
func sameRun(a, b []uint64) int {
	a = a[:len(b)]
	for i := range b {
		if atomic.LoadUint64(&a[i]) != b[i] {
			return i
		}
	}
	return len(b)
}
