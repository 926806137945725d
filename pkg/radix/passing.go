package radix

import (
	"runtime"
	"sync/atomic"
)

// passing lets readers pass the writer if the nodes they read change with nearly every event. An example is many ranks
// that store the same prompt one after the other: a walk would fail hundreds of times. A reader with a failed walk
// requests to pass. Between two events, the writer waits for such readers for the duration of a walk.
type passing struct {
	_       [64]byte     // readers write here: no other field shares the cache line
	readers atomic.Int32 // waiting readers
	_       [60]byte
	busy    int // of the writer: events to apply before the next wait
}

const (
	passYields = 16      // failed walks after which a reader yields to other goroutines, such as the writer
	passLooks  = 1 << 13 // checks of the writer for waiting readers: some 4 µs
	passEvents = 64      // events between two waits after a wait in vain
)

// turn is the state of a reader for a query.
type turn struct {
	failures int
	asking   bool
}

// failed records a walk that the writer disturbed.
func (t *turn) failed(p *passing) {
	t.failures++
	if t.failures%passYields == 0 {
		t.done(p) // the writer must not wait for a reader that does not run
		runtime.Gosched()
	} else if !t.asking {
		t.asking = true
		p.readers.Add(1)
	}
}

// done ends the request to pass.
func (t *turn) done(p *passing) {
	if t.asking {
		t.asking = false
		p.readers.Add(-1)
	}
}

// letPass waits for waiting readers. The writer calls it while no node is half changed. A reader that is suspended
// during a request only causes an occasional wait.
func (p *passing) letPass() {
	if p.busy > 0 {
		p.busy--
		return
	}
	for range passLooks {
		if p.readers.Load() == 0 {
			return
		}
	}
	p.busy = passEvents
}
