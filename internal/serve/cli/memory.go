package cli

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

// startTime is the time after which the start of a program is complete.
const startTime = 5 * time.Second

// rateOver is the minimum time for measuring a rate of allocations, because a burst is no rate.
const rateOver = time.Second

// Room bounds the allocations between two garbage collections: the allocations in the time For, but at least Least, and
// at most Most or the size of the live heap.
type Room struct {
	Least, Most uint64
	For         time.Duration
}

// Rooms of the programs. A shim has a live heap of a few MiB, which a collection marks in a millisecond.
var (
	IndexerRoom = Room{Least: 4 << 20, Most: 128 << 20, For: 4 * time.Second}
	ShimRoom    = Room{Least: 1 << 20, Most: 32 << 20, For: time.Second / 2}
)

// SaveMemory limits the memory of a long-running process. DESIGN.md contains the reasons and the figures.
//
// Go's default doubles the heap between two garbage collections. Room replaces the default, which collects a small heap
// too often and costs memory in an idle process. GOGC in the environment disables the tuning. The index is outside of
// the heap.
//
// Five seconds later the process unmaps the pages of its program that only the start has used.
func SaveMemory(room Room) {
	saveMemory.Do(func() {
		if os.Getenv("GOGC") == "" {
			(&heapTuner{room: room}).collected()
		}
		time.AfterFunc(startTime, unmapProgram)
	})
}

var saveMemory sync.Once

// LimitProcessors has Go run on at most n processors at once, unless GOMAXPROCS in the environment says otherwise. Each
// processor keeps free memory of its own.
func LimitProcessors(n int) {
	if os.Getenv("GOMAXPROCS") == "" && runtime.GOMAXPROCS(0) > n {
		runtime.GOMAXPROCS(n)
	}
}

// heapTuner sets the garbage collector's target after each collection. The goroutine of the finalizers owns it.
type heapTuner struct {
	room      Room
	from      time.Time // start of the rate's measurement; zero before the first collection
	allocated uint64    // bytes allocated since the start, at that time
}

// collectible is garbage at the next collection.
type collectible struct{ _ [32]byte }

func (h *heapTuner) collected() {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	live, allocated, now := sample[0].Value.Uint64(), sample[1].Value.Uint64(), time.Now()
	in := now.Sub(h.from)
	debug.SetGCPercent(h.room.growth(live, allocated-h.allocated, max(in, rateOver)))
	if in >= rateOver {
		h.allocated, h.from = allocated, now
	}
	runtime.SetFinalizer(new(collectible), func(*collectible) { h.collected() })
}

// growth returns the permitted growth of a heap in percent. live is the size of the heap, and allocated are the bytes
// allocated in the given time.
func (r Room) growth(live, allocated uint64, in time.Duration) int {
	room := float64(allocated) * r.For.Seconds() / in.Seconds()
	room = min(max(room, float64(r.Least)), max(float64(r.Most), float64(live)))
	return int(min(max(100*room/float64(max(live, r.Least)), 10), 400))
}
