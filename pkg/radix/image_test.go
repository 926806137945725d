package radix

import (
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// grown returns an index after a history, with an image of the whole index.
func grown(t *testing.T, seed uint64) (*world, []RankID, *image) {
	w := newWorld(t, seeded{rand.New(rand.NewPCG(seed, 9))})
	for range 120 {
		w.step()
	}
	var ids []RankID
	for _, m := range w.ranks {
		ids = append(ids, m.id)
	}
	img := &image{}
	if _, err := w.x.StartExport(ids).Step(1<<30, img); err != nil {
		t.Fatal(err)
	}
	return w, ids, img
}

func (m *image) sort() {
	slices.SortFunc(m.runs, func(a, b events.Run) int { return int(int64(a.ID) - int64(b.ID)) })
}

// TestImagesRepeat: the unchanged part of an image is the same in the next image, also by way of another index.
func TestImagesRepeat(t *testing.T) {
	for seed := range uint64(testkit.Rounds(40)) {
		w, ids, first := grown(t, seed)
		again := &image{}
		for e, done := w.x.StartExport(ids), false; !done; {
			var err error
			if done, err = e.Step(1, again); err != nil {
				t.Fatal(err)
			}
		}
		first.sort()
		again.sort()
		if !reflect.DeepEqual(first, again) {
			t.Fatalf("seed %d: two images of one index differ", seed)
		}
		y := w.newIndex()
		var theirs []RankID
		for _, m := range w.ranks {
			theirs = append(theirs, y.AddRank(m.space, 16))
		}
		if err := first.into(y, theirs, false); err != nil {
			t.Fatal(err)
		}
		moved := &image{}
		if _, err := y.StartExport(theirs).Step(1<<30, moved); err != nil {
			t.Fatal(err)
		}
		same := 0
		for _, r := range moved.runs {
			if slices.ContainsFunc(first.runs, func(o events.Run) bool {
				return o.ID == r.ID &&
					o.Locals[0] == r.Locals[0]
			}) {
				same++
			}
		}
		if same < len(moved.runs) {
			t.Errorf("seed %d: %d of %d runs kept their ids", seed, same, len(first.runs))
		}
		if !reflect.DeepEqual(first.ranks, moved.ranks) {
			t.Errorf("seed %d: ranks differ", seed)
		}
	}
}

// TestBrokenImages: the index rejects or accepts a broken image. In either case it is valid after the ranks are
// dropped, and other ranks are unchanged.
func TestBrokenImages(t *testing.T) {
	refused, n := 0, testkit.Rounds(400)
	if testing.Short() {
		n = 300
	}
	var w *world
	var img *image
	for i := range n {
		rng := rand.New(rand.NewPCG(uint64(i), 4))
		if i%100 == 0 {
			w, _, img = grown(t, uint64(i))
		}
		broken := img.copy()
		for range 1 + rng.IntN(3) {
			broken.damage(rng)
		}
		var ids []RankID
		for _, m := range w.ranks {
			ids = append(ids, w.x.AddRank(m.space, 16))
		}
		if err := broken.into(w.x, ids, rng.IntN(2) == 0); err != nil {
			refused++
			if !errors.Is(err, errImage) {
				t.Fatalf("%d: %v", i, err)
			}
		} else if err := w.x.Check(); err != nil {
			t.Fatalf("%d: after an accepted image: %v", i, err)
		}
		for _, id := range ids {
			w.x.DropRank(id)
		}
		w.check()
	}
	if refused == 0 || refused == n {
		t.Errorf("%d of %d images were rejected", refused, n)
	}
}

func (m *image) copy() *image {
	c := &image{}
	for i := range m.runs {
		_ = c.Run(&m.runs[i])
	}
	for _, r := range m.ranks {
		r.Groups, r.Pending, r.Tombstones, r.Sets = slices.Clone(r.Groups), slices.Clone(r.Pending),
			slices.Clone(r.Tombstones), slices.Clone(r.Sets)
		c.ranks = append(c.ranks, r)
	}
	return c
}

// damage makes a random change.
func (m *image) damage(rng *rand.Rand) {
	if len(m.runs) == 0 {
		return
	}
	r := &m.runs[rng.IntN(len(m.runs))]
	rank := &m.ranks[rng.IntN(len(m.ranks))]
	small := func() uint32 { return rng.Uint32N(40) }
	switch rng.IntN(16) {
	case 0:
		r.Parent, r.Offset = events.RunID(small()), small()
	case 1:
		r.ID = events.RunID(rng.Uint32())
	case 2:
		r.Space = small()
	case 3:
		r.Locals = r.Locals[:rng.IntN(len(r.Locals)+1)]
	case 4:
		if len(r.Names) > 0 {
			r.Names[rng.IntN(len(r.Names))] = events.BlockHash(small())
		}
	case 5:
		r.Locals, r.Names = nil, nil
	case 6:
		m.runs = append(m.runs, *r)
	case 7:
		r.Offset++
	case 8:
		if len(rank.Tombstones) > 0 {
			rank.Tombstones[0].Block = small()
		}
	case 9:
		if len(rank.Pending) > 0 {
			rank.Pending[0].Event.Blocks = nil
		}
	case 10:
		rank.Groups = nil
	case 11:
		m.runs = m.runs[1:]
	default:
		if len(r.Holdings) == 0 {
			return
		}
		h := &r.Holdings[rng.IntN(len(r.Holdings))]
		switch rng.IntN(8) {
		case 0:
			h.Rank = small()
		case 1:
			h.Tier = events.Tier(small())
		case 2:
			h.Lead = small()
		case 3:
			h.Bits = append(h.Bits, rng.Uint64())
		case 4:
			h.Copies = append(h.Copies, events.BlockCount{Block: small(), Count: small()})
		case 5:
			h.Names = append(h.Names, events.BlockName{Block: small(), Name: events.BlockHash(small())})
		case 6:
			h.Also = append(h.Also, events.NamedCount{Block: small(), Name: events.BlockHash(small()), Count: small()})
		case 7:
			h.Group = events.GroupIndex(small())
		}
	}
}
