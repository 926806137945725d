//go:build judges

package dynamo

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"github.com/zeebo/xxh3"
)

var (
	besideSeeds = flag.Int("beside.seeds", 1, "rounds of random streams of TestBesideDynamo")
	besideFirst = flag.Uint64("beside.first", 1, "seed of the first of them")
)

// difference is a class of testdata/dynamo-differences.md.
type difference struct {
	name     string
	side     string     // the side of Dynamo's error: "lower", "higher" or "either"
	examples [][]string // lines
}

// differences reads testdata/dynamo-differences.md.
func differences(t *testing.T) (list []difference) {
	t.Helper()
	text, err := os.ReadFile("testdata/dynamo-differences.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(string(text), "\n## ")[1:] {
		name, body, _ := strings.Cut(part, "\n")
		d := difference{name: name}
		if m := regexp.MustCompile(`(?m)^Dynamo: (lower|higher|either)\.$`).FindStringSubmatch(body); m != nil {
			d.side = m[1]
		} else {
			t.Fatalf("%s has no side of Dynamo's error", name)
		}
		for _, block := range regexp.MustCompile(`(?m)(^    .*\n)+`).FindAllString(body+"\n", -1) {
			d.examples = append(d.examples, strings.Split(strings.TrimSpace(block), "\n"))
		}
		if len(d.examples) == 0 {
			t.Fatalf("%s has no example", name)
		}
		list = append(list, d)
	}
	return list
}

// TestDynamoDifferencesByExample runs every example of the page on both indexers and the twin. The results must be as
// on the page.
func TestDynamoDifferencesByExample(t *testing.T) {
	b := startBeside(t, 2)
	n := uint32(0)
	for _, d := range differences(t) {
		for i, lines := range d.examples {
			n++
			example := fmt.Sprintf("%s, example %d", d.name, i+1)
			differs, before := false, ""
			b.mended = false
			for _, line := range lines {
				line = strings.TrimSpace(line)
				if line[:2] != before { // engines are read concurrently, so wait between the events of different engines
					b.settle()
				}
				before = line[:2]
				differs = b.line(example, line, n<<8) || differs
			}
			if !differs && !b.mended {
				t.Errorf("%s shows no difference", example)
			}
			for i := range b.engines {
				b.apply(change{engine: i, op: "clear"})
			}
		}
	}
}

var (
	changeLine = regexp.MustCompile(
		`^w(\d) (stores|copies|removes)((?: [a-z])+)(?: after ([a-z]))?(?: (?:on|to|from) (\w+))?(?: called((?: [a-z])+))?(?: in group (\d))?$`)
	askLine = regexp.MustCompile(`^ask((?: [a-z])+): w(\d) has ([\d+]+), Dynamo says ([\d+]+)(?:, ([\d+]+) from 1\.7)?$`)
)

// line runs a line of an example. The blocks of an example are unique. It reports whether the line is a query with a
// different answer by Dynamo. b.mended records an answer that the tested release of Dynamo has corrected.
func (b *beside) line(example, line string, base uint32) (differs bool) {
	b.t.Helper()
	token := func(word string) uint32 { return base + uint32(word[0]) }
	if m := askLine.FindStringSubmatch(line); m != nil {
		var prompt []uint32
		for _, word := range strings.Fields(m[1]) {
			prompt = append(prompt, token(word))
		}
		b.settle()
		ours, dynamo, twins := b.ask(prompt)
		i := int(m[2][0] - '1')
		want := readDepth(m[4])
		if m[5] != "" && !strings.HasPrefix(pyenv.DynamoVersion(b.t), "1.6.") {
			want = readDepth(m[5])
			b.mended = b.mended || want == readDepth(m[3])
		}
		if ours[i] != readDepth(m[3]) || twins[i] != ours[i] || dynamo[i] != want {
			b.t.Errorf("%s: %s\nkvatlas has %v, the twin %v, Dynamo %v", example, line, ours[i], twins[i], dynamo[i])
		}
		return ours[i] != dynamo[i]
	}
	m := changeLine.FindStringSubmatch(line)
	if m == nil {
		b.t.Fatalf("%s: %q cannot be read", example, line)
	}
	c := change{engine: int(m[1][0] - '1'), op: map[string]string{"stores": "store", "copies": "copy",
		"removes": "remove"}[m[2]], tier: events.Device}
	name := func(word string) uint64 { return xxh3.HashString(strconv.Itoa(int(base)) + word) }
	words := strings.Fields(m[3])
	called := words
	if m[6] != "" {
		called = strings.Fields(m[6])
	}
	for i, word := range words {
		c.blocks = append(c.blocks, named{token(word), name(called[i])})
	}
	if m[4] != "" {
		parent := name(m[4])
		c.parent = &parent
	}
	if m[5] != "" {
		c.tier = map[string]events.Tier{"host": events.Host, "disk": events.Disk, "external": events.External}[m[5]]
	}
	if m[7] != "" {
		c.group = int(m[7][0] - '0')
	}
	b.apply(c)
	return false
}

func readDepth(text string) (d depth) {
	for i, part := range strings.Split(text, "+") {
		d[i], _ = strconv.Atoi(part) // the line's pattern lets nothing else through
	}
	return d
}

// TestBesideDynamo sends random streams to both indexers: a stream without troubles, a stream with every single
// trouble, and a stream with all troubles. kvatlas's answers are always equal to the twin's. Without troubles Dynamo's
// are equal too. With a trouble, Dynamo's answers differ only for the affected blocks, and only to the side on the
// page.
func TestBesideDynamo(t *testing.T) {
	b := startBeside(t, 3)
	classes := differences(t)
	names := make([]string, len(classes))
	for i, d := range classes {
		names[i] = d.name
	}
	base, seen := uint32(0), map[string]int{}
	for seed := *besideFirst; seed < *besideFirst+uint64(*besideSeeds); seed++ {
		for i, troubles := range append([][]string{nil, names}, singles(names)...) {
			base += 1 << 10
			s := &stream{beside: b, rng: rand.New(rand.NewPCG(seed, uint64(i))), seed: seed, base: base,
				troubles: troubles,
				parents:  map[events.SeqHash][]uint32{}, touched: map[string]map[events.SeqHash]bool{}}
			for range b.engines {
				s.held = append(s.held, map[place]int{})
			}
			for _, name := range troubles {
				s.touched[name] = map[events.SeqHash]bool{}
			}
			if counts := s.run(classes); len(troubles) == 1 {
				seen[troubles[0]] += counts[troubles[0]]
			}
			for e := range b.engines {
				b.apply(change{engine: e, op: "clear"})
			}
		}
	}
	for _, name := range names {
		if seen[name] == 0 {
			t.Errorf("%s was in a stream and made no difference", name)
		}
	}
}

func singles(names []string) (all [][]string) {
	for i := range names {
		all = append(all, names[i:i+1])
	}
	return all
}

// stream is a random load on the engines. The blocks of a stream are unique.
type stream struct {
	*beside
	rng      *rand.Rand
	seed     uint64
	base     uint32 // the least token
	troubles []string
	held     []map[place]int                    // by engine: copies
	parents  map[events.SeqHash][]uint32        // the whole prompt up to a block
	touched  map[string]map[events.SeqHash]bool // by trouble: the affected blocks, on any engine
}

// place is where an engine has a block.
type place struct {
	seq  events.SeqHash
	tier events.Tier
}

func (s *stream) may(trouble string) bool { return slices.Contains(s.troubles, trouble) }

// happens randomly triggers a trouble, if the stream allows the trouble.
func (s *stream) happens(trouble string) bool { return s.may(trouble) && s.rng.IntN(3) == 0 }

const (
	besideRounds = 60
	besideAsked  = 6
)

// run returns the number of explained differences of every class.
func (s *stream) run(classes []difference) map[string]int {
	answers, hits, counts, sides := 0, 0, map[string]int{}, map[string]int{}
	for range besideRounds {
		for range 1 + s.rng.IntN(8) {
			s.step(s.rng.IntN(len(s.engines)))
		}
		s.settle()
		for range besideAsked {
			prompt := s.prompt()
			seqs := events.SeqHashes(nil, s.locals(prompt))
			ours, dynamo, twins := s.ask(prompt)
			for i := range s.engines {
				answers++
				if twins[i] != (depth{}) {
					hits++
				}
				if ours[i] != twins[i] {
					s.t.Fatalf("seed %d, with %v: of %v engine %d holds %v by the twin, but kvatlas has %v", s.seed,
						s.troubles, prompt, i+1, twins[i], ours[i])
				}
				if dynamo[i] == twins[i] {
					continue
				}
				explained := false
				for _, d := range classes {
					if !s.happened(d.name, seqs[:min(len(seqs), twins[i].parting(dynamo[i])+1)]) {
						continue
					}
					if dynamo[i].lower(twins[i]) && d.side != "higher" || twins[i].lower(dynamo[i]) &&
						d.side != "lower" {
						explained = true
						counts[d.name]++
					}
				}
				if dynamo[i].lower(twins[i]) {
					sides["lower"]++
				} else {
					sides["higher"]++
				}
				if !explained {
					s.t.Errorf("seed %d, with %v: of %v engine %d holds %v, but Dynamo has %v, without an explanation",
						s.seed, s.troubles, prompt, i+1, twins[i], dynamo[i])
				}
			}
		}
	}
	s.t.Logf("seed %d, with %v: %d answers, %d hits; Dynamo's are lower %d times, higher %d times; explained by %v",
		s.seed, s.troubles, answers, hits, sides["lower"], sides["higher"], counts)
	if hits < answers/4 || hits == answers {
		s.t.Errorf("seed %d, with %v: %d hits of %d answers are no test", s.seed, s.troubles, hits, answers)
	}
	return counts
}

// happened reports whether a trouble has affected any of the blocks.
func (s *stream) happened(trouble string, seqs []events.SeqHash) bool {
	return slices.ContainsFunc(seqs, func(seq events.SeqHash) bool { return s.touched[trouble][seq] })
}

// prompt returns a prompt from a tree of prompts.
func (s *stream) prompt() []uint32 {
	prompt := make([]uint32, 1+s.rng.IntN(7))
	for i := range prompt {
		prompt[i] = s.base + uint32(i)<<4 + uint32(s.rng.IntN(2))
	}
	return prompt
}

// name returns an engine's hash of a block.
func (s *stream) name(engine int, seq events.SeqHash) uint64 {
	if s.may("names") {
		return uint64(seq) ^ uint64(engine+1)<<32
	}
	return uint64(seq)
}

// step performs a random action of an engine.
func (s *stream) step(e int) {
	switch r := s.rng.IntN(100); {
	case r < 60:
		s.store(e, s.prompt())
	case r < 99:
		s.evict(e)
	default:
		s.apply(change{engine: e, op: "clear"})
		clear(s.held[e])
	}
}

// store announces the missing blocks of a prompt, from the first block that is not on the device, as an engine does
// after a computation.
func (s *stream) store(e int, prompt []uint32) {
	seqs := events.SeqHashes(nil, s.locals(prompt))
	from := 0
	for from < len(seqs) && s.held[e][place{seqs[from], events.Device}] > 0 {
		from++
	}
	to := from
	for to < len(seqs) && s.held[e][place{seqs[to], events.Device}] == 0 {
		to++
	}
	if from == len(seqs) { // all blocks are on the device: perhaps change the end of the prompt
		last := len(seqs) - 1
		switch {
		case s.happens("copies"):
			s.touched["copies"][seqs[last]] = true
			s.announce(e, "store", events.Device, prompt, seqs, last, last+1)
		case s.rng.IntN(2) == 0:
			s.lower(e, prompt, seqs)
		}
		return
	}
	middle := to
	if to-from > 1 && s.happens("orphans") {
		middle = from + 1 + s.rng.IntN(to-from-1)
		for _, seq := range seqs[middle:to] {
			s.touched["orphans"][seq] = true
		}
		s.announce(e, "store", events.Device, prompt, seqs, middle, to)
	}
	s.announce(e, "store", events.Device, prompt, seqs, from, middle)
	if s.rng.IntN(2) == 0 {
		s.lower(e, prompt, seqs[:to])
	}
}

// lower writes a part of a prompt to a lower tier, and then removes some blocks at the end from the device.
func (s *stream) lower(e int, prompt []uint32, seqs []events.SeqHash) {
	op, tier := "store", events.Host+events.Tier(s.rng.IntN(2))
	from := s.rng.IntN(len(seqs))
	if s.happens("tokenless") {
		op, tier = "copy", events.External // nothing else is stored there
	}
	to := from
	for ; to < len(seqs); to++ {
		if s.held[e][place{seqs[to], tier}] > 0 && !s.may("tiers") {
			break
		}
		if s.held[e][place{seqs[to], tier}] > 0 {
			s.touched["tiers"][seqs[to]] = true
		}
		if op == "copy" {
			s.touched["tokenless"][seqs[to]] = true
		}
	}
	s.announce(e, op, tier, prompt, seqs, from, to)
	for i := len(seqs) - 1; i >= from && s.rng.IntN(4) > 0; i-- {
		if p := (place{seqs[i], events.Device}); s.held[e][p] == 1 && !s.followed(e, p) {
			s.remove(e, p)
		}
	}
	if p := (place{seqs[len(seqs)-1], tier}); s.held[e][p] > 1 {
		s.remove(e, p)
	}
}

// announce announces a store of the blocks from to to-1 of a prompt.
func (s *stream) announce(e int, op string, tier events.Tier, prompt []uint32, seqs []events.SeqHash, from, to int) {
	if from == to {
		return
	}
	c := change{engine: e, op: op, tier: tier}
	if from > 0 {
		parent := s.name(e, seqs[from-1])
		c.parent = &parent
	}
	for i := from; i < to; i++ {
		s.held[e][place{seqs[i], tier}]++
		s.parents[seqs[i]] = prompt[:i+1]
		c.blocks = append(c.blocks, named{prompt[i], s.name(e, seqs[i])})
		if s.may("names") {
			s.touched["names"][seqs[i]] = true
		}
		if s.may("groups") {
			s.touched["groups"][seqs[i]] = true
		}
	}
	s.apply(c)
	if s.may("groups") && s.rng.IntN(4) > 0 {
		c.group = 1
		s.apply(c)
	}
}

// evict removes a copy of a block. The block has no successor in the tier, unless holes are allowed.
func (s *stream) evict(e int) {
	all := make([]place, 0, len(s.held[e]))
	for p := range s.held[e] {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b place) int {
		if a.seq != b.seq {
			return int(min(1, max(-1, int64(a.seq>>1)-int64(b.seq>>1))))
		}
		return int(a.tier) - int(b.tier)
	})
	for range 3 {
		if len(all) == 0 {
			return
		}
		p := all[s.rng.IntN(len(all))]
		if twice := s.twice(e, all); len(twice) > 0 && s.rng.IntN(2) == 0 {
			p = twice[s.rng.IntN(len(twice))]
		}
		hole := s.held[e][p] == 1 && s.followed(e, p)
		if hole && !s.happens("holes") {
			continue
		}
		if hole {
			s.touched["holes"][p.seq] = true
		}
		s.remove(e, p)
		return
	}
}

// remove removes a copy of a block.
func (s *stream) remove(e int, p place) {
	prompt := s.parents[p.seq]
	c := change{engine: e, op: "remove", tier: p.tier, blocks: []named{{prompt[len(prompt)-1], s.name(e, p.seq)}}}
	s.apply(c)
	if s.may("groups") {
		c.group = 1
		s.apply(c)
	}
	if s.held[e][p]--; s.held[e][p] == 0 {
		delete(s.held[e], p)
	}
}

// twice returns the places with several copies on an engine.
func (s *stream) twice(e int, all []place) (list []place) {
	for _, p := range all {
		if s.held[e][p] > 1 {
			list = append(list, p)
		}
	}
	return list
}

// followed reports whether an engine has a block behind another in the same tier.
func (s *stream) followed(e int, p place) bool {
	prompt := s.parents[p.seq]
	for other := range s.held[e] {
		if longer := s.parents[other.seq]; other.tier == p.tier && len(longer) > len(prompt) &&
			slices.Equal(longer[:len(prompt)], prompt) {
			return true
		}
	}
	return false
}
