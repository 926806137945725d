//go:build amd64 && !race

package radix

// Words that readers load atomically while the writer stores them, each under a node's version. Stores on amd64 become
// visible in order, and the compiler keeps the order of stores and atomic operations, so that plain ones will do.

func put32(p *uint32, v uint32) { *p = v }
func put64(p *uint64, v uint64) { *p = v }

// sameRun counts the leading words that are equal, up to len(b), which is at most len(a). Loads on amd64 are performed in
// order, so that plain ones before an atomic load of the version will do. It asks for what comes a while before it
// compares it: a long prompt is read at the speed of memory, and that is what its time is.
//
//go:noescape
func sameRun(a, b []uint64) int
