//go:build amd64 && !race

package radix

// Words that readers load atomically while the writer stores them, under a node's version. Stores on amd64 become
// visible in order, and the compiler keeps the order of stores and atomic operations, so plain stores are enough.

func put32(p *uint32, v uint32) { *p = v }
func put64(p *uint64, v uint64) { *p = v }

// putParts copies parts. The source and the target may overlap.
func putParts(to, from []part) { copy(to, from) }

func sameRun(a, b []uint64) int { return sameRunSSE(a, b) }
