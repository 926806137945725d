package snapshot

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestSize checks the budgets of the bucket, in bytes per holding.
func TestSize(t *testing.T) {
	for _, c := range []struct {
		name   string
		s      *synth
		budget float64
	}{
		{"conversations", conversations(64, 6000), 20},
		{"shared by all", sharedByAll(256, 101, 310), 1},
		{"holey", holey(64, 6000), 40},
		{"private", private(16, 20, 300), 20},
	} {
		s := newStore()
		m := s.write(t, c.s.im, 1)
		per := float64(s.size()) / float64(m.Counts.Holdings)
		t.Logf("%s: %d holdings, %.2f bytes each", c.name, m.Counts.Holdings, per)
		if per > c.budget {
			t.Errorf("%s takes %.2f bytes a holding, more than %.0f", c.name, per, c.budget)
		}
	}
}

// TestNothingChanged: the Writer does not write unchanged chunks again.
func TestNothingChanged(t *testing.T) {
	testkit.Sequential(t)
	for name, c := range map[string]*synth{"conversations": conversations(16, 6000),
		"shared by all": sharedByAll(64, 101, 310), "holey": holey(16, 3000)} {
		c.addTombstones(500)
		s := newStore()
		s.write(t, c.im, 1)
		chunks := s.m.Chunks
		for range 3 {
			s.write(t, c.im, 1)
			if s.wrote != 0 || s.m.Counts.New != 0 || !slices.Equal(s.m.Chunks, chunks) {
				t.Errorf("%s: %d chunks written for an unchanged image", name, s.wrote)
			}
			got, index := s.read(t) // also after a restart
			if !got.equal(c.im) {
				t.Fatalf("%s: the restored image differs", name)
			}
			s.index = index
		}
		// A process without an index writes the same chunks of an image that was written whole.
		s.index = nil
		if s.write(t, c.im, 1); s.wrote != 0 || !slices.Equal(s.m.Chunks, chunks) {
			t.Errorf("%s: %d chunks written by a new process", name, s.wrote)
		}
	}
}

// TestRankChanged: a moved cursor writes no chunk, and new tombstones write only the rank's own chunks.
func TestRankChanged(t *testing.T) {
	testkit.Sequential(t)
	c := conversations(64, 6000)
	c.addTombstones(2000)
	s := newStore()
	s.write(t, c.im, 1)
	for i := range c.im.ranks {
		c.im.ranks[i].LastID += 100
		c.im.ranks[i].Cursor.Seq++
	}
	if s.write(t, c.im, 2); s.wrote != 0 {
		t.Errorf("%d chunks written for cursors", s.wrote)
	}
	c.im.states[5].Tombstones = c.im.states[5].Tombstones[1:]
	if s.write(t, c.im, 3); s.wrote != 1 || s.bytes > 300_000 {
		t.Errorf("%d chunks of %d bytes written for a rank's tombstones", s.wrote, s.bytes)
	}
	// A new rank moves no section of other ranks.
	c.im.ranks = slices.Insert(c.im.ranks, 3, RankState{Instance: "new"})
	c.im.states = slices.Insert(c.im.states, 3, events.RankImage{Clock: 5})
	for i := range c.im.runs {
		for j := range c.im.runs[i].Holdings {
			if h := &c.im.runs[i].Holdings[j]; h.Rank >= 3 {
				h.Rank++
			}
		}
	}
	if s.write(t, c.im, 4); s.wrote > 2 || s.bytes > 500_000 {
		t.Errorf("%d chunks of %d bytes written for a new rank", s.wrote, s.bytes)
	}
	if got, _ := s.read(t); !got.equal(c.im) {
		t.Error("the restored image differs")
	}
}

// TestRunChanged: a changed, new or removed run writes little more than the run.
func TestRunChanged(t *testing.T) {
	c := conversations(64, 6000)
	s := newStore()
	s.write(t, c.im, 1)
	total := s.m.Counts.Bytes
	check := func(what string, seq events.StreamSeq) {
		t.Helper()
		s.write(t, c.im, seq)
		if s.wrote > 3 || s.bytes > 60_000 || s.m.Counts.New != uint64(s.bytes) {
			t.Errorf("%s: %d chunks, %d bytes of %d", what, s.wrote, s.bytes, total)
		}
		if got, _ := s.read(t); !got.equal(c.im) {
			t.Fatalf("%s: the restored image differs", what)
		}
	}
	c.im.runs[700].Names[3]++
	check("a name", 2)
	c.im.runs = slices.Delete(c.im.runs, 100, 101)
	check("a run less", 3)
	c.im.runs = slices.Insert(c.im.runs, 400, *c.run(300, nil))
	c.im.runs = c.im.runs[:len(c.im.runs)-1]
	check("a run more", 4)
	addHolding(&c.im.runs[0], 0, 0)
	c.im.runs[0].Holdings = slices.Delete(c.im.runs[0].Holdings, 0, 1)
	slices.SortFunc(c.im.runs[0].Holdings, func(a, b events.Holding) int { return compareHoldings(&a, &b) })
	check("a holder of a run that all hold", 5)
}

// TestWorkerChanged: if one of 64 workers changes, less than a tenth of the bytes is new.
func TestWorkerChanged(t *testing.T) {
	testkit.Sequential(t)
	c := conversations(64, 6000)
	c.addTombstones(200)
	s := newStore()
	s.write(t, c.im, 1)
	rng := rand.New(rand.NewPCG(3, 4))
	worst, sum := 0.0, 0.0
	const rounds = 60
	for i := range rounds {
		c.churn(rng.IntN(64), []float64{0.05, 0.2, 0.5}[i%3])
		s.write(t, c.im, events.StreamSeq(i+2))
		share := float64(s.bytes) / float64(s.m.Counts.Bytes)
		worst, sum = max(worst, share), sum+share
		if share > 0.1 {
			t.Errorf("%.3f of the bytes are new in round %d after one of 64 workers changed", share, i)
		}
		if per := float64(s.m.Counts.Bytes) / float64(s.m.Counts.Holdings); per > 20 {
			t.Errorf("round %d: %.1f bytes a holding, %d dead of %d", i, per, s.m.Counts.Dead, s.m.Counts.Bytes)
		}
		if i%10 == 9 {
			got, index := s.read(t)
			if !got.equal(c.im) {
				t.Fatal("the restored image differs")
			}
			s.index = index
		}
	}
	t.Logf("one changed worker of 64: %.3f of the bytes are new on average, %.3f at worst; %d chunks, %.2f dead",
		sum/rounds, worst, len(s.m.Chunks), float64(s.m.Counts.Dead)/float64(s.m.Counts.Bytes))
	if sum/rounds > 0.1 {
		t.Errorf("%.3f of the bytes are new on average", sum/rounds)
	}
}

// TestManySnapshots changes an image many times. The share of dead records stays low, the run index stays right, and
// every restored image is right.
func TestManySnapshots(t *testing.T) {
	c := conversations(8, 3000)
	s := newStore()
	rng := rand.New(rand.NewPCG(5, 6))
	for i := range 100 {
		switch rng.IntN(4) {
		case 0:
		case 1:
			c.churn(rng.IntN(8), 0.1)
		case 2:
			for w := range 8 {
				c.churn(w, 0.3)
			}
		case 3:
			k := 1 + rng.IntN(len(c.im.runs)-1)
			c.im.runs[k].Names[0]++
		}
		s.write(t, c.im, events.StreamSeq(i+1))
		got, index := s.read(t)
		if !got.equal(c.im) {
			t.Fatalf("snapshot %d: the restored image differs", i)
		}
		if rng.IntN(5) == 0 {
			s.index = index
		}
		if n := len(s.m.Chunks); n > 2*anewShare {
			t.Errorf("snapshot %d: %d chunks", i, n)
		}
	}
	for i := range 20 {
		c.im.runs[0].Names[0]++
		s.write(t, c.im, events.StreamSeq(200+i))
	}
	if n := s.m.Counts; n.Dead > n.Bytes/deadShare {
		t.Errorf("%d of %d bytes are dead", n.Dead, n.Bytes)
	}
}

// TestStaleRunIndex: a run index with chunks that the bucket lacks is harmless.
func TestStaleRunIndex(t *testing.T) {
	c := conversations(8, 3000)
	s := newStore()
	s.write(t, c.im, 1)
	stale := s.index
	for _, k := range s.bucket().Keys {
		delete(s.values, k)
	}
	c.churn(1, 0.2)
	s.write(t, c.im, 2)
	s.index = stale
	s.write(t, c.im, 3)
	if got, _ := s.read(t); !got.equal(c.im) {
		t.Fatal("the restored image differs")
	}
}
