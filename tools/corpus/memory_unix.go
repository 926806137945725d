//go:build unix

package corpus

import (
	"fmt"
	"math"
	"unsafe"

	"golang.org/x/sys/unix"
)

// array returns n zero hashes outside of the Go heap. Close of the reader frees the memory.
func array[T ~uint64](r *Reader, n uint64) ([]T, error) {
	if n == 0 {
		return nil, nil
	}
	if n > math.MaxInt/8 {
		return nil, fmt.Errorf("allocate %d hashes: larger than the address space", n)
	}
	b, err := unix.Mmap(-1, 0, int(n)*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("allocate %d bytes: %w", n*8, err)
	}
	adviseHuge(b)
	r.free = append(r.free, func() error { return unix.Munmap(b) })
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), int(n)), nil
}
