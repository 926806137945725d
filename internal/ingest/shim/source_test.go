package shim

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// keeper is a source that keeps the last messages of a feed, and all held blocks, a block for every message.
type keeper struct {
	mu    sync.Mutex
	last  events.EngineSeq
	keeps int
	fails int // number of failing requests
	asked []events.EngineSeq
}

func keptFrame(seq events.EngineSeq) Frame {
	return Frame{Seq: seq, Payload: binary.BigEndian.AppendUint64(nil, uint64(seq))}
}

func (k *keeper) publish() Frame {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.last++
	return keptFrame(k.last)
}

func (k *keeper) Ask(_ context.Context, from events.EngineSeq) (said Said, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked = append(k.asked, from)
	if k.fails > 0 {
		k.fails--
		return said, errors.New("busy")
	}
	first := events.EngineSeq(max(1, int(k.last)-k.keeps+1))
	if from > 0 && from >= first {
		for ; from <= k.last; from++ {
			said.Frames = append(said.Frames, keptFrame(from))
		}
		return said, nil
	}
	said.Whole = &Snapshot{Next: k.last + 1}
	for seq := events.EngineSeq(1); seq <= k.last; seq++ {
		said.Whole.Payloads = append(said.Whole.Payloads, keptFrame(seq).Payload)
	}
	return said, nil
}

// decodeKept reads a keeper's messages.
func decodeKept(payload []byte) (m events.Message, err error) {
	seq := binary.BigEndian.Uint64(payload)
	m.Events = []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{events.BlockHash(seq)},
		Locals: []events.LocalHash{events.LocalHash(seq)}}}
	return m, nil
}

// keptLog is a log in memory with the held blocks of the last incarnation.
type keptLog struct {
	mu      sync.Mutex
	held    []events.BlockHash
	changed chan struct{}
}

func (l *keptLog) Last(context.Context) (Published, error) { return Published{}, nil }

func (l *keptLog) Publish(_ context.Context, msgs [][]byte) (events.StreamSeq, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, data := range msgs {
		var b events.Batch
		if err := events.DecodeBatch(data, &b); err != nil {
			return 0, err
		}
		for _, e := range b.Events {
			if e.Kind == events.Cleared {
				l.held = nil
			}
			l.held = append(l.held, e.Blocks...)
		}
	}
	close(l.changed)
	l.changed = make(chan struct{})
	return 1, nil
}

// waitFor waits until the log has the blocks from 1 to n, each once.
func (l *keptLog) waitFor(t *testing.T, n events.EngineSeq) {
	t.Helper()
	deadline := time.After(4 * time.Minute)
	for {
		l.mu.Lock()
		held, changed := slices.Clone(l.held), l.changed
		l.mu.Unlock()
		good := len(held) == int(n)
		for i, b := range held {
			good = good && b == events.BlockHash(i+1)
		}
		if good {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("the log holds %v, want 1 to %d", held, n)
		}
	}
}

// TestSource has a feed that loses messages, with fewer and more losses than the source keeps. The source fills every
// gap.
func TestSource(t *testing.T) {
	k, log, feed := &keeper{keeps: 5, fails: 1}, &keptLog{changed: make(chan struct{})}, make(chan Frame)
	for range 3 {
		k.publish() // before the first subscriber
	}
	ended := make(chan error, 1)
	go func() {
		ended <- Run(t.Context(), Config{Feed: feed, Source: k, Decoder: Whole{Decode: decodeKept}, Log: log,
			Identity: Identity{Model: "m", BlockSize: 16}, RetryMin: time.Millisecond, RetryMax: time.Millisecond})
	}()
	log.waitFor(t, 3)
	feed <- k.publish()
	log.waitFor(t, 4)
	for range 2 {
		k.publish() // lost
	}
	feed <- k.publish()
	log.waitFor(t, 7)
	for range 20 {
		k.publish() // lost, and no longer kept
	}
	feed <- k.publish()
	log.waitFor(t, 28)
	k.publish() // the last message is lost, and a new connection reveals the loss
	feed <- Frame{Opened: true}
	log.waitFor(t, 29)
	close(feed)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
