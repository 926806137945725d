package radix

// sameRunSSE is a faster sameRunAtomic. Loads on amd64 happen in order, so plain loads before an atomic load of the
// version are enough. It prefetches words well before the comparison, because the speed of memory limits the read of a
// long prompt.
//
//go:noescape
func sameRunSSE(a, b []uint64) int
