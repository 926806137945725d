package prompts

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var seedFlag = flag.Uint64("seed", 1, "seed of the random test; 0: another one each time")

// twin is the naive form of a trie: for each rank the number of its requests with each block, by the path.
type twin map[uint32]map[string]int

func path(seq []events.SeqHash) string { return fmt.Sprint(seq) }

func (w twin) add(id uint32, seq []events.SeqHash, n int) {
	if w[id] == nil {
		w[id] = map[string]int{}
	}
	for i := range seq {
		p := path(seq[:i+1])
		if w[id][p] += n; w[id][p] == 0 {
			delete(w[id], p)
		}
	}
}

func (w twin) depth(id uint32, seq []events.SeqHash) (n int) {
	for n < len(seq) && w[id][path(seq[:n+1])] > 0 {
		n++
	}
	return n
}

// check verifies the invariants, and that the trie has the blocks of the twin.
func check(t *Trie[int], w twin) error {
	found := twin{}
	var walk func(n *Node[int]) error
	walk = func(n *Node[int]) error {
		seq := n.Path()
		if len(seq) != n.End() || n.Parent == nil && len(n.Slots) != 0 {
			return fmt.Errorf("the path to %d has %d blocks", n.End(), len(seq))
		}
		for i, s := range n.Slots {
			if at, ok := n.Find(s.ID); !ok || at != i || i > 0 && n.Slots[i-1].ID >= s.ID {
				return fmt.Errorf("slot %d of the node at %d is out of place", i, n.Start)
			}
			if n.Parent.Parent != nil {
				if _, ok := n.Parent.Find(s.ID); !ok {
					return fmt.Errorf("rank %d has a hole before %d", s.ID, n.Start)
				}
			}
			if found[s.ID] == nil {
				found[s.ID] = map[string]int{}
			}
			for end := n.Start + 1; end <= n.End(); end++ {
				found[s.ID][path(seq[:end])] = s.Share
			}
		}
		for kid := range n.Kids {
			if kid.Parent != n || len(kid.Edge) == 0 || n.Kid(kid.Edge[0]) != kid || kid.Start != n.End() ||
				len(kid.Slots) == 0 {
				return fmt.Errorf("the node at %d with %d slots is out of place", kid.Start, len(kid.Slots))
			}
			if t.Copies && kid.Start > 0 && cap(kid.Edge) > 2*len(kid.Edge)+4 {
				return fmt.Errorf("the edge at %d keeps memory of %d blocks", kid.Start, cap(kid.Edge))
			}
			if err := walk(kid); err != nil {
				return err
			}
		}
		return nil
	}
	if err := walk(&t.Root); err != nil {
		return err
	}
	for id, blocks := range w {
		if !maps.Equal(blocks, found[id]) {
			return fmt.Errorf("rank %d has %v, want %v", id, found[id], blocks)
		}
		delete(found, id)
	}
	if len(found) > 0 {
		return fmt.Errorf("blocks of removed ranks are left: %v", found)
	}
	return nil
}

// TestTwin enters and removes random prompts of up to 40 ranks, splits nodes, and compares the trie with its twin.
func TestTwin(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	for round := range testkit.Rounds(60) {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		halved := 0
		trie := Trie[int]{Copies: round%2 == 0, Halved: func(head, tail *Node[int]) {
			if halved++; head.End() != tail.Start || tail.Parent != head || !slices.Equal(head.Slots, tail.Slots) {
				t.Errorf("seed %d, round %d: a split at %d", seed, round, tail.Start)
			}
		}}
		type request struct {
			id   uint32
			seq  []events.SeqHash
			tail *Node[int]
		}
		var requests []request
		w := twin{}
		ranks := 1 + rng.IntN(40)
		place := rng.Perm(ranks)
		prompt := func() []events.SeqHash {
			if len(requests) > 0 && rng.IntN(3) > 0 { // the beginning of another prompt, and a new end
				seq := requests[rng.IntN(len(requests))].seq
				seq = slices.Clone(seq[:rng.IntN(len(seq)+1)])
				for range rng.IntN(4) {
					seq = append(seq, events.SeqHash(rng.IntN(3)))
				}
				return seq
			}
			seq := make([]events.SeqHash, rng.IntN(20))
			for i := range seq {
				seq[i] = events.SeqHash(rng.IntN(2))
			}
			return seq
		}
		for step := range 150 {
			switch n := rng.IntN(10); {
			case n < 6 || len(requests) == 0:
				r := request{id: uint32(rng.IntN(ranks)), seq: prompt()}
				r.tail = trie.Reach(r.seq)
				for n := r.tail; n.Parent != nil; n = n.Parent {
					if at, ok := n.Find(r.id); ok {
						n.Slots[at].Share++
					} else {
						n.Insert(at, Slot[int]{r.id, 1})
					}
				}
				w.add(r.id, r.seq, 1)
				requests = append(requests, r)
			case n < 9:
				i := rng.IntN(len(requests))
				r := requests[i]
				requests = slices.Delete(requests, i, i+1)
				if !slices.Equal(r.tail.Path(), r.seq) {
					t.Fatalf("seed %d, round %d: the path is %v, want %v", seed, round, r.tail.Path(), r.seq)
				}
				for n := r.tail; n.Parent != nil; {
					up := n.Parent
					at, _ := n.Find(r.id)
					if n.Slots[at].Share--; n.Slots[at].Share == 0 {
						n.Remove(at)
					}
					n = up
				}
				w.add(r.id, r.seq, -1)
			default:
				if n := requests[rng.IntN(len(requests))].tail; len(n.Edge) > 1 {
					trie.Split(n, 1+rng.IntN(len(n.Edge)-1))
				}
			}
			if err := check(&trie, w); err != nil {
				t.Fatalf("seed %d, round %d, step %d: %v", seed, round, step, err)
			}
			places, depths := make([]int32, ranks), make([]uint32, ranks)
			hidden := rng.IntN(ranks + 1) // a rank without a place
			for id, at := range place {
				if places[id] = int32(at); id == hidden {
					places[id] = -1
				}
			}
			seq := prompt()
			some := false
			got := Depths(&trie, seq, places, depths)
			for id, at := range places {
				want := w.depth(uint32(id), seq)
				if at < 0 {
					continue
				}
				if some = some || want > 0; depths[at] != uint32(want) {
					t.Fatalf("seed %d, round %d: rank %d has %d blocks of %v, want %d", seed, round, id, depths[at], seq,
						want)
				}
			}
			if got != some {
				t.Fatalf("seed %d, round %d: some rank has blocks: %v, want %v", seed, round, got, some)
			}
		}
		if halved == 0 && ranks > 1 {
			t.Errorf("seed %d, round %d: no node was split", seed, round)
		}
	}
}

func TestCommon(t *testing.T) {
	list := []events.SeqHash{1, 2, 3}
	for _, c := range []struct {
		other []events.SeqHash
		want  int
	}{{nil, 0}, {[]events.SeqHash{2}, 0}, {[]events.SeqHash{1, 2}, 2}, {[]events.SeqHash{1, 2, 4, 5}, 2},
		{[]events.SeqHash{1, 2, 3, 4}, 3}} {
		if got := Common(list, c.other); got != c.want {
			t.Errorf("%v and %v have %d common hashes, want %d", list, c.other, got, c.want)
		}
	}
}
