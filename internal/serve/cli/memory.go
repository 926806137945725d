package cli

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

// startTime is the time after which the start of a program has ended.
const startTime = 5 * time.Second

// Bounds of what a process allocates between two garbage collections.
const (
	leastRoom = 4 << 20
	mostRoom  = 128 << 20       // or as much as is in use, if that is more
	roomFor   = 4 * time.Second // of allocations at the rate since the last collection
)

// SaveMemory keeps the memory of a process small that runs for long.
//
// The heap grows between two garbage collections by what the process allocates in four seconds: by 4 MiB in a process
// that does little, and by 128 MiB or by its size in one that does much. Go would let it double, which is too often for
// a small heap and costs memory in an idle process. GOGC in the environment turns this off. The index is not in the
// heap.
//
// After its start the process unmaps its program, of which the start has used nearly all.
func SaveMemory() { saveMemory() }

var saveMemory = sync.OnceFunc(func() {
	if os.Getenv("GOGC") == "" {
		new(heapTuner).collected()
	}
	time.AfterFunc(startTime, unmapProgram)
})

// heapTuner sets the garbage collector's target after each collection. The finalizers' goroutine owns it.
type heapTuner struct {
	at        time.Time // of the last collection; zero before the first
	allocated uint64    // bytes, since the start, at that time
}

// collectible is garbage at the next collection.
type collectible struct{ _ [32]byte }

func (h *heapTuner) collected() {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	live, allocated, now := sample[0].Value.Uint64(), sample[1].Value.Uint64(), time.Now()
	debug.SetGCPercent(growth(live, allocated-h.allocated, now.Sub(h.at)))
	h.allocated, h.at = allocated, now
	runtime.SetFinalizer(new(collectible), func(*collectible) { h.collected() })
}

// growth returns by how many percent a heap may grow, of which live bytes are in use and which has allocated so many
// bytes in the given time.
func growth(live, allocated uint64, in time.Duration) int {
	room := float64(allocated) * roomFor.Seconds() / max(in.Seconds(), 1e-3)
	room = min(max(room, leastRoom), max(mostRoom, float64(live)))
	return int(min(max(100*room/float64(max(live, leastRoom)), 10), 400))
}
