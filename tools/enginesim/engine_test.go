package enginesim

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// truth records the announced events of an engine.
type truth struct {
	mu   sync.Mutex
	said []Announced
}

func (tr *truth) hear(a Announced) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	a.Blocks, a.Tokens = slices.Clone(a.Blocks), slices.Clone(a.Tokens)
	tr.said = append(tr.said, a)
}

func start(t testing.TB, cfg Config) *Engine {
	t.Helper()
	e, err := Start(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	return e
}

func listen(t testing.TB, e *Engine) *zmtp.Sub {
	t.Helper()
	s, err := zmtp.DialSub(context.Background(), e.Endpoint(), []string{""},
		zmtp.Config{BackoffMin: 5 * time.Millisecond, BackoffMax: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	next(t, s, zmtp.Opened)
	if err := e.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	return s
}

func next(t testing.TB, s *zmtp.Sub, kind zmtp.Kind) zmtp.Message {
	t.Helper()
	m, err := s.Recv(within(t))
	if err != nil || m.Kind != kind {
		t.Fatalf("got %v %v %v, want %v", m.Kind, m.Err, err, kind)
	}
	return m
}

// decode decodes the frames of a message to the announced events.
func decode(t testing.TB, life int, topic string, frames [][]byte) (out []Announced) {
	t.Helper()
	if len(frames) != 3 || string(frames[0]) != topic || len(frames[1]) != 8 {
		t.Fatalf("frames %q", frames)
	}
	batch := decodeBatch(t, frames[2])
	if batch.Rank == nil || *batch.Rank != 3 || time.Since(time.UnixMicro(int64(batch.TS*1e6))).Abs() > time.Hour {
		t.Errorf("rank %v, time %v", batch.Rank, batch.TS)
	}
	for _, raw := range batch.Events {
		a := decodeEvent(t.(*testing.T), raw).announced()
		a.Life, a.Seq = life, events.EngineSeq(binary.BigEndian.Uint64(frames[1]))
		out = append(out, a)
	}
	return out
}

// replay requests all messages from first on and returns [seq, payload] of every reply.
func replay(t *testing.T, e *Engine, frames int, first uint64) (got [][][]byte) {
	t.Helper()
	d, err := zmtp.DialDealer(within(t), e.Replay(), zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	for _, bad := range [][][]byte{{{}}, {{}, {1}}, {{1}, make([]byte, 8)}, {{}, make([]byte, 8), {}}} {
		if err := d.Send(within(t), bad...); err != nil { // gets no answer
			t.Fatal(err)
		}
	}
	if err := d.Send(within(t), nil, binary.BigEndian.AppendUint64(nil, first)); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := d.Recv(within(t))
		if err != nil {
			t.Fatal(err)
		}
		if len(m) != frames {
			t.Fatalf("%d frames, want %d", len(m), frames)
		}
		seq, payload := m[len(m)-2], m[len(m)-1]
		if bytes.Equal(seq, endOfReplay) {
			if len(payload) != 0 || len(m) == 4 && len(m[1]) != 0 {
				t.Errorf("end marker %q", m)
			}
			return got
		}
		got = append(got, [][]byte{seq, payload})
	}
}

// TestServeTellsTheTruth runs a random load. The messages must be equal to the announced events, the cache must be
// equal to a naive twin of the events, and hits must be equal to the twin's.
func TestServeTellsTheTruth(t *testing.T) {
	for _, release := range []Release{VLLM026, VLLM024, VLLM023} {
		for _, perEvent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v per event %v", release, perEvent), func(t *testing.T) {
				tr := &truth{}
				const capacity = 40
				e := start(t, Config{Release: release, PerEvent: perEvent, Topic: "kv@me", Rank: 3, BlockSize: 4,
					Capacity: capacity, Buffer: 50, Announced: tr.hear})
				s := listen(t, e)
				rng := rand.New(rand.NewPCG(11, 12))
				held := map[events.BlockHash][]uint32{} // the twin: name → all tokens from the prompt's start
				seen := 0
				for range 200 {
					prompt, output := randomPrompt(rng, 80), randomPrompt(rng, 12)
					want := 0
					for want < len(prompt)/4 && hasTokens(held, prompt[:4*(want+1)]) {
						want++
					}
					if got := e.Hit(prompt); got != want {
						t.Fatalf("Hit %d, want %d", got, want)
					}
					if got, err := e.Serve(prompt, output); err != nil || got != want {
						t.Fatalf("hit %d %v, want %d", got, err, want)
					}
					if rng.IntN(50) == 0 {
						if err := e.Clear(); err != nil {
							t.Fatal(err)
						}
					}
					for ; seen < len(tr.said); seen++ {
						apply(t, held, tr.said[seen])
					}
					if len(held) > capacity {
						t.Fatalf("the twin holds %d blocks", len(held))
					}
				}
				state := e.State()
				if len(state.Blocks) != len(held) || state.Dropped != 0 {
					t.Errorf("holds %d blocks, the twin %d; %d dropped", len(state.Blocks), len(held), state.Dropped)
				}
				for _, b := range state.Blocks {
					if held[b] == nil {
						t.Errorf("holds %x, the twin does not", b)
					}
				}
				var heard []Announced
				messages := 0
				var last zmtp.Message
				for ; len(heard) < len(tr.said); messages++ {
					last = next(t, s, zmtp.Data)
					batch := decode(t, 1, "kv@me", last.Frames)
					if batch[0].Seq != events.EngineSeq(messages) || perEvent && len(batch) != 1 {
						t.Fatalf("message %d has sequence %d and %d events", messages, batch[0].Seq, len(batch))
					}
					heard = append(heard, batch...)
				}
				if !reflect.DeepEqual(heard, tr.said) {
					t.Error("the messages differ from the announced events")
				}
				frames := map[Release]int{VLLM026: 4, VLLM024: 3, VLLM023: 3}[release]
				got := replay(t, e, frames, 0)
				if len(got) != 50 || binary.BigEndian.Uint64(got[0][0]) != uint64(messages-50) ||
					!bytes.Equal(got[49][1], last.Frames[2]) {
					t.Errorf("replay of kept messages: %d messages from %x", len(got), got[0][0])
				}
				if got := replay(t, e, frames, uint64(messages-3)); len(got) != 3 {
					t.Errorf("replay of the last three: %d", len(got))
				}
				if got := replay(t, e, frames, uint64(messages)); len(got) != 0 {
					t.Errorf("replay of future messages: %d", len(got))
				}
			})
		}
	}
}

// TestHostMemory runs a random load on an engine with host memory. The messages must be equal to the announced events.
// Hits and held blocks must be equal to a twin of the events for each tier.
func TestHostMemory(t *testing.T) {
	for _, release := range []Release{VLLM026, VLLM023} {
		t.Run(release.String(), func(t *testing.T) {
			tr := &truth{}
			e := start(t, Config{Release: release, Rank: 3, BlockSize: 4, Capacity: 20, Host: 30, Announced: tr.hear})
			s := listen(t, e)
			rng := rand.New(rand.NewPCG(13, 14))
			held := map[events.Tier]map[events.BlockHash]bool{events.Device: {}, events.Host: {}}
			seen, loaded := 0, 0
			for range 400 {
				prompt, output := randomPrompt(rng, 60), randomPrompt(rng, 8)
				names := AppendNames(nil, 0, 4, prompt)
				device := prefixOf(names, held[events.Device])
				host := prefixOf(names[device:], held[events.Host])
				onDevice, inHost, err := e.ServeTiers("", prompt, output)
				if err != nil || onDevice != device || inHost != host {
					t.Fatalf("hits %d and %d, %v; want %d and %d", onDevice, inHost, err, device, host)
				}
				loaded += host
				if rng.IntN(100) == 0 {
					if err := e.Clear(); err != nil {
						t.Fatal(err)
					}
				}
				for ; seen < len(tr.said); seen++ {
					applyTier(t, held, tr.said[seen])
				}
				state := e.State()
				if len(state.Blocks) != len(held[events.Device]) || len(state.Host) != len(held[events.Host]) ||
					len(state.Host) > 30 || prefixOf(state.Blocks, held[events.Device]) < len(state.Blocks) ||
					prefixOf(state.Host, held[events.Host]) < len(state.Host) {
					t.Fatalf("the engine holds %x and %x, the twin %v", state.Blocks, state.Host, held)
				}
			}
			if loaded < 100 {
				t.Errorf("%d blocks were loaded: the test needs more", loaded)
			}
			var heard []Announced
			for len(heard) < len(tr.said) {
				heard = append(heard, decode(t, 1, "", next(t, s, zmtp.Data).Frames)...)
			}
			for i := range heard {
				if len(heard[i].Tokens) == 0 {
					heard[i].Tokens = nil
				}
			}
			if !reflect.DeepEqual(heard, tr.said) {
				t.Error("the messages differ from the announced events")
			}
		})
	}
}

// prefixOf returns the number of leading names in a set.
func prefixOf(names []events.BlockHash, set map[events.BlockHash]bool) (n int) {
	for n < len(names) && set[names[n]] {
		n++
	}
	return n
}

// applyTier applies an event to sets of blocks. A store of a held block and a removal of another block are errors.
func applyTier(t *testing.T, held map[events.Tier]map[events.BlockHash]bool, a Announced) {
	t.Helper()
	if a.Kind == events.Cleared {
		clear(held[events.Device])
		clear(held[events.Host])
	}
	for _, b := range a.Blocks {
		if stored := a.Kind == events.Stored; held[a.Tier][b] == stored {
			t.Fatalf("%+v, and the block is held: %t", a, held[a.Tier][b])
		}
		if held[a.Tier][b] = true; a.Kind == events.Removed {
			delete(held[a.Tier], b)
		}
	}
}

func hasTokens(held map[events.BlockHash][]uint32, tokens []uint32) bool {
	for _, h := range held {
		if slices.Equal(h, tokens) {
			return true
		}
	}
	return false
}

func apply(t *testing.T, held map[events.BlockHash][]uint32, a Announced) {
	t.Helper()
	switch a.Kind {
	case events.Stored:
		if len(a.Tokens) != 4*len(a.Blocks) {
			t.Fatalf("%d tokens for %d blocks", len(a.Tokens), len(a.Blocks))
		}
		var path []uint32
		if a.HasParent {
			if path = held[a.Parent]; path == nil {
				t.Fatalf("stored below the missing block %x", a.Parent)
			}
		}
		for i, b := range a.Blocks {
			path = append(path[:len(path):len(path)], a.Tokens[4*i:4*i+4]...)
			if held[b] != nil {
				t.Fatalf("%x stored twice", b)
			}
			held[b] = path
		}
	case events.Removed:
		for _, b := range a.Blocks {
			if held[b] == nil {
				t.Fatalf("%x removed and not held", b)
			}
			for other, path := range held {
				if len(path) == len(held[b])+4 && slices.Equal(path[:len(path)-4], held[b]) {
					t.Fatalf("%x removed before the child %x", b, other)
				}
			}
			delete(held, b)
		}
	case events.Cleared:
		clear(held)
	}
}

func TestCrashAndRestart(t *testing.T) {
	for _, perLife := range []bool{false, true} {
		t.Run(fmt.Sprintf("seed per life %v", perLife), func(t *testing.T) {
			tr := &truth{}
			e := start(t, Config{
				Rank: 3, BlockSize: 4, FirstSeq: 1, SeedPerLife: perLife, Announced: tr.hear,
				Endpoint: "tcp://" + loopback.Reserve(t), Replay: "tcp://" + loopback.Reserve(t),
			})
			endpoint, replays := e.Endpoint(), e.Replay()
			s := listen(t, e)
			prompt := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
			for life := 1; life <= 3; life++ {
				if hit, err := e.Serve(prompt, nil); err != nil || hit != 0 {
					t.Fatalf("life %d: hit %d %v", life, hit, err)
				}
				if hit, err := e.Serve(prompt, []uint32{9, 9, 9, 9}); err != nil || hit != 2 {
					t.Fatalf("life %d: hit %d %v", life, hit, err)
				}
				for seq := events.EngineSeq(1); seq <= 2; seq++ {
					if got := decode(t, life, "", next(t, s, zmtp.Data).Frames); got[0].Seq != seq {
						t.Errorf("life %d: sequence %d, want %d", life, got[0].Seq, seq)
					}
				}
				if life == 2 {
					e.Crash()
					e.Crash()
					if _, err := e.Serve(prompt, nil); !errors.Is(err, ErrDown) {
						t.Errorf("served while down: %v", err)
					}
					if err := e.Clear(); !errors.Is(err, ErrDown) {
						t.Errorf("cleared while down: %v", err)
					}
					if got := e.State(); got.Life != 2 || got.Blocks != nil {
						t.Errorf("while down: %+v", got)
					}
				}
				if err := e.Restart(); err != nil {
					t.Fatal(err)
				}
				if e.Endpoint() != endpoint || e.Replay() != replays {
					t.Errorf("moved to %s and %s", e.Endpoint(), e.Replay())
				}
				next(t, s, zmtp.Closed)
				next(t, s, zmtp.Opened)
				if err := e.WaitSubscribers(within(t), 1); err != nil {
					t.Fatal(err)
				}
				if got := replay(t, e, 4, 0); len(got) != 0 {
					t.Errorf("the new life replays %d messages of the old", len(got))
				}
			}
			if same := tr.said[0].Blocks[0] == tr.said[2].Blocks[0]; same == perLife {
				t.Errorf("names in two lives: %x and %x", tr.said[0].Blocks, tr.said[2].Blocks)
			}
			e.Stop()
			e.Stop()
		})
	}
}

func TestDropMakesGaps(t *testing.T) {
	e := start(t, Config{BlockSize: 1})
	s := listen(t, e)
	serve := func(n uint32) {
		t.Helper()
		if _, err := e.Serve([]uint32{n}, nil); err != nil {
			t.Fatal(err)
		}
	}
	e.Drop(2, true)
	e.Drop(1, false)
	for n := range uint32(5) {
		serve(n)
	}
	for _, want := range []uint64{3, 4} {
		if got := binary.BigEndian.Uint64(next(t, s, zmtp.Data).Frames[1]); got != want {
			t.Errorf("%d messages, want %d", got, want)
		}
	}
	var got []uint64
	for _, m := range replay(t, e, 4, 0) {
		got = append(got, binary.BigEndian.Uint64(m[0]))
	}
	if want := []uint64{0, 1, 3, 4}; !slices.Equal(got, want) {
		t.Errorf("replayed %v, want %v", got, want)
	}
}

// TestReplayDropsAtHighWater checks that a router with a low high-water mark loses replies, as libzmq's does, and that
// the sequence shows the gap.
func TestReplayDropsAtHighWater(t *testing.T) {
	t.Parallel()
	e := start(t, Config{BlockSize: 512, ReplayHighWater: 5})
	prompt := slices.Repeat([]uint32{1 << 20}, 20_000) // a message of 100 kB
	const n = 500
	for i := range n {
		prompt[0] = uint32(i)
		if _, err := e.Serve(prompt, nil); err != nil {
			t.Fatal(err)
		}
	}
	d, err := zmtp.DialDealer(within(t), e.Replay(), zmtp.Config{RecvQueue: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	if err := d.Send(within(t), nil, make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	got, last := 0, -1
	for {
		ctx, cancel := within(t), context.CancelFunc(func() {})
		if got > 0 {
			ctx, cancel = context.WithTimeout(ctx, 5*time.Second)
		}
		m, err := d.Recv(ctx)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			break // the end marker was dropped too
		}
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(m[2], endOfReplay) {
			break
		}
		seq := int(binary.BigEndian.Uint64(m[2]))
		if seq <= last {
			t.Fatalf("%d after %d", seq, last)
		}
		last = seq
		got++
	}
	if got == 0 || got == n {
		t.Errorf("%d of %d replies; the test wants some dropped", got, n)
	}
}

func TestStartErrors(t *testing.T) {
	for name, cfg := range map[string]Config{
		"endpoint":   {Endpoint: "nonsense"},
		"replay":     {Replay: "tcp://nowhere"},
		"block size": {BlockSize: -1},
		"capacity":   {Capacity: -1},
		"buffer":     {Buffer: -1},
	} {
		if e, err := Start(context.Background(), cfg); err == nil {
			e.Stop()
			t.Errorf("%s: no error", name)
		}
	}
	e := start(t, Config{NoReplay: true})
	if e.Replay() != "" {
		t.Errorf("a replay socket at %s", e.Replay())
	}
}

func BenchmarkServe(b *testing.B) {
	e := start(b, Config{Capacity: 60_000, Buffer: 100})
	prompt := make([]uint32, 8192)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		prompt[len(prompt)/2] = uint32(i)
		if _, err := e.Serve(prompt, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// TestRestartWaitsForItsAddress: a restart waits while another process still has a copy of the closed socket.
func TestRestartWaitsForItsAddress(t *testing.T) {
	address := loopback.Reserve(t)
	e, err := Start(t.Context(), Config{Replay: "tcp://" + address})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Stop()
	e.Crash()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	restarted := make(chan error, 1)
	go func() { restarted <- e.Restart() }()
	time.Sleep(20 * time.Millisecond) // the test passes if the restart begins later
	_ = l.Close()
	if err := <-restarted; err != nil {
		t.Error(err)
	}
}
