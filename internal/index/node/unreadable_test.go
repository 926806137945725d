package node

import (
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestUnreadableMessage: an engine sends an unreadable message to a shim that then clears its rank. The rank is
// credited with no possibly removed blocks, also after a restart of the shim, and later messages count again.
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
	w.must(w.engine.Garble()) // while no shim runs: the replay has the message
	w.startShim()
	awaitNothing()
	w.must(w.engine.Clear())
	w.grow(2) // with all earlier blocks
	w.awaitAll()
}

// garbled returns messages that no shim writes, and truncated or changed messages.
func garbled(t *testing.T) map[string][]byte {
	whole, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1 << 60, FirstID: 7, Model: "m", BlockSize: 4,
		Events: []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1, 2}}}})
	if err != nil {
		t.Fatal(err)
	}
	later := slices.Clone(whole)
	later[1] = 99 // the format's version
	return map[string][]byte{"empty": nil, "text": []byte("x"), "an answer": []byte(`{"node":"n","ready":true}`),
		"cut off": whole[:len(whole)-5], "longer": append(slices.Clone(whole), 0), "a later version": later}
}

// TestUnreadableLog: for any unreadable last message of a rank, its shim continues or starts with a new incarnation
// that has all blocks of the engine.
func TestUnreadableLog(t *testing.T) {
	w := newSite(t)
	w.start()
	stop := w.startShim()
	w.grow(3)
	w.awaitAll()
	garble := func(data []byte) {
		t.Helper()
		_, err := w.js.Publish(w.ctx, "kv.v1.test.ev.0.w1.0", data)
		w.must(err)
	}
	poisoned := 0
	for name, data := range garbled(t) {
		before := w.awaitAll().Events["incarnations"]
		garble(data) // while the shim runs: it detects the message at its next publish
		w.grow(1)
		if now := w.awaitAll().Events; now["incarnations"] != before+1 {
			t.Errorf("%s, while the shim runs: incarnations %d, before %d", name, now["incarnations"], before)
		}
		stop()
		garble(data)
		stop = w.startShim()
		w.grow(1)
		poisoned += 2
		if now := w.awaitAll().Events; now["incarnations"] != before+2 || now["poison"] != uint64(poisoned) {
			t.Errorf("%s, while no shim runs: %v, incarnations before %d", name, now, before)
		}
	}
}
