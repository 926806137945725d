package shim

import (
	"bytes"
	"context"
	"encoding/binary"
	"runtime"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// largeMessages returns messages of about the given size, with their numbers of events.
func largeMessages(size int) map[string]struct {
	payload []byte
	events  int
} {
	list := func(n int, event []byte) []byte {
		head := binary.BigEndian.AppendUint32([]byte{0x93, 0, 0xdd}, uint32(n))
		return append(append(head, bytes.Repeat(event, n)...), 0)
	}
	clear := msgp.AppendStr([]byte{0x91}, "AllBlocksCleared")
	remove := append(msgp.AppendStr([]byte{0x92}, "BlockRemoved"), 0x91, 7)
	store := append(msgp.AppendStr([]byte{0x95}, "BlockStored"), 0x91, 7, msgp.CodeNil, 0x92, 1, 2, 2)
	names := binary.BigEndian.AppendUint32(msgp.AppendStr([]byte{0x92}, "BlockRemoved"), uint32(size))
	names = slices.Insert(names, len(names)-4, 0xdd)
	return map[string]struct {
		payload []byte
		events  int
	}{
		"clears":      {list(size/len(clear), clear), size / len(clear)},
		"removals":    {list(size/len(remove), remove), size / len(remove)},
		"stores":      {list(size/len(store), store), size / len(store)},
		"one removal": {list(1, append(names, bytes.Repeat([]byte{7}, size)...)), size / events.MaxBlocksPerEvent},
	}
}

// TestLargeMessagesTakeLittleMemory checks that the decoded events of a message wait in parts, for any kind of large
// message. A killed shim continues between two batches of the message, and the last batch has the message's cursor.
func TestLargeMessagesTakeLittleMemory(t *testing.T) {
	testkit.Sequential(t)
	const size = 8 << 20
	for name, large := range largeMessages(size) {
		t.Run(name, func(t *testing.T) {
			frame := Frame{Seq: 5, Payload: large.payload}
			first := Frame{Seq: 4, Payload: []byte("\x93\x00\x91\x91\xb0AllBlocksCleared\x00")}
			want := events.Cursor{Known: true, Seq: 5, Digest: events.PayloadDigest(large.payload)}
			log := Published{Found: true, Reached: Reached{Incarnation: 9, LastID: 1,
				Cursor: events.Cursor{Known: true, Seq: 4, Digest: first.digest()}}}
			before, grown, busy := liveHeap(), 0, 0
			for lives := 0; log.Cursor != want; lives++ {
				m := NewMachine(Identity{Model: "m", BlockSize: 2}, Limits{}, true, newDecoder(t))
				m.Recovered(log, 1)
				m.Connected()
				if from, ok := wantsReplay(m); !ok || from != 4 {
					t.Fatalf("a replay from %d, %v", from, ok)
				}
				m.Replayed(first, 1)
				m.Replayed(frame, 1)
				for flights := 0; lives > 2 || flights < 2; flights++ { // the first lives end in the middle
					r, err := m.Advance(true)
					if err != nil {
						t.Fatal(err)
					}
					if m.Busy() {
						busy++
					}
					if r.Flight == nil {
						break
					}
					if flights%16 == 0 {
						grown = max(grown, liveHeap()-before)
					}
					for _, data := range r.Flight {
						var b events.Batch
						err := events.DecodeBatch(data, &b)
						if err != nil || b.Incarnation != 9 || b.FirstID != log.LastID+1 {
							t.Fatalf("incarnation %d, events from %d on after event %d, %v", b.Incarnation, b.FirstID,
								log.LastID, err)
						}
						log.LastID, log.Cursor = b.LastID(), b.Cursor
						if c := b.Cursor; c != want && (c.Seq != 4 || uint64(c.Partial) != uint64(log.LastID)-1) {
							t.Fatalf("event %d has cursor %+v", log.LastID, c)
						}
					}
					m.Flushed()
				}
				if lives > 2 && m.Counts().Gaps+m.Counts().Restarts > 0 {
					t.Fatalf("%+v", m.Counts())
				}
			}
			if int(log.LastID) != 1+large.events {
				t.Errorf("%d events, want %d", log.LastID-1, large.events)
			}
			if busy == 0 {
				t.Error("the message was queued at once")
			}
			if grown > 3*size {
				t.Errorf("a message of %d MiB needs %d MiB", size>>20, grown>>20)
			}
			runtime.KeepAlive(large.payload)
		})
	}
}

func liveHeap() int {
	var s runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&s)
	return int(s.HeapAlloc)
}

// TestSnapshotsAndHeldMessagesTakeLittleMemory processes large messages, held until the end of a replay with a
// snapshot, and the messages of the snapshot. Other calls in between do not change the order.
func TestSnapshotsAndHeldMessagesTakeLittleMemory(t *testing.T) {
	testkit.Sequential(t)
	const size = 4 << 20
	large := largeMessages(size)["clears"]
	m := NewMachine(Identity{Model: "m", BlockSize: 2}, Limits{}, true, newDecoder(t))
	m.UseSnapshots()
	m.Recovered(Published{}, 1)
	m.Connected()
	if _, ok := wantsReplay(m); !ok {
		t.Fatal("no replay is wanted")
	}
	m.Live(Frame{Seq: 7, Payload: large.payload}, 1)
	m.Live(Frame{Seq: 8, Payload: large.payload}, 1)
	before, grown := liveHeap(), 0
	m.ReplayedWhole(Snapshot{Next: 7, Payloads: [][]byte{large.payload, large.payload}}, 1)
	m.Verify()
	m.Gone()
	total := 0
	for {
		r, err := m.Advance(true)
		if err != nil {
			t.Fatal(err)
		}
		if r.Flight == nil {
			break
		}
		for _, data := range r.Flight {
			var b events.Batch
			if err := events.DecodeBatch(data, &b); err != nil {
				t.Fatal(err)
			}
			if total += len(b.Events); b.Cursor.Known && (b.Cursor.Seq < 6 || b.Cursor.Seq > 8) {
				t.Fatalf("a cursor %+v", b.Cursor)
			}
			if last := b.Events[len(b.Events)-1]; (last.Reason == events.ReasonEngineGone) != (total > 4*large.events+1) {
				t.Fatalf("event %d of %d is %+v", total, 4*large.events, last)
			}
		}
		grown = max(grown, liveHeap()-before)
		m.Flushed()
	}
	if total != 4*large.events+3 || m.Busy() { // the clear of the incarnation, and two clears of the gone engine
		t.Errorf("%d events, want %d", total, 4*large.events+3)
	}
	if grown > 4*size {
		t.Errorf("four messages of %d MiB need %d MiB", size>>20, grown>>20)
	}
}

// TestLargeFramesWaitOutsideTheFeed checks that at most a single large frame waits in a feed. Small frames wait
// together.
func TestLargeFramesWaitOutsideTheFeed(t *testing.T) {
	for size, most := range map[int]int{largeMessage: 1, 100: 64} {
		ctx, cancel := context.WithCancel(t.Context())
		feed, given := make(chan Frame, 64), make(chan int, 1000)
		go func() {
			for ctx.Err() == nil {
				given <- size
				Give(ctx, feed, Frame{Payload: make([]byte, size)})
			}
			close(feed)
		}()
		r := &runner{feed: feed, machine: NewMachine(Identity{"m", 16}, Limits{}, false, oneBlock)}
		r.machine.Recovered(Published{}, 1)
		for range 3 {
			f, ok := <-r.feed
			if r.fed(f, ok); r.ended {
				t.Fatal("the feed has ended")
			}
			for range 100 {
				runtime.Gosched()
			}
			if n := len(feed); n > most {
				t.Errorf("%d more of %d bytes wait", n, size)
			}
		}
		cancel()
		for range feed {
		}
		if n := len(given); n > 3+most+1 {
			t.Errorf("%d frames of %d bytes are given", n, size)
		}
	}
}
