package radix

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestReaderAsksToPass keeps a node half changed, as a writer would, until a reader requests to pass. The reader then
// gets an answer and ends the request.
func TestReaderAsksToPass(t *testing.T) {
	x := New(Config{})
	id := x.AddRank(0, 16)
	doc := []events.LocalHash{1, 2, 3}
	x.Apply(id, 0, []events.Event{{Kind: events.Stored, Tier: events.Device, Locals: doc,
		Blocks: []events.BlockHash{11, 12, 13}}})
	_, at := x.v.edge(x.v.root(0), 1)
	version := &x.v.nodes[at].version
	atomic.AddUint32(version, 1)
	var a Answer
	done := make(chan struct{})
	go func() {
		x.Match(0, doc, nil, &a)
		close(done)
	}()
	for x.passing.readers.Load() == 0 {
		runtime.Gosched()
	}
	atomic.AddUint32(version, 1)
	<-done
	if len(a.Ranks) != 1 || a.Ranks[0].Depth[device] != 3 {
		t.Errorf("ranks %v, want one with 3 blocks", a.Ranks)
	}
	if n := x.passing.readers.Load(); n != 0 {
		t.Errorf("%d readers request to pass, want none", n)
	}
}

// TestWriterWaitsInVain has a reader that never continues. The writer waits at most before one of passEvents events.
func TestWriterWaitsInVain(t *testing.T) {
	var p passing
	var stopped turn
	stopped.failed(&p)
	waits := 0
	for range 10 * (passEvents + 1) {
		if p.busy == 0 {
			waits++
		}
		p.letPass()
	}
	if waits != 10 {
		t.Errorf("the writer waited %d times, want 10", waits)
	}
	stopped.done(&p)
	for p.busy > 0 {
		p.letPass()
	}
	if p.letPass(); p.busy != 0 {
		t.Errorf("busy for %d events without a request", p.busy)
	}
}
