package radix

import (
	"runtime"
	"sync/atomic"
)

// passing is how a reader gets by where the nodes that it reads change with nearly every event, as when many ranks
// store the same prompt one after the other: there its walk would fail hundreds of times. A reader whose walk has
// failed asks to pass, and between two events the writer waits for those who ask, which is for a walk.
type passing struct {
	_       [64]byte     // readers write here: no other field shares the cache line
	readers atomic.Int32 // who ask
	_       [60]byte
	busy    int // the writer's: events that it applies before it waits again
}

const (
	passYields = 16      // after so many failed walks a reader lets other goroutines run, the writer among them
	passLooks  = 1 << 13 // how often the writer looks whether all have passed: some 4 µs
	passEvents = 64      // how many events it applies before the next wait when one was in vain
)

// turn is a reader's place there, for one query.
type turn struct {
	failures int
	asking   bool
}

// failed is told of a walk in whose way the writer has been.
func (t *turn) failed(p *passing) {
	t.failures++
	if t.failures%passYields == 0 {
		t.done(p) // nobody shall wait for who does not run
		runtime.Gosched()
	} else if !t.asking {
		t.asking = true
		p.readers.Add(1)
	}
}

// done is told that no walk follows.
func (t *turn) done(p *passing) {
	if t.asking {
		t.asking = false
		p.readers.Add(-1)
	}
}

// letPass is the writer's, when no node is half changed. A reader that was stopped while it asked costs it a wait now
// and then, and no more.
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
