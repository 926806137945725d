package radix

import (
	"sync"
	"unsafe"
)

// memory lists what an index has mapped, to be given back when the index is collected.
type memory struct {
	limits   limits
	regions  [][]byte
	touches  sync.WaitGroup // goroutines that touch a part of one
	touching sync.Mutex     // one at a time, for the writer needs a processor too
}

// array is a growing array of values without pointers. While it is small it lives on the Go heap and is copied as it
// grows. A large one lives in reserved address space, grows in place, and touches a page when it first needs it; where
// the system has no such thing, it stays on the heap.
type array[T any] struct {
	s      []T
	mapped []byte // the reserved region, if any
}

// limits say how large an array is before it is mapped, and what a mapping takes. What an array on the heap leaves
// behind each time it grows is given back to the system later, in the background, and each piece of it interrupts the
// readers. But a mapping takes whole huge pages.
type limits struct {
	mapped  int // bytes from which on an array is
	reserve int // address space of one mapping; less if the system refuses
	step    int // bytes by which a mapped array grows
}

// mappedLimits are those of an index whose large arrays are mapped.
var mappedLimits = limits{mapped: 256 << 10, reserve: 32 << 30, step: 256 << 10}

const hugePage = 2 << 20

// grow makes at least n elements, and on the heap spare ones as well. It reports whether they have moved; their number
// may have changed in either case.
func (a *array[T]) grow(m *memory, n, spare int) (moved bool) {
	if n <= len(a.s) {
		return false
	}
	size := int(unsafe.Sizeof(*new(T)))
	if a.mapped == nil && n*size >= m.limits.mapped {
		if region := reserveMemory(max(m.limits.reserve, 2*n*size), n*size); region != nil {
			m.regions = append(m.regions, region)
			a.mapped, moved = region, true
		}
	}
	if a.mapped == nil || n*size > len(a.mapped) {
		s := make([]T, n+spare)
		copy(s, a.s)
		a.s, a.mapped = s, nil
		return true
	}
	bytes := min((n*size+m.limits.step-1)/m.limits.step*m.limits.step, len(a.mapped))
	m.touchSoon(a.mapped[len(a.s)*size : bytes])
	s := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(a.mapped))), bytes/size)
	if moved {
		copy(s, a.s)
	}
	a.s = s
	return moved
}

// touchSoon has a goroutine touch the part of a mapping by which it has grown, if that is large. A page that is touched
// for the first time stops whoever does it while the system clears it, and for milliseconds where a host gives memory
// to a virtual machine only then.
func (m *memory) touchSoon(part []byte) {
	if len(part) > m.limits.step {
		m.touches.Go(func() {
			m.touching.Lock()
			defer m.touching.Unlock()
			touchMemory(part)
		})
	}
}

// bytes is what the array takes of memory, as far as it has been used.
func (a *array[T]) bytes() int64 { return int64(len(a.s)) * int64(unsafe.Sizeof(*new(T))) }
