package load

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/prompts"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var seed = flag.Uint64("seed", 1, "of random tests")

// ops is the source of a random walk's choices.
type ops interface {
	IntN(n int) int
}

func rankKey(i int) events.RankKey {
	return events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", i/2)), Rank: events.Rank(i % 2)}
}

// prompt returns a prompt of random length, similar to few patterns, so many requests share blocks. A hash does not
// depend on the position.
func prompt(o ops) []events.SeqHash {
	seq := make([]events.SeqHash, o.IntN(12))
	turn := o.IntN(3)
	for i := range seq {
		seq[i] = events.SeqHash(1)
		if i >= 3 {
			seq[i] = events.SeqHash(10 + turn)
		}
		if i >= 6 && o.IntN(4) == 0 {
			seq[i] = events.SeqHash(100 + o.IntN(3))
		}
	}
	return seq
}

// walk runs random operations on a table and a twin, and compares all answers. Fractions are sixteenths, so the twin's
// sums are exact.
func walk(o ops, steps int) error {
	const expiry = 300 * time.Second
	table, w, now := NewTable(7, Limits{Expiry: expiry}), newTwin(expiry), time.Duration(0)
	for step := range steps {
		id := fmt.Sprint("r", o.IntN(40))
		var got, want error
		var what string
		switch o.IntN(11) {
		case 0, 1, 2:
			b := Booking{ID: id, Rank: rankKey(o.IntN(6)), Hashes: prompt(o), NoReuse: o.IntN(5) == 0,
				PrefillTokens: int64(o.IntN(3) * 100)}
			what = fmt.Sprintf("book %+v", b)
			got, want = table.Book(now, b), w.book(now, b)
		case 3:
			what = "prefill complete " + id
			got, want = table.PrefillComplete(now, id), w.prefillComplete(now, id)
		case 4, 5, 6:
			f := float64(o.IntN(18)-1) / 16
			what = fmt.Sprint("output block ", id, " ", f)
			got, want = table.OutputBlock(now, id, f), w.outputBlock(now, id, f)
		case 7:
			what = "free " + id
			got, want = table.Free(now, id), w.free(now, id)
		case 8:
			now += time.Duration(o.IntN(20)) * time.Second
			what = fmt.Sprint("tick ", now)
			table.Tick(now)
			w.tick(now)
		case 10:
			what = "progress " + id
			got, want = table.Progress(now, id), w.reportProgress(now, id)
		case 9:
			if o.IntN(4) == 0 {
				what = fmt.Sprint("remove ", id)
				n := o.IntN(6)
				table.RemoveRank(rankKey(n))
				w.removeRank(rankKey(n))
			}
		}
		if !errors.Is(got, want) {
			return fmt.Errorf("step %d: %s: %v, want %v", step, what, got, want)
		}
		if err := table.Check(); err != nil {
			return fmt.Errorf("step %d: %s: %w", step, what, err)
		}
		seq := prompt(o)
		rows := 0
		for i, l := range table.Loads(nil, seq) {
			rows++
			if want := w.load(l.Rank, seq); l != want {
				return fmt.Errorf("step %d: %s: %+v of %v, want %+v", step, what, l, seq, want)
			}
			if row := table.byRank[l.Rank]; row == nil || row.index != i {
				return fmt.Errorf("step %d: %s: %v is row %+v", step, what, l.Rank, row)
			}
		}
		for rank := range w.ranks {
			if table.byRank[rank] == nil && w.load(rank, nil).Requests > 0 {
				return fmt.Errorf("step %d: %s: %v has no row", step, what, rank)
			}
		}
		if table.Has(id) != (w.requests[id] != nil) || table.Len() != len(w.requests) {
			return fmt.Errorf("step %d: %s: has the id: %v, %d in all, want %d", step, what, table.Has(id), table.Len(),
				len(w.requests))
		}
	}
	return nil
}

func TestTableLikeItsTwin(t *testing.T) {
	for round := range uint64(8) {
		t.Run(fmt.Sprint(*seed+round), func(t *testing.T) {
			t.Parallel()
			if err := walk(rand.New(rand.NewPCG(*seed+round, 1)), testkit.Rounds(800)); err != nil {
				t.Error(err)
			}
		})
	}
}

// bytesOps reads choices from bytes. After the last byte, IntN panics with noneLeft and ends the walk.
type bytesOps struct{ left []byte }

type noneLeft struct{}

func (b *bytesOps) IntN(n int) int {
	if len(b.left) == 0 {
		panic(noneLeft{})
	}
	v := int(b.left[0]) % n
	b.left = b.left[1:]
	return v
}

func FuzzTable(f *testing.F) {
	f.Add([]byte("\x00\x01\x02\x05\x01\x01\x01\x00\x02\x01\x03\x04\x05\x06\x07\x08\x09"))
	f.Fuzz(func(t *testing.T, text []byte) {
		defer func() {
			if v := recover(); v != nil {
				if _, over := v.(noneLeft); !over {
					panic(v)
				}
			}
		}()
		if err := walk(&bytesOps{text}, 500); err != nil {
			t.Error(err)
		}
	})
}

// TestWeightsLikeDynamo repeats the weights of Dynamo's selection service and sources: the decay of an unshared prompt,
// the decay of a shared prompt, and weights that stay.
func TestWeightsLikeDynamo(t *testing.T) {
	table := NewTable(1, Limits{})
	rank := rankKey(0)
	book := func(id string, seq ...events.SeqHash) {
		t.Helper()
		if err := table.Book(0, Booking{ID: id, Rank: rank, Hashes: seq, PrefillTokens: 50}); err != nil {
			t.Fatal(err)
		}
	}
	want := func(blocks int64, tokens int64) {
		t.Helper()
		if l := table.Loads(nil, nil)[0]; l.Blocks != blocks || l.PrefillTokens != tokens {
			t.Errorf("%d blocks, %d tokens; want %d, %d", l.Blocks, l.PrefillTokens, blocks, tokens)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	book("s2", 11, 12, 13)
	want(3, 50)
	must(table.PrefillComplete(0, "s2"))
	must(table.PrefillComplete(0, "s2"))
	must(table.OutputBlock(0, "s2", 0.5))
	want(2, 0) // 4 halves
	must(table.OutputBlock(0, "s2", -1))
	want(3, 0)
	book("s3", 11, 12, 13, 14) // 14 is new and whole, 11 to 13 keep the weight
	want(4, 50)
	must(table.Free(0, "s2"))
	want(3, 50) // 1.5 + 1 = 2.5
	if err := table.Free(0, "s2"); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
	must(table.Free(0, "s3"))
	want(0, 0)
	book("s4", 11) // the block was removed before: whole
	want(1, 50)
	must(table.Free(0, "s4"))
	// Seven blocks of a fourteenth are a half.
	book("s5", 1, 2, 3, 4, 5, 6)
	must(table.OutputBlock(0, "s5", 1.0/14))
	want(1, 50)
}

func TestRefusals(t *testing.T) {
	table := NewTable(1, Limits{Requests: 2, Blocks: 10, Prompt: 8})
	rank := rankKey(0)
	for _, c := range []struct {
		name string
		err  error
		do   func() error
	}{
		{"no id", ErrInvalid, func() error { return table.Book(0, Booking{Rank: rank}) }},
		{"no worker", ErrInvalid, func() error { return table.Book(0, Booking{ID: "a"}) }},
		{"negative", ErrInvalid, func() error { return table.Book(0, Booking{ID: "a", Rank: rank, PrefillTokens: -1}) }},
		{"long", ErrInvalid, func() error {
			return table.Book(0, Booking{ID: "a", Rank: rank, Hashes: make([]events.SeqHash, 9)})
		}},
		{"first", nil, func() error {
			return table.Book(0, Booking{ID: "a", Rank: rank, Hashes: make([]events.SeqHash, 8)})
		}},
		{"again", ErrConflict, func() error { return table.Book(0, Booking{ID: "a", Rank: rank}) }},
		{"blocks", ErrFull, func() error {
			return table.Book(0, Booking{ID: "b", Rank: rank, Hashes: make([]events.SeqHash, 3)})
		}},
		{"second", nil, func() error {
			return table.Book(0, Booking{ID: "b", Rank: rank, Hashes: make([]events.SeqHash, 1)})
		}},
		{"third", ErrFull, func() error { return table.Book(0, Booking{ID: "c", Rank: rank}) }},
		{"NaN", ErrInvalid, func() error { return table.OutputBlock(0, "a", math.NaN()) }},
		{"more than one", ErrInvalid, func() error { return table.OutputBlock(0, "a", 1.5) }},
		{"tenth block", nil, func() error { return table.OutputBlock(0, "a", 1) }},
		{"eleventh block", ErrFull, func() error { return table.OutputBlock(0, "a", 1) }},
		{"unknown", ErrUnknown, func() error { return table.OutputBlock(0, "x", 1) }},
		{"too old", ErrUnknown, func() error { return table.PrefillComplete(300*time.Second, "a") }},
	} {
		if err := c.do(); !errors.Is(err, c.err) {
			t.Errorf("%s: %v, want %v", c.name, err, c.err)
		}
	}
	if c := table.Counts; c.Booked != 2 || c.Conflicts != 1 || c.Full != 3 || c.Invalid != 6 || c.Unknown != 2 ||
		c.Expired != 2 {
		t.Errorf("%+v", c)
	}
	if err := table.Check(); err != nil {
		t.Error(err)
	}
}

// TestRowsEnd removes ranks, and lets idle ranks expire.
func TestRowsEnd(t *testing.T) {
	table := NewTable(1, Limits{Expiry: time.Minute})
	for i := range 4 {
		if err := table.Book(0, Booking{ID: fmt.Sprint(i), Rank: rankKey(i)}); err != nil {
			t.Fatal(err)
		}
	}
	before := table.Generation()
	for _, l := range table.Loads(nil, nil) {
		if l.Rank.Instance == "w0" {
			table.RemoveRank(l.Rank)
		}
	}
	if rows := table.Loads(nil, nil); len(rows) != 2 || table.Generation() == before {
		t.Errorf("%+v", rows)
	}
	if !table.Has("0") || table.Free(0, "0") == nil || table.Has("0") || !table.Has("1") {
		t.Error("the id of a removed rank must be in use until the first call")
	}
	if err := table.Free(0, "2"); err != nil {
		t.Fatal(err)
	}
	table.Tick(time.Minute)
	if rows := table.Loads(nil, nil); len(rows) != 1 || table.Len() != 0 || rows[0].Rank != rankKey(3) {
		t.Errorf("%+v", rows) // rank 3 had a request until now
	}
	table.Tick(2 * time.Minute)
	if rows := table.Loads(nil, nil); len(rows) != 0 {
		t.Errorf("%+v", rows)
	}
}

// TestDepthsOfManyRanks books random prefixes of three prompts on 100 ranks, and checks the depths.
func TestDepthsOfManyRanks(t *testing.T) {
	r := rand.New(rand.NewPCG(*seed, 5))
	for range 20 {
		table := NewTable(1, Limits{})
		base := make([][]events.SeqHash, 3)
		for i := range base {
			base[i] = make([]events.SeqHash, 100)
			for k := range base[i] {
				base[i][k] = events.SeqHash(k)
				if k >= 20*i+20 {
					base[i][k] += events.SeqHash(1000 * i)
				}
			}
		}
		depths := map[events.RankKey][]int{}
		for i := range 400 {
			rank, of, n := rankKey(r.IntN(100)), r.IntN(len(base)), r.IntN(101)
			if err := table.Book(0, Booking{ID: fmt.Sprint(i), Rank: rank, Hashes: base[of][:n]}); err != nil {
				t.Fatal(err)
			}
			if depths[rank] == nil {
				depths[rank] = make([]int, len(base))
			}
			for q := range base {
				depths[rank][q] = max(depths[rank][q], prompts.Common(base[of][:n], base[q]))
			}
		}
		for q, seq := range base {
			n := r.IntN(101)
			for _, l := range table.Loads(nil, seq[:n]) {
				if want := min(n, depths[l.Rank][q]); int(l.Depth) != want {
					t.Fatalf("%v has %d of %d blocks of prompt %d, want %d", l.Rank, l.Depth, n, q, want)
				}
			}
		}
	}
}
