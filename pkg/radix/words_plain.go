//go:build amd64 && !race

package radix

// Words that readers load atomically while the writer stores them, each under a node's version. Stores on amd64 become
// visible in order, and the compiler keeps the order of stores and atomic operations, so that plain ones will do.

func put32(p *uint32, v uint32) { *p = v }
func put64(p *uint64, v uint64) { *p = v }

// putParts copies parts, which may overlap those that they replace.
func putParts(to, from []part) { copy(to, from) }

func sameRun(a, b []uint64) int { return sameRunSSE(a, b) }
