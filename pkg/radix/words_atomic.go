//go:build !amd64 || race

package radix

import (
	"sync/atomic"
	"unsafe"
)

// Words that readers load atomically while the writer stores them, under a node's version.

func put32(p *uint32, v uint32) { atomic.StoreUint32(p, v) }
func put64(p *uint64, v uint64) { atomic.StoreUint64(p, v) }

// putParts copies parts. The source and the target may overlap.
func putParts(to, from []part) {
	if len(from) > 0 && len(to) > 0 && uintptr(unsafe.Pointer(&to[0])) > uintptr(unsafe.Pointer(&from[0])) {
		for i := len(from) - 1; i >= 0; i-- {
			putPart(&to[i], &from[i])
		}
		return
	}
	for i := range from {
		putPart(&to[i], &from[i])
	}
}

func sameRun(a, b []uint64) int { return sameRunAtomic(a, b) }
