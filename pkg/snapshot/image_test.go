package snapshot

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// image is an image in memory, the twin of a snapshot.
type image struct {
	ranks  []RankState
	runs   []events.Run
	states []events.RankImage // by position in ranks
}

// Run and Rank make the image a Sink.
func (im *image) Run(r *events.Run) error {
	c := *r
	c.Locals, c.Names = slices.Clone(r.Locals), slices.Clone(r.Names)
	c.Holdings = nil
	for _, h := range r.Holdings {
		h.Bits, h.Copies, h.Names, h.Also = slices.Clone(h.Bits), slices.Clone(h.Copies), slices.Clone(h.Names),
			slices.Clone(h.Also)
		c.Holdings = append(c.Holdings, h)
	}
	im.runs = append(im.runs, c)
	return nil
}

func (im *image) Rank(i int, img *events.RankImage) error {
	for len(im.states) <= i {
		im.states = append(im.states, events.RankImage{})
	}
	im.states[i] = *img
	return nil
}

// canonical returns a canonical form: ranks by name, runs by id, bitmaps as long as the runs.
func (im *image) canonical() *image {
	out := &image{ranks: slices.Clone(im.ranks), states: make([]events.RankImage, len(im.ranks))}
	slices.SortFunc(out.ranks, func(a, b RankState) int { return compareNames(nameOf(a.Key()), nameOf(b.Key())) })
	place := make(map[events.RankKey]uint32)
	for i := range out.ranks {
		place[out.ranks[i].Key()] = uint32(i)
	}
	for i := range im.ranks {
		if i < len(im.states) {
			out.states[place[im.ranks[i].Key()]] = im.states[i]
		}
	}
	for i := range im.runs {
		out.Run(&im.runs[i])
	}
	slices.SortFunc(out.runs, func(a, b events.Run) int { return cmp.Compare(a.ID, b.ID) })
	for i := range out.runs {
		r := &out.runs[i]
		for j := range r.Holdings {
			h := &r.Holdings[j]
			h.Rank = place[im.ranks[h.Rank].Key()]
			if popcount(h.Bits) == 0 {
				h.Bits = nil
			} else {
				h.Bits = append(h.Bits, make([]uint64, (len(r.Locals)+63)/64-len(h.Bits))...)
			}
		}
		slices.SortFunc(r.Holdings, func(a, b events.Holding) int { return compareHoldings(&a, &b) })
	}
	return out
}

// equal compares the content of two images.
func (im *image) equal(other *image) bool {
	x, y := im.canonical(), other.canonical()
	return slices.EqualFunc(x.runs, y.runs, equalRuns) && x.rest() == y.rest()
}

func equalRuns(x, y events.Run) bool {
	return x.ID == y.ID && x.Space == y.Space && x.Parent == y.Parent && x.Offset == y.Offset &&
		slices.Equal(x.Locals, y.Locals) && slices.Equal(x.Names, y.Names) &&
		slices.EqualFunc(x.Holdings, y.Holdings, equalHoldings)
}

func equalHoldings(x, y events.Holding) bool {
	return x.Rank == y.Rank && x.Tier == y.Tier && x.Group == y.Group && x.Lead == y.Lead &&
		slices.Equal(x.Bits, y.Bits) &&
		slices.Equal(x.Copies, y.Copies) && slices.Equal(x.Names, y.Names) && slices.Equal(x.Also, y.Also)
}

// rest formats everything except the runs. nil and empty slices are equal.
func (im *image) rest() string {
	ranks, _ := json.Marshal(im.ranks)
	return fmt.Sprintf("%s\n%+v", ranks, im.states)
}

// text formats the image for error messages.
func (im *image) text() string {
	c := im.canonical()
	return fmt.Sprintf("%+v\n%s", c.runs, c.rest())
}

// writeTo passes the image to a Sink.
func (im *image) writeTo(t rapid.TB, s Sink) {
	t.Helper()
	for i := range im.runs {
		if err := s.Run(&im.runs[i]); err != nil {
			t.Fatal(err)
		}
	}
	for i := range im.states {
		if err := s.Rank(i, &im.states[i]); err != nil {
			t.Fatal(err)
		}
	}
}

var epoch = time.Date(2026, 11, 21, 8, 0, 0, 123456789, time.UTC)

// store is a bucket with a partition, and the writing process.
type store struct {
	values map[string][]byte
	log    Log
	index  *RunIndex
	m      *Manifest

	wrote   int // new chunks of the last snapshot
	bytes   int // bytes of the new chunks
	deleted int

	inlineRanks int // if not 0: the limit of the Writer
}

func newStore() *store {
	return &store{values: map[string][]byte{}, log: Log{Namespace: "test", Stream: "KV_EVENTS_test_3", Epoch: epoch,
		First: 1, Last: 1 << 40}}
}

func (s *store) bucket() Bucket {
	b := Bucket{Partition: 3, Manifests: map[string][]byte{}, Keys: []string{}}
	for k, v := range s.values {
		b.Keys = append(b.Keys, k)
		if key, ok := ParseKey(k); ok && key.Type != ChunkKey {
			b.Manifests[k] = v
		}
	}
	return b
}

func (s *store) fetch(key string) ([]byte, error) {
	if v, ok := s.values[key]; ok {
		return v, nil
	}
	return nil, ErrMissing
}

func config(im *image, seq events.StreamSeq) Config {
	return Config{Namespace: "test", Stream: "KV_EVENTS_test_3", Epoch: epoch, Seq: seq, Created: epoch.Add(time.Hour),
		Writer: "node-1",
		Spaces: []Space{{1, "model", 16}}, Ranks: im.ranks}
}

// write writes a snapshot, from the plan to the cleanup.
func (s *store) write(t rapid.TB, im *image, seq events.StreamSeq) *Manifest {
	t.Helper()
	plan, err := PlanWrite(s.bucket(), s.log, seq)
	if err != nil {
		t.Fatal(err)
	}
	s.wrote, s.bytes = 0, 0
	w, err := NewWriter(config(im, seq), plan, s.index, func(key string, data []byte) error {
		if _, twice := s.values[key]; twice {
			t.Errorf("chunk %s was written twice", key)
		}
		if len(data) > maxChunk {
			t.Errorf("chunk %s has %d bytes", key, len(data))
		}
		s.values[key] = data
		s.wrote++
		s.bytes += len(data)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.inlineRanks != 0 {
		w.inlineRanks = s.inlineRanks
	}
	im.writeTo(t, w)
	m, index, err := w.Close()
	if err != nil {
		t.Fatal(err)
	}
	if plan.CopyKey != "" {
		s.values[plan.CopyKey] = plan.Copy
	}
	if s.values[ManifestKey(3)], err = m.Encode(); err != nil {
		t.Fatal(err)
	}
	clean := plan.After(m, s.bucket().Keys)
	s.deleted = len(clean.Delete)
	for _, k := range clean.Delete {
		delete(s.values, k)
	}
	s.m, s.index = m, index
	return m
}

// read restores the newest generation.
func (s *store) read(t rapid.TB) (*image, *RunIndex) {
	t.Helper()
	choice := Choose(s.bucket(), s.log)
	if len(choice.Usable) == 0 {
		t.Fatalf("nothing to restore: %v", choice.Rejected)
	}
	im := new(image)
	index, err := Read(choice.Usable[0], s.fetch, func(ranks []RankState) (Sink, error) {
		im.ranks = ranks
		return im, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return im, index
}

// size returns the bytes in the bucket.
func (s *store) size() (n int) {
	for _, v := range s.values {
		n += len(v)
	}
	return n
}
