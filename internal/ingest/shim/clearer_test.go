package shim

import (
	"maps"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// once is a decoder that reports a stored block only once until a removal or clear.
type once struct {
	held map[events.BlockHash]bool
}

func (o once) forget() { clear(o.held) }

func (o once) decode(payload []byte) (events.Message, error) {
	m, err := decodeWords(payload)
	m.Events = slices.DeleteFunc(m.Events, func(e events.Event) bool {
		again := e.Kind == events.Stored && o.held[e.Blocks[0]]
		o.held[e.Blocks[0]] = e.Kind == events.Stored
		return again
	})
	return m, err
}

func newOnce() Whole {
	o := once{map[events.BlockHash]bool{}}
	return Whole{Decode: o.decode, Forget: o.forget}
}

// TestClearsTellTheDecoder checks that, after a clear within an incarnation, caused by a gap or an undecodable message,
// blocks that the decoder has already reported are stored again.
func TestClearsTellTheDecoder(t *testing.T) {
	for name, said := range map[string][]string{"gap": {"life1 +1", "", "life1 +1 +2"},
		"unreadable": {"life1 +1", "life1 ?", "life1 +1 +2"}} {
		log, feed := newMemory(), make(chan Frame, len(said))
		for seq, payload := range said {
			if payload != "" { // otherwise the message is lost
				feed <- Frame{Seq: events.EngineSeq(seq), Payload: []byte(payload)}
			}
		}
		close(feed)
		if err := Run(t.Context(), Config{Feed: feed, Decoder: newOnce(), Log: log,
			Identity: Identity{Model: "m", BlockSize: 16}, ClearUnreadable: true}); err != nil {
			t.Fatal(err)
		}
		if held := slices.Sorted(maps.Keys(log.held)); !slices.Equal(held, []events.BlockHash{1, 2}) {
			t.Errorf("%s: the log has %v", name, held)
		}
	}
}
