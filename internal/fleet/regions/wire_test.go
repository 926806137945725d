package regions

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func smallDigest() *Digest {
	f := NewFilter(events.SeqHashes(nil, []events.LocalHash{1, 2, 3}))
	return &Digest{Partitions: 4, Covered: []events.Partition{1, 3}, Sets: []Set{
		{Model: "m", BlockSize: 16, Lookaheads: []uint32{0, 1}, Held: 5, Bounded: true, Filter: f},
		{Model: "n", BlockSize: 32, Filter: &Filter{}}}}
}

// TestGoldenMessage compares a message with constant bytes: a wire format.
func TestGoldenMessage(t *testing.T) {
	messages, err := smallDigest().Messages(1_700_000_000_000, 7, 12)
	if err != nil || len(messages) != 1 {
		t.Fatal(len(messages), err)
	}
	const want = "01cf0000018bcfe56800070c000142cfac0c67d2beaacb5bc4420104920103929aa16d1092000105c303cfb456bcfc34" +
		"c2cb2c0801c41800000000000000000000000000000000daf70068000000009aa16e209000c200000000c400"
	if got := hex.EncodeToString(messages[0]); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestDigestRoundTrip(t *testing.T) {
	d := smallDigest()
	back, err := decode(d.encode())
	if err != nil || !bytes.Equal(back.encode(), d.encode()) {
		t.Fatalf("%+v, %v", back, err)
	}
	if s := back.Sets[0]; s.Filter.Prefix(events.SeqHashes(nil, []events.LocalHash{1, 2, 3})) != 3 || !s.Bounded {
		t.Fatalf("%+v", s)
	}
}

// TestMalformedDigests: a digest with a value outside of its limits is refused.
func TestMalformedDigests(t *testing.T) {
	for name, spoil := range map[string]func(*Digest){
		"partition beyond the number": func(d *Digest) { d.Covered = []events.Partition{4} },
		"partitions in disorder":      func(d *Digest) { d.Covered = []events.Partition{3, 1} },
		"no model":                    func(d *Digest) { d.Sets[0].Model = "" },
		"long model":                  func(d *Digest) { d.Sets[0].Model = string(make([]byte, maxName+1)) },
		"no block size":               func(d *Digest) { d.Sets[0].BlockSize = 0 },
		"lookaheads in disorder":      func(d *Digest) { d.Sets[0].Lookaheads = []uint32{1, 1} },
		"more hashes than blocks":     func(d *Digest) { d.Sets[0].Held = 2 },
		"segment of no power of two":  func(d *Digest) { d.Sets[0].Filter.segment = 3 },
		"missing fingerprints":        func(d *Digest) { d.Sets[0].Filter.prints = d.Sets[0].Filter.prints[1:] },
		"segments without hashes": func(d *Digest) {
			d.Sets[1].Filter = &Filter{segment: 4, segments: 1, prints: make([]byte, 12)}
		},
		"too many sets": func(d *Digest) { d.Sets = slices.Repeat(d.Sets, maxSets) },
	} {
		d := smallDigest()
		spoil(d)
		if back, err := decode(d.encode()); !errors.Is(err, errMalformed) {
			t.Errorf("%s: %+v, %v", name, back, err)
		}
	}
	if _, err := decode(append(msgp.AppendUint(nil, 2), smallDigest().encode()[1:]...)); !errors.Is(err, errVersion) {
		t.Error(err)
	}
	if _, err := (&Digest{Sets: make([]Set, 0), Partitions: 1}).Messages(1, 1, 1); err != nil {
		t.Error(err)
	}
	tooMany := &Digest{Sets: slices.Repeat(smallDigest().Sets, maxSets)}
	if _, err := tooMany.Messages(1, 1, 1); err == nil {
		t.Error("a digest of too many sets is sent")
	}
}

// FuzzReceive: no input grows a machine beyond its size, and a readable digest is encoded in the same way.
func FuzzReceive(f *testing.F) {
	messages, _ := smallDigest().Messages(1, 1, 5)
	f.Add(messages[0])
	f.Add(smallDigest().encode())
	rng := rand.New(rand.NewPCG(5, 6))
	list, _ := randomHashes(rng, 200_000)
	large, _ := (&Digest{Partitions: 1, Sets: []Set{{Model: "m", BlockSize: 1, Held: 1 << 20,
		Filter: NewFilter(list)}}}).Messages(1, 1, 5)
	f.Add(large[0][:100])
	f.Fuzz(func(t *testing.T, data []byte) {
		if d, err := decode(data); err == nil {
			if again, err := decode(d.encode()); err != nil || !bytes.Equal(again.encode(), d.encode()) {
				t.Fatalf("%+v is read again as %+v, %v", d, again, err)
			}
			for i := range d.Sets {
				d.Sets[i].Filter.Has(events.SeqHash(len(data)))
			}
		}
		m := New(Config{Region: "here", MaxAge: time.Minute})
		for range 2 {
			_, _ = m.Receive(time.Second, "there", "n", data)
			if m.bytes > len(data) || len(m.regions) > 1 {
				t.Fatalf("%d bytes are kept as %d", len(data), m.bytes)
			}
			if _, err := m.View().Prefixes(time.Second, &Question{Model: "m", Locals: func(uint32, uint32) ([]events.LocalHash,
				error) {
				return []events.LocalHash{1, 2, 3}, nil
			}}); err != nil {
				t.Fatal(err)
			}
		}
		m.Tick(time.Hour)
		if m.bytes != 0 || len(m.regions) != 0 {
			t.Fatalf("%d bytes of %d regions are left", m.bytes, len(m.regions))
		}
	})
}
