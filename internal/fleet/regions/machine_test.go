package regions

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// held is a digest with the naive twin of its filter.
type held struct {
	digest *Digest
	set    naive
}

// someDigests returns digests of random prompts, two of them in several messages, and the prompts.
func someDigests(rng *rand.Rand) (list []held, prompts [][]events.LocalHash) {
	for i := range 8 {
		n := 40
		if i < 2 {
			n = 6000
		}
		set := naive{}
		var hashes []events.SeqHash
		for range n {
			prompt := make([]events.LocalHash, 1+rng.IntN(40))
			for k := range prompt {
				prompt[k] = events.LocalHash(rng.Uint64())
			}
			if len(prompts) > 0 && rng.IntN(2) == 0 { // a branch of another prompt
				other := prompts[rng.IntN(len(prompts))]
				copy(prompt, other[:rng.IntN(min(len(other), len(prompt))+1)])
			}
			for _, h := range events.SeqHashes(nil, prompt) {
				hashes, set[h] = append(hashes, h), true
			}
			prompts = append(prompts, prompt)
		}
		f := NewFilter(hashes)
		list = append(list, held{&Digest{Partitions: 2, Covered: []events.Partition{events.Partition(i % 2)},
			Sets: []Set{{Model: "m", BlockSize: 16, Lookaheads: []uint32{0}, Held: uint64(f.Len()), Filter: f}}}, set})
	}
	return list, prompts
}

// twinSource is the naive twin of a source: all accepted messages.
type twinSource struct {
	log  []chunk
	last chunk // of the last complete digest
	has  *held
	at   time.Duration
	seen time.Duration // last message
}

func newer(a, b *chunk) bool {
	return a.incarnation > b.incarnation || a.incarnation == b.incarnation && a.number > b.number
}

// apply applies a message: a digest is complete if its messages are the last ones, in order.
func (s *twinSource) apply(now time.Duration, c chunk, of *held) {
	if s.seen = now; s.has != nil && !newer(&c, &s.last) {
		return
	}
	s.log = append(s.log, c)
	if c.part+1 != c.parts || uint64(len(s.log)) < c.parts {
		return
	}
	for i, x := range s.log[uint64(len(s.log))-c.parts:] {
		if x.part != uint64(i) || x.number != c.number || x.incarnation != c.incarnation {
			return
		}
	}
	s.has, s.last, s.at, s.log = of, c, now-time.Duration(c.ageMS)*time.Millisecond, nil
}

// TestMachineAgainstTwin plays random histories of lost, late and duplicated messages of restarted nodes, and compares
// the prefixes with sets.
func TestMachineAgainstTwin(t *testing.T) {
	digests, prompts := someDigests(rand.New(rand.NewPCG(7, 8)))
	asked, wrong := 0, 0
	for seed := range uint64(testkit.Rounds(60)) {
		rng := rand.New(rand.NewPCG(seed, 9))
		const maxAge = 20 * time.Second
		m := New(Config{Region: "here", Prices: map[string]float64{"r0": 5, "silent": 7}, MaxAge: maxAge})
		twins := map[string]map[string]*twinSource{}
		numbers, incarnations := map[string]uint64{}, map[string]uint64{}
		type flight struct {
			region, node string
			data         []byte
			of           *held
		}
		var late []flight
		now := time.Duration(0)
		deliver := func(x flight) {
			_, err := m.Receive(now, x.region, x.node, x.data)
			if err != nil {
				t.Fatal(err)
			}
			c, _ := decodeChunk(x.data)
			if twins[x.region] == nil {
				twins[x.region] = map[string]*twinSource{}
			}
			if twins[x.region][x.node] == nil {
				twins[x.region][x.node] = &twinSource{}
			}
			twins[x.region][x.node].apply(now, c, x.of)
		}
		for range 200 {
			now += time.Duration(rng.IntN(2000)) * time.Millisecond
			region, node := fmt.Sprint("r", rng.IntN(3)), fmt.Sprint("n", rng.IntN(2))
			id := region + node
			if numbers[id]++; rng.IntN(20) == 0 {
				incarnations[id]++
				numbers[id] = 1
			}
			of := &digests[rng.IntN(len(digests))]
			messages, err := of.digest.Messages(incarnations[id], numbers[id], uint64(rng.IntN(500)))
			if err != nil {
				t.Fatal(err)
			}
			for _, data := range messages {
				x := flight{region, node, data, of}
				switch rng.IntN(12) {
				case 0: // lost
				case 1:
					late = append(late, x)
				case 2:
					deliver(x)
					late = append(late, x)
				default:
					deliver(x)
				}
			}
			if len(late) > 0 && rng.IntN(3) == 0 {
				i := rng.IntN(len(late))
				deliver(late[i])
				late = slices.Delete(late, i, i+1)
			}
			if rng.IntN(4) == 0 {
				m.Tick(now)
				expire(twins, now, maxAge)
			}
			a, w := compare(t, m.View(), twins, now, maxAge, prompts[rng.IntN(len(prompts))])
			asked, wrong = asked+a, wrong+w
		}
		m.Tick(now + time.Hour)
		if m.bytes != 0 || len(m.regions) != 2 {
			t.Fatalf("%d bytes and %d regions remain", m.bytes, len(m.regions))
		}
	}
	t.Logf("%d prefixes, %d with false positives (%.3f %%)", asked, wrong, 100*float64(wrong)/float64(asked))
	if most := 20 + 4*FalsePositives*float64(asked); float64(wrong) > most {
		t.Errorf("%d of %d prefixes are too long, want at most %.0f", wrong, asked, most)
	}
}

// expire is Tick of the twin.
func expire(twins map[string]map[string]*twinSource, now, maxAge time.Duration) {
	for _, nodes := range twins {
		for _, s := range nodes {
			if s.has != nil && now-s.at > maxAge {
				s.has = nil
			}
			if s.has == nil && now-s.seen > maxAge {
				s.log = nil
			}
		}
	}
}

// compare compares a prompt's prefixes with the twins. The results are the numbers of found prefixes and of longer
// prefixes than in the twins.
func compare(t *testing.T, v *View, twins map[string]map[string]*twinSource, now, maxAge time.Duration,
	prompt []events.LocalHash) (asked, wrong int) {
	t.Helper()
	got, err := v.Prefixes(now, &Question{Model: "m",
		Locals: func(uint32, uint32) ([]events.LocalHash, error) { return prompt, nil }})
	if err != nil {
		t.Fatal(err)
	}
	seqs := events.SeqHashes(nil, prompt)
	listed := map[string]bool{}
	for _, p := range got {
		listed[p.Region] = true
		longest, covered, fresh := 0, map[events.Partition]bool{}, 0
		for _, s := range twins[p.Region] {
			if s.has == nil || now-s.at > maxAge {
				continue
			}
			fresh++
			covered[s.has.digest.Covered[0]] = true
			n := slices.IndexFunc(seqs, func(h events.SeqHash) bool { return !s.has.set[h] })
			if n < 0 {
				n = len(seqs)
			}
			longest = max(longest, n)
		}
		want := api.RegionComplete
		switch {
		case fresh == 0:
			want = api.RegionUnknown
		case len(covered) < 2:
			want = api.RegionPartial
		}
		if p.State != want || int(p.Blocks) < longest || p.Tokens != 16*uint64(p.Blocks) {
			t.Fatalf("%+v at %v, want %v and %d blocks", p, now, want, longest)
		}
		if fresh > 0 {
			if asked++; int(p.Blocks) > longest {
				wrong++
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(twins)) {
		for _, s := range twins[name] {
			if s.has != nil && now-s.at <= maxAge && !listed[name] {
				t.Fatalf("region %s is not listed", name)
			}
		}
	}
	return asked, wrong
}

// TestStatesOfRegions lists a configured region without a digest, drops a silent region without a price, and marks
// partial digests.
func TestStatesOfRegions(t *testing.T) {
	m := New(Config{Region: "here", Prices: map[string]float64{"eu": 40}, MaxAge: time.Minute})
	ask := func(now time.Duration, model string, size uint32) (list []string) {
		got, err := m.View().Prefixes(now, &Question{Model: model, BlockSize: size,
			Locals: func(uint32, uint32) ([]events.LocalHash, error) { return []events.LocalHash{1, 2, 9}, nil }})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range got {
			price := "-"
			if p.PriceMS != nil {
				price = fmt.Sprint(*p.PriceMS)
			}
			list = append(list, fmt.Sprintf("%s %s %d %s %d/%d", p.Region, p.State, p.Blocks, price, p.DigestBlocks,
				p.HeldBlocks))
		}
		return list
	}
	send := func(now time.Duration, region string, d *Digest) {
		messages, err := d.Messages(1, uint64(now), 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, data := range messages {
			if _, err := m.Receive(now, region, "n", data); err != nil {
				t.Fatal(err)
			}
		}
	}
	whole := smallDigest()
	whole.Covered, whole.Sets[0].Held = []events.Partition{0, 1, 2, 3}, 3
	for _, step := range []struct {
		now   time.Duration
		model string
		size  uint32
		do    func(now time.Duration)
		want  string
	}{
		{1, "m", 0, func(time.Duration) {}, "eu unknown 0 40 0/0"},
		{2, "m", 0, func(now time.Duration) { send(now, "us", smallDigest()) },
			"eu unknown 0 40 0/0, us partial 2 - 3/5"},
		{3, "m", 0, func(now time.Duration) { send(now, "eu", whole); send(now, "here", whole) },
			"eu complete 2 40 3/3, us partial 2 - 3/5"},
		{4, "m", 32, func(time.Duration) {}, "eu unknown 0 40 0/0, us unknown 0 - 0/0"},
		{5, "x", 0, func(time.Duration) {}, "eu complete 0 40 0/0, us partial 0 - 0/0"},
		{2 * time.Minute, "m", 0, func(now time.Duration) { m.Tick(now) }, "eu unknown 0 40 0/0, us unknown 0 - 0/0"},
		{20 * time.Minute, "m", 0, func(now time.Duration) { m.Tick(now) }, "eu unknown 0 40 0/0"},
	} {
		step.do(step.now)
		if got := strings.Join(ask(step.now, step.model, step.size), ", "); got != step.want {
			t.Errorf("at %v: %s, want %s", step.now, got, step.want)
		}
	}
}

// TestLimitsOfRegions: regions, nodes and bytes beyond the limits are refused and counted.
func TestLimitsOfRegions(t *testing.T) {
	m := New(Config{Region: "here", MaxAge: time.Minute})
	messages, _ := smallDigest().Messages(1, 1, 0)
	for i := range maxRegions + 3 {
		_, _ = m.Receive(1, fmt.Sprint("r", i), "n", messages[0])
	}
	for i := range maxNodes + 4 {
		_, _ = m.Receive(1, "r0", fmt.Sprint("n", i), messages[0])
	}
	if c := m.Counts(); c.Refused != 3+5 || len(m.regions) != maxRegions {
		t.Fatalf("%+v, %d regions", c, len(m.regions))
	}
	m.bytes = maxBytes
	next, _ := smallDigest().Messages(1, 2, 0)
	if _, _ = m.Receive(1, "r0", "n", next[0]); m.Counts().Refused != 9 {
		t.Fatalf("%+v", m.Counts())
	}
}

func TestParsePrices(t *testing.T) {
	for text, want := range map[string]string{
		"eu=40 us=0.5": "map[eu:40 us:0.5]", "": "map[]", "eu": "not REGION=MS", "eu=-1": "no price", "eu=x": "no price",
		"eu=1 eu=2": "two prices", "EU=1": "not a name", "eu=NaN": "no price", "=3": "not a name",
	} {
		prices, err := ParsePrices(strings.Fields(text))
		got := fmt.Sprint(prices)
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// BenchmarkPrefixes looks up a prompt of 767 blocks in two regions with three nodes each. Each digest has all blocks.
func BenchmarkPrefixes(b *testing.B) {
	rng := rand.New(rand.NewPCG(11, 12))
	prompt := make([]events.LocalHash, 767)
	for i := range prompt {
		prompt[i] = events.LocalHash(rng.Uint64())
	}
	list, _ := randomHashes(rng, 300_000)
	list = append(list, events.SeqHashes(nil, prompt)...)
	d := &Digest{Partitions: 1, Covered: []events.Partition{0}, Sets: []Set{{Model: "m", BlockSize: 16,
		Lookaheads: []uint32{0}, Held: uint64(len(list)), Filter: NewFilter(list)}}}
	messages, err := d.Messages(1, 1, 0)
	if err != nil {
		b.Fatal(err)
	}
	m := New(Config{Region: "here", MaxAge: time.Minute})
	for i := range 6 {
		for _, data := range messages {
			if _, err := m.Receive(1, fmt.Sprint("r", i%2), fmt.Sprint("n", i), data); err != nil {
				b.Fatal(err)
			}
		}
	}
	v := m.View()
	b.ReportAllocs()
	for b.Loop() {
		got, err := v.Prefixes(1, &Question{Model: "m",
			Locals: func(uint32, uint32) ([]events.LocalHash, error) { return prompt, nil }})
		if err != nil || got[1].Blocks != 767 {
			b.Fatal(got, err)
		}
	}
}
