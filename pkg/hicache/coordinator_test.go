package hicache

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
)

var casesFile = flag.String("coordinator.cases", "testdata/coordinator-cases.jsonl", "cases for TestCoordinator, one JSON object a line")

type coordinatorCase struct {
	G        [][4]any `json:"g"`
	LCM      int      `json:"lcm"`
	HBS      int      `json:"hbs"`
	Eagle    bool     `json:"eagle"`
	Max      int      `json:"max"`
	Present  []string `json:"present"`
	Masks    []string `json:"masks"`
	Hit      int      `json:"hit"`
	SafeMask []string `json:"safe_masks"`
	SafeHit  int      `json:"safe_hit"`
}

func (c coordinatorCase) layout(p Profile) Layout {
	l := Layout{SchedulerBlockSize: c.LCM, HashBlockSize: c.HBS, UseEagle: c.Eagle, Profile: p}
	for _, g := range c.G {
		group := Group{Kind: Kind(g[0].(string)), BlockSize: int(g[1].(float64)), Window: int(g[2].(float64)), Eagle: g[3].(float64) != 0}
		l.Groups = append(l.Groups, group)
	}
	return l
}

func presence(texts []string) [][]bool {
	all := make([][]bool, len(texts))
	for i, s := range texts {
		all[i] = make([]bool, len(s))
		for j := range s {
			all[i][j] = s[j] == '1'
		}
	}
	return all
}

func text(mask []bool) string {
	var b strings.Builder
	for _, m := range mask {
		if m {
			b.WriteByte('1')
		} else {
			b.WriteByte('0')
		}
	}
	return b.String()
}

func readCases(t testing.TB) (all []coordinatorCase) {
	f, err := os.Open(*casesFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var c coordinatorCase
		if err := json.Unmarshal(s.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	if len(all) == 0 {
		t.Fatal("no cases")
	}
	return all
}

// TestCoordinator compares both profiles with every case of a file.
func TestCoordinator(t *testing.T) {
	for i, c := range readCases(t) {
		for _, p := range []Profile{Reference, Safe} {
			want, masks := c.Hit, c.Masks
			if p == Safe {
				want, masks = c.SafeHit, c.SafeMask
			}
			co, err := NewCoordinator(c.layout(p))
			if err != nil {
				t.Fatalf("case %d: %v", i, err)
			}
			hit, err := co.FindLongestCacheHit(presence(c.Present), c.Max)
			if err != nil {
				t.Fatal(err)
			}
			if hit.Tokens != want {
				t.Errorf("case %d, %s: a hit of %d, want %d: %+v", i, p, hit.Tokens, want, c)
			}
			for g, s := range hit.Spans {
				if got := text(s.Mask()); got != masks[g] {
					t.Errorf("case %d, %s, group %d: mask %q, want %q: %+v", i, p, g, got, masks[g], c)
				}
			}
		}
	}
}

func TestCoordinatorRefusesWhatUpstreamDoes(t *testing.T) {
	for _, c := range []struct {
		what string
		l    Layout
		says string
	}{
		{"hash unit", Layout{Groups: []Group{{Kind: Full, BlockSize: 6}}, SchedulerBlockSize: 12, HashBlockSize: 4}, "divisible by hash_block_size"},
		{"scheduler and hash", Layout{Groups: []Group{{Kind: Full, BlockSize: 4}}, SchedulerBlockSize: 6, HashBlockSize: 4}, "multiple of hash_block_size"},
		{"scheduler and block", Layout{Groups: []Group{{Kind: Full, BlockSize: 8}}, SchedulerBlockSize: 4, HashBlockSize: 4}, "multiple of block_size"},
		{"chunked EAGLE", Layout{Groups: []Group{{Kind: ChunkedLocal, BlockSize: 4, Window: 8, Eagle: true}}, SchedulerBlockSize: 4, HashBlockSize: 4}, "EAGLE"},
		{"chunked sizes", Layout{Groups: []Group{{Kind: ChunkedLocal, BlockSize: 4, Window: 8}, {Kind: Full, BlockSize: 8}}, SchedulerBlockSize: 8, HashBlockSize: 4}, "chunked local attention needs"},
	} {
		if _, err := NewCoordinator(c.l); !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want an ErrLayout that says %q", c.what, err, c.says)
		}
	}
}

func BenchmarkCoordinatorHardestCase(b *testing.B) {
	hardest, most := coordinatorCase{}, -1
	for _, c := range readCases(b) {
		co, err := NewCoordinator(c.layout(Safe))
		if err != nil {
			b.Fatal(err)
		}
		if _, probes := co.find(&store{present: presence(c.Present), hash: c.HBS}, c.Max, true); probes > most {
			hardest, most = c, probes
		}
	}
	co, _ := NewCoordinator(hardest.layout(Safe))
	present := presence(hardest.Present)
	b.ReportAllocs()
	for b.Loop() {
		co.find(&store{present: present, hash: hardest.HBS}, hardest.Max, true)
	}
}

// TestWorkGrowsWithGroups counts how often the store is asked: per block it may grow with the number of groups squared, no faster.
func TestWorkGrowsWithGroups(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 9))
	const blocks = 256
	for _, groups := range []int{1, 2, 4, 8, 16, 32} {
		for range 100 {
			l := Layout{SchedulerBlockSize: 4, HashBlockSize: 4, UseEagle: rng.IntN(2) == 0, Profile: []Profile{Safe, Reference}[rng.IntN(2)]}
			mixed := rng.IntN(2) == 0
			if mixed {
				l.SchedulerBlockSize = 16
			}
			present := make([][]bool, groups)
			for g := range present {
				group := Group{Kind: Sliding, BlockSize: 4, Window: 5 + 4*g}
				if mixed {
					group.Kind, group.BlockSize = []Kind{Full, Sliding, Mamba}[rng.IntN(3)], 4<<rng.IntN(3)
					if group.Kind != Sliding {
						group.Window = 0
					}
				}
				l.Groups = append(l.Groups, group)
				present[g] = make([]bool, blocks)
				for i := range present[g] {
					present[g][i] = rng.IntN(groups*8) > 0
				}
			}
			co, err := NewCoordinator(l)
			if err != nil {
				t.Fatal(err)
			}
			if _, probes := co.find(&store{present: present, hash: 4}, 4*blocks, true); probes > 4*blocks*groups*groups {
				t.Fatalf("%d groups, %d blocks: the store was asked %d times", groups, blocks, probes)
			}
		}
	}
}

// TestHitIsTheBestThereIs compares hits without EAGLE with a search of all lengths.
func TestHitIsTheBestThereIs(t *testing.T) {
	rng := rand.New(rand.NewPCG(10, 11))
	for range 5000 {
		l := Layout{SchedulerBlockSize: 8, HashBlockSize: 2}
		n := rng.IntN(30)
		var present [][]bool
		for range 1 + rng.IntN(4) {
			g := Group{Kind: []Kind{Full, Sliding, Mamba}[rng.IntN(3)], BlockSize: 2 << rng.IntN(3)}
			if g.Kind == Sliding {
				g.Window = 1 + rng.IntN(20)
			}
			l.Groups = append(l.Groups, g)
			p := make([]bool, n)
			for i := range p {
				p[i] = rng.IntN(6) > 0
			}
			present = append(present, p)
		}
		serves := func(g Group, p []bool, tokens int) bool {
			first, end := 0, tokens/g.BlockSize
			switch g.Kind {
			case Sliding:
				first = max(0, end-max(1, g.need(false)))
			case Mamba:
				first = end - 1
			}
			for i := first; i < end; i++ {
				if !p[(i+1)*g.BlockSize/l.HashBlockSize-1] {
					return false
				}
			}
			return true
		}
		want := 0
		for tokens := 8; tokens <= 2*n; tokens += 8 {
			all := true
			for g := range present {
				all = all && serves(l.Groups[g], present[g], tokens)
			}
			if all {
				want = tokens
			}
		}
		co, err := NewCoordinator(l)
		if err != nil {
			t.Fatal(err)
		}
		hit, err := co.FindLongestCacheHit(present, 2*n)
		if err != nil || hit.Tokens != want {
			t.Fatalf("a hit of %d (%v), want %d: %+v %v", hit.Tokens, err, want, l, present)
		}
	}
}
