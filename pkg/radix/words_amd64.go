package radix

// sameRunSSE is sameRunAtomic, faster. Loads on amd64 are performed in order, so that plain ones before an atomic load
// of the version will do. It asks for what comes a while before it compares it: a long prompt is read at the speed of
// memory, and that is what its time is.
//
//go:noescape
func sameRunSSE(a, b []uint64) int
