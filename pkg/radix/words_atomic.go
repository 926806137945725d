//go:build !amd64 || race

package radix

import "sync/atomic"

// Words that readers load atomically while the writer stores them, each under a node's version.

func put32(p *uint32, v uint32) { atomic.StoreUint32(p, v) }
func put64(p *uint64, v uint64) { atomic.StoreUint64(p, v) }

func sameRun(a, b []uint64) int { return sameRunAtomic(a, b) }
