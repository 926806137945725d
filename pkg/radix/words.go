package radix

import "sync/atomic"

// sameRunAtomic returns the number of equal leading words, up to len(b), which is at most len(a).
func sameRunAtomic(a, b []uint64) int {
	a = a[:len(b)]
	for i := range b {
		if atomic.LoadUint64(&a[i]) != b[i] {
			return i
		}
	}
	return len(b)
}
