package cli

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
)

// heapRoom is what a process may allocate between two garbage collections if it holds less itself: collections of a
// small heap are rare then, and the memory that they cost is bounded.
const heapRoom = 128 << 20

// GrowHeap has the garbage collector let the heap grow by 128 MiB between two collections, but to five times of what
// is in use at most, where Go would let it double. A greater heap doubles as always. If the environment says GOGC, that
// is done instead. The index is not in this heap.
func GrowHeap() { growHeap() }

var growHeap = sync.OnceFunc(func() {
	if os.Getenv("GOGC") == "" {
		afterCollection()
	}
})

// collected is garbage at the next collection, which then calls afterCollection again.
type collected struct{ _ [32]byte }

func afterCollection() {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	live := uint64(0)
	if sample[0].Value.Kind() == metrics.KindUint64 {
		live = sample[0].Value.Uint64()
	}
	debug.SetGCPercent(growth(live))
	runtime.SetFinalizer(new(collected), func(*collected) { afterCollection() })
}

// growth is by how many percent a heap of so many bytes may grow.
func growth(live uint64) int { return int(min(max(100*heapRoom/max(live, 1), 100), 400)) }
