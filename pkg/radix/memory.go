package radix

import (
	"sync"
	"unsafe"
)

// memory lists the mappings of an index. They are unmapped when the index is collected.
type memory struct {
	limits   limits
	regions  [][]byte
	touches  sync.WaitGroup // goroutines that touch a part of a mapping
	touching sync.Mutex     // one goroutine at a time, because the writer needs a processor too
}

// array is a growing array of values without pointers. A small array is on the Go heap, and growth copies it. A large
// array is in reserved address space, grows in place, and touches a page at first use. On systems without reservation,
// it stays on the heap.
type array[T any] struct {
	s      []T
	mapped []byte // the reserved region, if any
}

// limits has the size from which on an array is mapped, and the size of a mapping. The runtime returns the remains of a
// grown heap array to the system later, in the background, and each piece interrupts the readers. But a mapping uses
// whole huge pages.
type limits struct {
	mapped  int // size in bytes from which on an array is mapped
	reserve int // address space of a mapping; less if the system refuses
	step    int // growth of a mapped array in bytes
}

// mappedLimits are the limits of an index with mapped large arrays.
var mappedLimits = limits{mapped: 256 << 10, reserve: 32 << 30, step: 256 << 10}

const hugePage = 2 << 20

// grow extends the array to at least n elements, with spare elements on the heap. It reports whether the elements have
// moved. The length may change in either case.
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

// touchSoon starts a goroutine that touches the new part of a mapping, if the part is large. The first touch of a page
// blocks while the system clears the page. It blocks for milliseconds if a host only then provides memory for a virtual
// machine.
func (m *memory) touchSoon(part []byte) {
	if len(part) > m.limits.step {
		m.touches.Go(func() {
			m.touching.Lock()
			defer m.touching.Unlock()
			touchMemory(part)
		})
	}
}

// bytes returns the used memory of the array.
func (a *array[T]) bytes() int64 { return int64(len(a.s)) * int64(unsafe.Sizeof(*new(T))) }
