package node

import (
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestUnreadableMessage has an engine say what cannot be read to a shim that clears its rank then: nobody is credited
// with what may have gone then, also after the shim was started again, and what the engine says next is believed.
func TestUnreadableMessage(t *testing.T) {
	w := newSite(t)
	w.strict = true
	w.start()
	stop := w.startShim()
	w.grow(3)
	w.awaitAll()
	awaitNothing := func() {
		t.Helper()
		for {
			a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
			w.must(err)
			if len(a.Workers) == 0 {
				return
			}
			select {
			case <-time.After(10 * time.Millisecond):
			case <-w.ctx.Done():
				t.Fatalf("still credited: %+v", a)
			}
		}
	}
	w.must(w.engine.Garble())
	awaitNothing()
	stop()
	w.must(w.engine.Garble()) // while nobody listens: the replay has it
	w.startShim()
	awaitNothing()
	w.must(w.engine.Clear())
	w.grow(2) // with all that came before it
	w.awaitAll()
}
