package hicache

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

var casesFile = flag.String("coordinator.cases", "testdata/coordinator-cases.jsonl",
	"cases for TestCoordinator, one JSON object a line")

type coordinatorCase struct {
	G       [][4]any `json:"g"`
	LCM     int      `json:"lcm"`
	HBS     int      `json:"hbs"`
	Eagle   bool     `json:"eagle"`
	Max     int      `json:"max"`
	Present []string `json:"present"`
	Hit     int      `json:"hit"`
	SafeHit int      `json:"safe_hit"`
}

func (c coordinatorCase) layout(p Profile) Layout {
	l := Layout{SchedulerBlockSize: c.LCM, HashBlockSize: c.HBS, UseEagle: c.Eagle, Profile: p}
	for _, g := range c.G {
		group := Group{Kind: Kind(g[0].(string)), BlockSize: int(g[1].(float64)), Window: int(g[2].(float64)),
			Eagle: g[3].(float64) != 0}
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

// check validates a case before the comparison.
func (c *coordinatorCase) check() error {
	if len(c.G) == 0 {
		return errors.New("no groups (\"g\")")
	}
	if c.Max < 0 || c.LCM < 1 || c.HBS < 1 {
		return fmt.Errorf("max %d, lcm %d, hbs %d: want 0, 1, 1 or more", c.Max, c.LCM, c.HBS)
	}
	for i := range c.G {
		g := &c.G[i]
		if flag, is := g[3].(bool); is {
			g[3] = map[bool]float64{true: 1}[flag]
		}
		_, ok := g[0].(string)
		for _, n := range g[1:] {
			_, isNumber := n.(float64)
			ok = ok && isNumber
		}
		if !ok {
			return fmt.Errorf("group %d: %v is not [kind, block, window, EAGLE flag]", i, *g)
		}
	}
	if len(c.Present) != len(c.G) {
		return fmt.Errorf("present is of %d groups, of %d", len(c.Present), len(c.G))
	}
	for g, bits := range c.Present {
		if strings.Trim(bits, "01") != "" {
			return fmt.Errorf("present of group %d: %.20q is not of 0 and 1", g, bits)
		}
	}
	return nil
}

// decodeCases reads cases, a JSON object per line of any length. The error names the line.
func decodeCases(r io.Reader) (all []coordinatorCase, err error) {
	in := bufio.NewReader(r)
	for line := 1; ; line++ {
		text, end := in.ReadBytes('\n')
		if end != nil && end != io.EOF {
			return nil, end
		}
		if len(bytes.TrimSpace(text)) > 0 {
			c := coordinatorCase{Hit: -1, SafeHit: -1}
			dec := json.NewDecoder(bytes.NewReader(text))
			err := dec.Decode(&c)
			if err == nil && dec.More() {
				err = errors.New("more than one object")
			}
			if err == nil && (c.Hit < 0 || c.SafeHit < 0) {
				err = errors.New("hit or safe_hit is missing or negative")
			}
			if err == nil {
				err = c.check()
			}
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", line, err)
			}
			all = append(all, c)
		}
		if end == io.EOF {
			break
		}
	}
	if len(all) == 0 {
		return nil, errors.New("no cases")
	}
	return all, nil
}

func readCases(t testing.TB) []coordinatorCase {
	f, err := os.Open(*casesFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all, err := decodeCases(f)
	if err != nil {
		t.Fatalf("%s: %v", *casesFile, err)
	}
	return all
}

// TestCoordinatorCasesAreChecked passes damaged files to the reader.
func TestCoordinatorCasesAreChecked(t *testing.T) {
	const good = `{"g":[["full",4,0,0]],"lcm":4,"hbs":4,"eagle":false,"max":8,"present":["11"],"masks":["11"],"hit":8,"safe_masks":["11"],"safe_hit":8}`
	long := strings.NewReplacer(`["11"]`, `["`+strings.Repeat("1", 1<<17)+`"]`).Replace(good)
	all, err := decodeCases(strings.NewReader(good + "\n\n" + long + "\n" + good))
	if err != nil || len(all) != 3 || len(all[1].Present[0]) != 1<<17 {
		t.Fatalf("%d cases, %v", len(all), err)
	}
	for _, c := range []struct{ from, to, says string }{
		{good, "", "no cases"},
		{`}`, ``, "line 2: unexpected EOF"},
		{`"full",4`, `"full","4"`, "is not [kind, block, window, EAGLE flag]"},
		{`"full"`, `7`, "is not [kind, block, window, EAGLE flag]"},
		{`"present":["11"],`, ``, "present is of 0 groups"},
		{`"present":["11"]`, `"present":["1x"]`, "is not of 0 and 1"},
		{`"hit":8,`, ``, "hit or safe_hit is missing"},
		{`"lcm":4`, `"lcm":0`, "lcm 0"},
		{`"lcm":4`, `"lcm":4.5`, "line 2"},
		{`}`, `}{}`, "more than one object"},
	} {
		text := "\n" + strings.Replace(good, c.from, c.to, 1) + "\n"
		if _, err := decodeCases(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want an error with %q", text, err, c.says)
		}
	}
}

// TestCoordinator compares both profiles with all cases of a file.
func TestCoordinator(t *testing.T) {
	cases := readCases(t)
	for i, c := range cases {
		for _, p := range []Profile{Reference, Safe} {
			want := c.Hit
			if p == Safe {
				want = c.SafeHit
			}
			co, err := NewCoordinator(c.layout(p))
			if err != nil {
				t.Errorf("case %d, %s: %v", i, p, err)
				continue
			}
			hit, err := co.FindLongestCacheHit(presence(c.Present), c.Max)
			if err != nil {
				t.Fatal(err)
			}
			if hit != want {
				t.Errorf("case %d, %s: a hit of %d, want %d: %+v", i, p, hit, want, c)
			}
		}
	}
	t.Logf("%d cases of %s", len(cases), *casesFile)
}

func TestCoordinatorRejectsLayoutsOfUpstream(t *testing.T) {
	for _, c := range []struct {
		what string
		l    Layout
		says string
	}{
		{"hash unit", Layout{Groups: []Group{{Kind: Full, BlockSize: 6}}, SchedulerBlockSize: 12, HashBlockSize: 4},
			"divisible by hash_block_size"},
		{"scheduler and hash", Layout{Groups: []Group{{Kind: Full, BlockSize: 4}}, SchedulerBlockSize: 6,
			HashBlockSize: 4}, "multiple of hash_block_size"},
		{"scheduler and block", Layout{Groups: []Group{{Kind: Full, BlockSize: 8}}, SchedulerBlockSize: 4,
			HashBlockSize: 4}, "multiple of block_size"},
		{"chunked EAGLE", Layout{Groups: []Group{{Kind: ChunkedLocal, BlockSize: 4, Window: 8, Eagle: true}},
			SchedulerBlockSize: 4, HashBlockSize: 4}, "EAGLE"},
		{"chunked sizes", Layout{Groups: []Group{{Kind: ChunkedLocal, BlockSize: 4, Window: 8},
			{Kind: Full, BlockSize: 8}}, SchedulerBlockSize: 8, HashBlockSize: 4}, "chunked local attention needs"},
	} {
		if _, err := NewCoordinator(c.l); !errors.Is(err, errLayout) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want an errLayout with %q", c.what, err, c.says)
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
		st := &store{present: presence(c.Present), hash: c.HBS}
		if co.find(st, c.Max); st.probes > most {
			hardest, most = c, st.probes
		}
	}
	co, _ := NewCoordinator(hardest.layout(Safe))
	present := presence(hardest.Present)
	b.ReportAllocs()
	for b.Loop() {
		co.find(&store{present: present, hash: hardest.HBS}, hardest.Max)
	}
}

// TestWorkGrowsWithGroups counts the lookups in the store. The number per block grows at most with the square of the
// number of groups.
func TestWorkGrowsWithGroups(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 9))
	const blocks = 256
	for _, groups := range []int{1, 2, 4, 8, 16, 32} {
		for range 100 {
			l := Layout{SchedulerBlockSize: 4, HashBlockSize: 4, UseEagle: rng.IntN(2) == 0,
				Profile: []Profile{Safe, Reference}[rng.IntN(2)]}
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
			st := &store{present: present, hash: 4}
			if co.find(st, 4*blocks); st.probes > 4*blocks*groups*groups {
				t.Fatalf("%d groups, %d blocks: %d lookups", groups, blocks, st.probes)
			}
		}
	}
}

// TestHitIsTheBestThereIs compares hits without EAGLE with an exhaustive search.
func TestHitIsTheBestThereIs(t *testing.T) {
	rng := rand.New(rand.NewPCG(10, 11))
	for range testkit.Rounds(5000) {
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
		if err != nil || hit != want {
			t.Fatalf("a hit of %d (%v), want %d: %+v %v", hit, err, want, l, present)
		}
	}
}
