//go:build amd64 && !race

package radix

import "unsafe"

// Words that readers load atomically while the writer stores them, each under a node's version. Stores on amd64 become
// visible in order, and the compiler keeps the order of stores and atomic operations, so that plain ones will do.

func put32(p *uint32, v uint32) { *p = v }
func put64(p *uint64, v uint64) { *p = v }

// sameRun counts the leading words that are equal, up to len(b), which is at most len(a). Loads on amd64 are performed in
// order, so that plain ones before an atomic load of the version will do; memequal compares 32 bytes a step.
func sameRun(a, b []uint64) int {
	const step = 32
	i := 0
	for ; i+step <= len(b); i += step {
		if bytesOf(a[i:i+step]) != bytesOf(b[i:i+step]) {
			break
		}
	}
	a = a[:len(b)]
	for i < len(b) && a[i] == b[i] {
		i++
	}
	return i
}

func bytesOf(w []uint64) string {
	return unsafe.String((*byte)(unsafe.Pointer(unsafe.SliceData(w))), len(w)*8)
}
