package shim

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/twin"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
)

// stored is a vLLM event with a block of two tokens. Only a prompt's first block has the salt.
func stored(name int, parent any, salt string) map[string]any {
	var extra []any
	if salt != "" {
		extra = []any{salt}
	}
	return map[string]any{
		"type": "BlockStored", "block_hashes": []int{name}, "parent_block_hash": parent, "token_ids": []int{1, 2},
		"block_size": 2, "lora_id": nil, "medium": "GPU", "lora_name": nil, "extra_keys": []any{extra}, "group_idx": 0,
		"kv_cache_spec_kind": "full_attention",
	}
}

func removed(name int, medium string) map[string]any {
	return map[string]any{"type": "BlockRemoved", "block_hashes": []int{name}, "medium": medium, "group_idx": 0}
}

// copied is a copy in host memory. vLLM does not announce the salt of its hash.
func copied(name int) map[string]any {
	e := stored(name, nil, "")
	e["medium"], e["extra_keys"] = "CPU", nil
	return e
}

// windowed is the same block in a group outside of the prefix.
func windowed(e map[string]any) map[string]any {
	e = maps.Clone(e)
	e["group_idx"], e["kv_cache_spec_kind"], e["kv_cache_spec_sliding_window"] = 1, "sliding_window", 4
	return e
}

func message(t *testing.T, seq events.EngineSeq, evs ...any) Frame {
	t.Helper()
	payload, err := msgpack.Marshal([]any{1.5, evs, 0})
	if err != nil {
		t.Fatal(err)
	}
	return Frame{Seq: seq, Payload: payload}
}

func newDecoder(t *testing.T) *events.Decoder {
	t.Helper()
	d, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 2})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func newKnowledge(t *testing.T) *knowledge {
	return &knowledge{decoder: newDecoder(t), held: newCopies()}
}

// give returns a replay function for an engine's messages, without the messages that drop selects.
func give(said []Frame, drop func() bool) func(events.EngineSeq, func(Frame) bool) error {
	return func(from events.EngineSeq, take func(Frame) bool) error {
		for _, f := range said {
			if f.Seq >= from && !drop() && !take(f) {
				break
			}
		}
		return nil
	}
}

func never() bool { return false }

// reader applies the published batches of shims.
type reader struct {
	*testing.T
	rank *twin.Rank
	last Published
}

func newReader(t *testing.T) *reader {
	cfg := twin.Config{MaxPending: 1000, PendingFor: 1e9, MaxTombstones: 1000, TombstoneFor: 1e9}
	return &reader{T: t, rank: twin.New(cfg, 2)}
}

func (r *reader) publish(m *Machine) {
	r.Helper()
	for _, b := range fly(r.T, m) {
		if b.Incarnation != r.last.Incarnation && r.last.Cursor.Known {
			r.Fatalf("incarnation %d follows %d", b.Incarnation, r.last.Incarnation)
		}
		r.rank.Apply(1, b.Events)
		r.last = Published{Found: true, Reached: Reached{b.Incarnation, b.LastID(), b.Cursor}}
	}
}

// TestSaltsAreLearned runs shims in sequence that receive the engine's messages at random times. At the end the log
// must be equal to the log of a single shim with all messages, although an engine names a salt only with a prompt's
// first block.
func TestSaltsAreLearned(t *testing.T) {
	corrected := 0
	for round := range 300 {
		rng := rand.New(rand.NewPCG(*seedFlag, uint64(round)))
		var said []Frame
		var held, hosted []int            // in device memory, and in the host's
		first := map[int]map[string]any{} // the first announcement of every block
		name := 0
		speak := func() {
			var evs []any
			for range 1 + rng.IntN(3) {
				switch n := rng.IntN(100); {
				case n < 3:
					evs = append(evs, map[string]any{"type": "AllBlocksCleared"})
					held, hosted = nil, nil
				case n < 20 && len(held) > 0:
					i := rng.IntN(len(held))
					evs = append(evs, removed(held[i], "GPU"))
					held = slices.Delete(held, i, i+1)
				case n < 25 && len(hosted) > 0:
					i := rng.IntN(len(hosted))
					evs = append(evs, removed(hosted[i], "CPU"))
					hosted = slices.Delete(hosted, i, i+1)
				case n < 35 && len(held) > 0:
					if block := held[rng.IntN(len(held))]; !slices.Contains(hosted, block) {
						evs = append(evs, copied(block))
						hosted = append(hosted, block)
					}
				case n < 70 && len(held) > 0:
					name++
					first[name] = stored(name, held[rng.IntN(len(held))], "")
					evs = append(evs, first[name])
					held = append(held, name)
				case n < 80 && len(held) > 0: // another copy
					block := held[rng.IntN(len(held))]
					if parent := first[block]["parent_block_hash"]; parent == nil || slices.Contains(held, parent.(int)) {
						evs = append(evs, first[block])
						held = append(held, block)
					}
				default:
					name++
					first[name] = stored(name, nil, []string{"", "tenant", "other"}[rng.IntN(3)])
					evs = append(evs, windowed(first[name]), first[name])
					held = append(held, name)
				}
			}
			said = append(said, message(t, events.EngineSeq(len(said)), evs...))
		}
		log, whole := newReader(t), newReader(t)
		for range 4 {
			m := NewMachine(Identity{Model: "m", BlockSize: 2}, Limits{MessageBytes: 1 + rng.IntN(500)}, true, newDecoder(t))
			m.Recovered(log.last, 100)
			m.Connected()
			live := func() { // the next messages come while the shim does something else
				for range rng.IntN(4) {
					speak()
					m.Live(said[len(said)-1], 100)
				}
			}
			from, ok := wantsReplay(m)
			if !ok {
				t.Fatal("no replay is due")
			}
			live()
			for _, f := range said[min(int(from), len(said)):] {
				m.Replayed(f, 100)
			}
			m.ReplayEnded(100)
			if rng.IntN(2) == 0 {
				log.publish(m)
			}
			catchingUp := m.CatchingUp()
			if to, ok := wantsLearning(m); ok {
				live()
				if !catchingUp || !m.CatchingUp() {
					t.Fatal("blocks with a possible correction count as caught up")
				}
				k := newKnowledge(t)
				n := 0
				drop := func() bool { n++; return n > 3 && rng.IntN(20) == 0 } // when the socket's queue is full
				if err := k.learn(to, give(said, drop)); err != nil {
					t.Fatal(err)
				}
				if rng.IntN(2) == 0 { // the incorrect events are in the log
					log.publish(m)
				}
				before := m.Counts().Events
				m.Learned(k)
				corrected += int(m.Counts().Events - before)
			}
			live()
			log.publish(m)
			if m.CatchingUp() || m.Counts().Gaps != 0 {
				t.Fatalf("catching up: %v, counts %+v", m.CatchingUp(), m.Counts())
			}
			for range rng.IntN(10) {
				speak() // without a subscribed shim
			}
		}
		m := NewMachine(Identity{Model: "m", BlockSize: 2}, Limits{}, true, newDecoder(t))
		m.Recovered(Published{}, 100)
		m.Connected()
		wantsReplay(m)
		for _, f := range said[:log.last.Cursor.Seq+1] {
			m.Replayed(f, 100)
		}
		m.ReplayEnded(100)
		whole.publish(m)
		if got, want := log.rank.Checksum(), whole.rank.Checksum(); got != want {
			t.Fatalf("round %d: several shims give %d blocks, a single shim gives %d; or other blocks",
				round, log.rank.Holdings(), whole.rank.Holdings())
		}
	}
	if corrected == 0 {
		t.Error("nothing was ever corrected")
	}
}

// TestLearningInPieces learns from an engine that drops all messages of a reply after the first few.
func TestLearningInPieces(t *testing.T) {
	said := []Frame{message(t, 0, stored(1, nil, "tenant"))}
	for name := 2; name <= 30; name++ {
		said = append(said, message(t, events.EngineSeq(name-1), stored(name, name-1, "")))
	}
	last := said[len(said)-1]
	cursor := events.Cursor{Known: true, Seq: last.Seq, Digest: last.digest()}
	asked, n := 0, 0
	pieces := func(keep int) func(events.EngineSeq, func(Frame) bool) error {
		return func(from events.EngineSeq, take func(Frame) bool) error {
			asked++
			n = 0
			return give(said, func() bool { n++; return n > keep })(from, take)
		}
	}
	k := newKnowledge(t)
	if err := k.learn(cursor, pieces(4)); err != nil || asked != 8 {
		t.Fatalf("asked %d times: %v", asked, err)
	}
	next := message(t, 30, stored(31, 30, ""))
	knows := func(d *events.Decoder) bool {
		got, err := d.Decode(next.Payload)
		if err != nil {
			t.Fatal(err)
		}
		salted := got.Events[0].Locals[0]
		got, _ = newDecoder(t).Decode(next.Payload)
		return got.Events[0].Locals[0] != salted
	}
	if !knows(k.decoder) {
		t.Error("the salt is unknown")
	}

	asked = 0
	if err := newKnowledge(t).learn(cursor, pieces(0)); err == nil || asked != lessonTries+1 {
		t.Errorf("no answer: %d requests, %v", asked, err)
	}
	cursor.Digest++
	if err := newKnowledge(t).learn(cursor, pieces(100)); !errors.Is(err, errOtherEngine) {
		t.Errorf("another engine: %v", err)
	}
}

// TestLearningHarmsNothing interrupts learning in every way.
func TestLearningHarmsNothing(t *testing.T) {
	said := []Frame{message(t, 0, stored(1, nil, "tenant")), message(t, 1, stored(2, 1, ""))}
	start := func() *Machine {
		m := NewMachine(Identity{Model: "m", BlockSize: 2}, Limits{HeldBytes: 2000}, true, newDecoder(t))
		m.Recovered(Published{
			Found: true, Reached: Reached{7, 2, events.Cursor{Known: true, Digest: said[0].digest()}},
		}, 100)
		m.Connected()
		wantsReplay(m)
		m.Replayed(said[0], 100)
		m.Replayed(said[1], 100)
		m.ReplayEnded(100)
		if _, ok := wantsLearning(m); !ok {
			t.Fatal("learning is not due")
		}
		if _, ok := wantsLearning(m); ok {
			t.Fatal("learning is due twice")
		}
		return m
	}
	learned := func() *knowledge {
		k := newKnowledge(t)
		if _, err := k.decoder.Decode(said[0].Payload); err != nil {
			t.Fatal(err)
		}
		return k
	}
	for what, f := range map[string]func(*Machine){
		"another engine":  func(m *Machine) { m.Learned(nil) },
		"a resync":        func(m *Machine) { m.Resync(200); m.Learned(learned()) },
		"an engine's end": func(m *Machine) { m.Gone(); m.Learned(learned()) },
		"too much to record": func(m *Machine) {
			for seq := range events.EngineSeq(20) {
				m.Live(message(t, 2+seq, stored(3+int(seq), 2+int(seq), "")), 100)
			}
			m.Learned(learned())
		},
		"a replay": func(m *Machine) { m.Verify(); m.Learned(learned()) },
	} {
		m := start()
		f(m)
		for _, b := range fly(t, m) {
			for _, e := range b.Events {
				if e.Kind == events.Removed {
					t.Errorf("%s: corrected", what)
				}
			}
		}
		if _, ok := wantsLearning(m); ok {
			t.Errorf("%s: learning is due", what)
		}
	}

	m, starts := start(), 1 // a replay has priority, and learning restarts afterwards
	for range 2 * learningStarts {
		m.Verify()
		wantsReplay(m)
		m.Replayed(said[1], 100)
		m.ReplayEnded(100)
		if _, ok := wantsLearning(m); ok {
			starts++
		}
	}
	if fly(t, m); starts != learningStarts || m.CatchingUp() {
		t.Errorf("learning begins %d times; still catching up: %v", starts, m.CatchingUp())
	}
}

// TestRunLearns starts a shim beside an engine with a salt that only an earlier shim has received.
func TestRunLearns(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	said := []Frame{
		message(t, 0, stored(1, nil, "tenant")), message(t, 1, stored(2, 1, "")), message(t, 2, stored(3, 2, "")),
	}
	pub, err := zmtpserver.ListenPub(ctx, "tcp://"+loopback.Reserve(t), zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Stop()
	router, err := zmtpserver.ListenRouter(ctx, "tcp://"+loopback.Reserve(t), zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer router.Stop()
	go func() {
		for {
			peer, question, err := router.Recv(ctx)
			if err != nil {
				return
			}
			from := events.EngineSeq(binary.BigEndian.Uint64(question[1]))
			_ = give(said, never)(from, func(f Frame) bool {
				return router.Send(peer, nil, binary.BigEndian.AppendUint64(nil, uint64(f.Seq)), f.Payload) == nil
			})
			_ = router.Send(peer, nil, binary.BigEndian.AppendUint64(nil, endMarker), nil)
		}
	}()
	log, want, d := &kept{memory: newMemory(), reader: newReader(t)}, newReader(t), newDecoder(t)
	for i, f := range said {
		msg, err := d.Decode(f.Payload)
		if err != nil {
			t.Fatal(err)
		}
		want.rank.Apply(1, msg.Events)
		if i == 0 { // published by an earlier shim
			log.reader.rank.Apply(1, msg.Events)
		}
	}
	log.last = Published{
		Found: true, Reached: Reached{7, 2, events.Cursor{Known: true, Digest: said[0].digest()}},
	}
	states := make(chan bool, 100)
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- Run(running, Config{
			Engine: pub.Addr(), Replay: router.Addr(), Identity: Identity{Model: "m", BlockSize: 2},
			Decoder: newDecoder(t), Log: log, SilentAfter: time.Minute,
			Observer: observing{state: func(s State) { states <- s.Engine != "" && !s.CatchingUp }},
		})
	}()
	for caught := false; !caught; {
		select {
		case caught = <-states:
		case <-ctx.Done():
			t.Fatal("the shim never catches up")
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if got, want := log.reader.rank.Checksum(), want.rank.Checksum(); got != want {
		t.Errorf("the log has %d blocks; the engine's salt is missing", log.reader.rank.Holdings())
	}
}

// kept is a log with a reader.
type kept struct {
	*memory
	reader *reader
}

func (k *kept) Publish(ctx context.Context, msgs [][]byte) (events.StreamSeq, error) {
	for _, data := range msgs {
		var b events.Batch
		if err := events.DecodeBatch(data, &b); err != nil {
			return 0, err
		}
		k.reader.rank.Apply(1, b.Events)
	}
	return k.memory.Publish(ctx, msgs)
}
