package queue

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

var seed = flag.Uint64("seed", 19, "of random tests")

// check verifies the invariants of a queue's fields.
func (q *Queue) check() error {
	n, raw, uncached, groups := 0, uint64(0), uint64(0), map[uint64]int{}
	for i := range q.classes {
		c := &q.classes[i]
		r, cached := uint64(0), uint64(0)
		for k, w := range c.list {
			if q.byID[w.id] != w || w.Class != i || k > 0 && c.list[k-1].compare(w) >= 0 {
				return fmt.Errorf("class %s: %+v at %d", c.Name, w, k)
			}
			r, cached = r+w.Raw, cached+w.Cached
			uncached += w.Raw - min(w.Cached, w.Raw)
			groups[w.Group]++
		}
		if r != c.raw || cached != c.cached || len(c.list) == 0 && c.deficit != 0 || c.deficit < 0 {
			return fmt.Errorf("class %s: %d and %d tokens, deficit %v", c.Name, c.raw, c.cached, c.deficit)
		}
		n, raw = n+len(c.list), raw+r
	}
	if n != len(q.byID) || raw != q.raw || uncached != q.Uncached() || fmt.Sprint(groups) != fmt.Sprint(q.groups) {
		return fmt.Errorf("%d of %d, %d of %d tokens, %v", n, len(q.byID), raw, q.raw, q.groups)
	}
	return nil
}

// twin is the naive form of a queue: a list per class, sorted before every choice.
type twin struct {
	classes []Class
	lists   [][]twinEntry
	deficit []float64
	turn    int
	granted bool
}

type twinEntry struct {
	Entry
	id uint64
}

func (t *twin) cost(e *twinEntry) float64 {
	if e.Cached >= e.Raw {
		return 1
	}
	return float64(e.Raw - e.Cached)
}

func (t *twin) score(e *twinEntry) float64 {
	jump := e.Jump
	if jump < 0 {
		jump = 0
	}
	switch t.classes[e.Class].Policy {
	case FCFS:
		return jump - e.Arrival
	case LCFS:
		return jump + e.Arrival
	default:
		return (1 + jump) / t.cost(e)
	}
}

// first returns the next request of a class outside the failed groups.
func (t *twin) first(class int, failed map[uint64]bool) *twinEntry {
	list := slices.Clone(t.lists[class])
	slices.SortFunc(list, func(a, b twinEntry) int {
		return cmp.Or(cmp.Compare(b.Strict, a.Strict), cmp.Compare(t.score(&b), t.score(&a)), cmp.Compare(a.id, b.id))
	})
	for i := range list {
		if !failed[list[i].Group] {
			return &list[i]
		}
	}
	return nil
}

func (t *twin) remove(id uint64) {
	for c := range t.lists {
		t.lists[c] = slices.DeleteFunc(t.lists[c], func(e twinEntry) bool { return e.id == id })
		if len(t.lists[c]) == 0 {
			t.deficit[c] = 0
		}
	}
}

// examine repeats turns until no request is left to try.
func (t *twin) examine(try func(id uint64) bool) {
	failed := map[uint64]bool{}
	for {
		left := []int{}
		for c := range t.classes {
			if t.first(c, failed) != nil {
				left = append(left, c)
			}
		}
		if len(left) == 0 {
			return
		}
		e := t.first(t.turn, failed)
		if e == nil {
			t.turn, t.granted = (t.turn+1)%len(t.classes), false
			continue
		}
		if t.cost(e) > t.deficit[t.turn] && !t.granted {
			t.deficit[t.turn] += t.classes[t.turn].Quantum
			t.granted = true
		}
		switch {
		case t.cost(e) > t.deficit[t.turn] && len(left) > 1:
			t.turn, t.granted = (t.turn+1)%len(t.classes), false
		case try(e.id):
			t.deficit[t.turn] = max(t.deficit[t.turn]-t.cost(e), 0)
			t.remove(e.id)
		default:
			failed[e.Group] = true
		}
	}
}

// TestQueueAgainstTwin adds random requests to a queue and the twin, and compares the order of tries and the
// successful requests.
func TestQueueAgainstTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(*seed, 1))
	refused, gone, failed := map[string]int{}, 0, 0
	for range 300 {
		var classes []Class
		for i := range 1 + rng.IntN(4) {
			limit := func(most float64) *float64 {
				if rng.IntN(2) == 0 {
					return nil
				}
				v := rng.Float64() * most
				if rng.IntN(8) == 0 {
					v = 0
				}
				return &v
			}
			classes = append(classes, Class{Name: fmt.Sprint("c", i), Policy: []Policy{FCFS, LCFS, WSPT}[rng.IntN(3)],
				Quantum: float64(100 + rng.IntN(1000)), Limits: Limits{limit(6), limit(3000), limit(1500)}})
		}
		q := New(classes)
		w := &twin{classes: classes, lists: make([][]twinEntry, len(classes)), deficit: make([]float64, len(classes))}
		free := map[uint64]int{} // by group: the number of successful tries
		group := map[uint64]uint64{}
		for step := range 200 {
			switch rng.IntN(5) {
			case 0, 1, 2:
				e := Entry{Class: rng.IntN(len(classes)), Group: rng.Uint64N(4), Strict: rng.Uint32N(2),
					Jump: float64(rng.IntN(5) - 1), Arrival: float64(step), Raw: rng.Uint64N(2000)}
				e.Cached = rng.Uint64N(e.Raw + 2)
				ranks := 1 + rng.IntN(4)
				id, err := q.Add(e, ranks)
				why, sum := "", [3]float64{1, float64(e.Raw), float64(e.Cached)}
				for _, o := range w.lists[e.Class] {
					sum[0], sum[1], sum[2] = sum[0]+1, sum[1]+float64(o.Raw), sum[2]+float64(o.Cached)
				}
				l := classes[e.Class].Limits
				for i, limit := range []*float64{l.Requests, l.RawTokens, l.CachedTokens} {
					if limit != nil && why == "" && (*limit == 0 || sum[i] > *limit*float64(ranks)) {
						why = []string{"requests", "raw_tokens", "cached_tokens"}[i]
					}
				}
				var r *Refusal
				if got := ""; errors.As(err, &r) || err == nil {
					if r != nil {
						got = r.Limit
					}
					if got != why {
						t.Fatalf("refused because of %q (%v), want %q", got, err, why)
					}
				}
				if err != nil {
					refused[why]++
					continue
				}
				w.lists[e.Class] = append(w.lists[e.Class], twinEntry{e, id})
				group[id] = e.Group
			case 3:
				if len(q.byID) > 0 {
					for id := range q.byID {
						if !q.Remove(id) || q.Remove(id) {
							t.Fatal("the request was waiting twice, or not at all")
						}
						w.remove(id)
						break
					}
				}
			case 4:
				for g := range uint64(4) {
					free[g] = rng.IntN(3)
				}
				var tried [2][]uint64
				for i, examine := range []func(func(uint64) bool){q.Examine, w.examine} {
					left := map[uint64]int{0: free[0], 1: free[1], 2: free[2], 3: free[3]}
					examine(func(id uint64) bool {
						tried[i] = append(tried[i], id)
						g := group[id]
						left[g]--
						if left[g] >= 0 {
							gone++
						} else {
							failed++
						}
						return left[g] >= 0
					})
				}
				if !slices.Equal(tried[0], tried[1]) {
					t.Fatalf("tried %v, want %v", tried[0], tried[1])
				}
			}
			n := 0
			for c, list := range w.lists {
				n += len(list)
				if q.classes[c].deficit != w.deficit[c] {
					t.Fatalf("class %d: deficit %v, want %v", c, q.classes[c].deficit, w.deficit[c])
				}
			}
			if err := q.check(); err != nil || q.Len() != n {
				t.Fatalf("%d wait, want %d; %v", q.Len(), n, err)
			}
		}
	}
	t.Log(refused, gone, failed)
	if gone < 5000 || failed < 5000 || len(refused) < 3 {
		t.Errorf("%v, %d, %d", refused, gone, failed)
	}
}

// TestShares: classes with a permanent backlog get tokens in the ratio of their quanta, for any sizes of requests.
func TestShares(t *testing.T) {
	classes := []Class{{Name: "a", Quantum: 300}, {Name: "b", Quantum: 100}}
	q := New(classes)
	sizes := []uint64{10, 700}
	of := map[uint64]int{}
	add := func(class int) {
		id, err := q.Add(Entry{Class: class, Raw: sizes[class]}, 1)
		if err != nil {
			t.Fatal(err)
		}
		of[id] = class
	}
	for range 200 {
		add(0)
		add(1)
	}
	var got [2]uint64
	for range 20_000 {
		room, went := true, 0
		q.Examine(func(id uint64) bool {
			if !room {
				return false
			}
			room, went = false, of[id]
			got[went] += sizes[went]
			return true
		})
		add(went)
	}
	if ratio := float64(got[0]) / float64(got[1]); ratio < 2.9 || ratio > 3.1 {
		t.Errorf("tokens %v: ratio %v, want 3", got, ratio)
	}
}
