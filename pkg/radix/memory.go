package radix

import (
	"sync"
	"unsafe"
)

// memory lists what an index has mapped, to be given back when the index is collected.
type memory struct {
	regions  [][]byte
	touches  sync.WaitGroup // goroutines that touch a part of one
	touching sync.Mutex     // one at a time, for the writer needs a processor too
}

// array is a growing array of values without pointers. While it is small it lives on the Go heap and is copied as it grows.
// A large one lives in reserved address space, grows in place, and touches a page when it first needs it; where the system
// has no such thing, it stays on the heap.
type array[T any] struct {
	s      []T
	mapped []byte // the reserved region, if any
	one    bool   // an index has one of it
}

// How many bytes an array has before it is mapped. What an array on the heap leaves behind each time it grows is given back to the system
// later, in the background, and each piece of it interrupts the readers. But a mapping takes whole huge pages.
const (
	mapOne  = 256 << 10 // of what an index has one
	mapMany = 4 << 20   // of what each rank may have one
)

const (
	reserve    = 32 << 30 // address space of one mapping; less if the system refuses
	growMapped = 256 << 10
	hugePage   = 2 << 20
)

// grow makes at least n elements, and on the heap spare ones as well. It reports whether they have moved; their number may have
// changed in either case.
func (a *array[T]) grow(m *memory, n, spare int) (moved bool) {
	if n <= len(a.s) {
		return false
	}
	size := int(unsafe.Sizeof(*new(T)))
	from := mapMany
	if a.one {
		from = mapOne
	}
	if a.mapped == nil && n*size >= from {
		if region := reserveMemory(max(reserve, 2*n*size), n*size); region != nil {
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
	bytes := min((n*size+growMapped-1)/growMapped*growMapped, len(a.mapped))
	m.touchSoon(a.mapped[len(a.s)*size : bytes])
	s := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(a.mapped))), bytes/size)
	if moved {
		copy(s, a.s)
	}
	a.s = s
	return moved
}

// touchSoon has a goroutine touch the part of a mapping by which it has grown, if that is large. A page that is touched for the first
// time stops whoever does it while the system clears it, and for milliseconds where a host gives memory to a virtual machine only then.
func (m *memory) touchSoon(part []byte) {
	if len(part) > growMapped {
		m.touches.Go(func() {
			m.touching.Lock()
			defer m.touching.Unlock()
			touchMemory(part)
		})
	}
}

// bytes is what the array takes of memory, as far as it has been used.
func (a *array[T]) bytes() int64 { return int64(len(a.s)) * int64(unsafe.Sizeof(*new(T))) }
