//go:build judges

package pyenv_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func dial(t *testing.T, p *pyenv.Publisher) *zmtp.Sub {
	t.Helper()
	// without heartbeats, the connection to a paused publisher stays open
	s, err := zmtp.DialSub(context.Background(), p.Endpoint, []string{""},
		zmtp.Config{Heartbeat: -1, BackoffMin: 5 * time.Millisecond, BackoffMax: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	next(t, s, zmtp.Opened)
	p.WaitSubscribers(1)
	return s
}

func next(t *testing.T, s *zmtp.Sub, kind zmtp.Kind) zmtp.Message {
	t.Helper()
	m, err := s.Recv(within(t))
	if err != nil || m.Kind != kind {
		t.Fatalf("got %v %v %v, want %v", m.Kind, m.Err, err, kind)
	}
	return m
}

// replay requests all messages from first on.
func replay(t *testing.T, endpoint string, first uint64) (got [][][]byte) {
	t.Helper()
	d, err := zmtp.DialDealer(within(t), endpoint, zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	if err := d.Send(within(t), nil, binary.BigEndian.AppendUint64(nil, first)); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := d.Recv(within(t))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, m)
		if len(m) > 2 && bytes.Equal(m[len(m)-2], bytes.Repeat([]byte{0xff}, 8)) {
			return got
		}
	}
}

func ptr[T any](v T) *T { return &v }

// TestPublisherEqualsCaptures compares the publisher's bytes with captures of the real vLLM, apart from times.
func TestPublisherEqualsCaptures(t *testing.T) {
	for file, opt := range map[string]pyenv.PublisherOptions{
		"vllm-0.23.0.json": {Form: "array", BlockSize: 4},
		"vllm-0.32.0.json": {Form: "map", BlockSize: 4, Topic: "kv@pod-a@model-x"},
	} {
		t.Run(file, func(t *testing.T) {
			b, err := os.ReadFile("testdata/" + file)
			if err != nil {
				t.Fatal(err)
			}
			var capture struct {
				Live   [][]string
				Replay []struct {
					Start  uint64
					Frames [][]string
				}
			}
			if err := json.Unmarshal(b, &capture); err != nil {
				t.Fatal(err)
			}
			p := pyenv.StartPublisher(t, opt)
			s := dial(t, p)
			p.Publish(pyenv.Event{Op: "store", Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8},
				Hashes: []uint64{15760518052499183552, 2}, Group: ptr(0), Kind: "full_attention"})
			p.Publish(
				pyenv.Event{Op: "store", Tokens: []uint32{9, 10, 11, 12}, Hashes: []uint64{3}, Parent: ptr(uint64(2)),
					LoraID: ptr(1), LoraName: "adapter-a"},
				pyenv.Event{Op: "remove", Hashes: []uint64{3}})
			p.Raw(mustHex(t, capture.Live[2][2])) // hashes as bytes beside integers: as captured
			p.Clear()
			for i, want := range capture.Live {
				if got := hexed(next(t, s, zmtp.Data).Frames); withoutTime(got) != withoutTime(want) {
					t.Errorf("message %d:\n got %v\nwant %v", i, got, want)
				}
			}
			for _, r := range capture.Replay {
				got := replay(t, p.Replay, r.Start)
				if len(got) != len(r.Frames) {
					t.Fatalf("replay from %d: %d messages, want %d", r.Start, len(got), len(r.Frames))
				}
				for i := range got {
					if g := hexed(got[i]); withoutTime(g) != withoutTime(r.Frames[i]) {
						t.Errorf("replay from %d, message %d:\n got %v\nwant %v", r.Start, i, g, r.Frames[i])
					}
				}
			}
		})
	}
}

func mustHex(t *testing.T, s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func hexed(frames [][]byte) (out []string) {
	for _, f := range frames {
		out = append(out, hex.EncodeToString(f))
	}
	return out
}

// withoutTime blanks the timestamp: the float64 after the head of the payload's array.
func withoutTime(frames []string) string {
	last := len(frames) - 1
	out := append([]string(nil), frames...)
	if strings.HasPrefix(out[last], "93cb") {
		out[last] = "93cb" + out[last][4+16:]
	}
	return strings.Join(out, " ")
}

func TestPublisherDialsOut(t *testing.T) {
	s, err := zmtp.ListenSub(context.Background(), "tcp://*:0", []string{"kv"}, zmtp.Config{Heartbeat: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	p := pyenv.StartPublisher(t, pyenv.PublisherOptions{Endpoint: s.Addr(), Connect: true, NoReplay: true,
		Topic: "kv@me", FirstSeq: 1, Hashes: "bytes"})
	if p.Replay != "" {
		t.Errorf("a replay socket at %q", p.Replay)
	}
	next(t, s, zmtp.Opened)
	p.WaitSubscribers(1)
	_, hashes := p.Store(make([]uint32, 32), nil)
	m := next(t, s, zmtp.Data)
	if got := binary.BigEndian.Uint64(m.Frames[1]); string(m.Frames[0]) != "kv@me" || got != 1 {
		t.Errorf("topic %q, sequence %d", m.Frames[0], got)
	}
	for _, h := range hashes {
		if !bytes.Contains(m.Frames[2], binary.BigEndian.AppendUint64(nil, h)) {
			t.Errorf("hash %x is not the end of a digest in %x", h, m.Frames[2])
		}
	}
}

// TestPublisherTrouble checks that every fault method causes only the described fault.
func TestPublisherTrouble(t *testing.T) {
	p := pyenv.StartPublisher(t, pyenv.PublisherOptions{Buffer: 100})
	s := dial(t, p)
	seq := func() uint64 { return binary.BigEndian.Uint64(next(t, s, zmtp.Data).Frames[1]) }

	if b := p.Burst(50, 2, 7); b.FirstSeq != 0 || b.LastSeq != 49 || b.Tokens != 1600 || len(b.Hashes) != 100 {
		t.Errorf("burst: %d to %d, %d tokens, %d hashes", b.FirstSeq, b.LastSeq, b.Tokens, len(b.Hashes))
	}
	for i := range uint64(50) {
		if got := seq(); got != i {
			t.Fatalf("got %d, want %d", got, i)
		}
	}
	p.Drop(2, true)
	p.Clear() // 50
	p.Clear() // 51
	p.Drop(1, false)
	p.Clear() // 52
	p.Skip(3)
	p.Clear() // 56
	if got := seq(); got != 56 {
		t.Errorf("after the gap: %d", got)
	}
	var kept []uint64
	for _, m := range replay(t, p.Replay, 49) {
		kept = append(kept, binary.BigEndian.Uint64(m[2]))
	}
	if want := []uint64{49, 50, 51, 56, 1<<64 - 1}; len(kept) != len(want) || kept[1] != 50 || kept[2] != 51 ||
		kept[3] != 56 {
		t.Errorf("replay: %d, want %d", kept, want)
	}
	p.Forget(1)
	if got := replay(t, p.Replay, 0); len(got) != 2 || binary.BigEndian.Uint64(got[0][2]) != 56 {
		t.Errorf("after forgetting: %d messages", len(got))
	}
	p.RestartUnseen()
	if got := p.Clear(); got != 0 || seq() != 0 {
		t.Errorf("a new life begins with %d", got)
	}
	p.Restart()
	next(t, s, zmtp.Closed)
	next(t, s, zmtp.Opened)
	p.WaitSubscribers(1)
	_, a := p.Store([]uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}, nil)
	if got := seq(); got != 0 || len(a) != 1 {
		t.Errorf("a new life: sequence %d, %d blocks", got, len(a))
	}
	p.Frames([]byte("only one"))
	if m := next(t, s, zmtp.Data); len(m.Frames) != 1 {
		t.Errorf("%d frames", len(m.Frames))
	}
	if st := p.Stats(); st != (pyenv.PublisherStats{NextSeq: 1, Subscribers: 1, Replays: 2, Kept: 1}) {
		t.Errorf("%+v", st)
	}
	p.Kill()
	next(t, s, zmtp.Closed)
}
