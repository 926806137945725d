package radix

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// chooser is the source of a history's choices: rapid, a seeded generator, or a fuzzer's bytes.
type chooser interface {
	below(n int) int // 0 to n-1
}

// world is an index with a twin of every rank, over a small universe of documents that branch.
type world struct {
	t    testing.TB
	pick chooser
	cfg  Config
	mem  limits
	x    *Index
	docs [][]events.LocalHash
	now  events.Millis

	ranks []*member
	log   []string
	named Named
}

// blockTokens is the number of tokens in a block.
const blockTokens = 16

type member struct {
	id     RankID
	space  uint32
	twin   *twin.Rank
	naming int                // 0: shared names; 1: own names; 2: shared names with odd ones
	groups int                // number of groups in use
	kinds  []events.GroupKind // of each group
	salt   uint64
	steps  []step // since the rank was empty
}

type step struct {
	now events.Millis
	evs []events.Event
}

// memories are the kinds of memory of an index, in any build: heap; mappings that arrays enter early, grow in and leave
// when full; and the kind of the build.
var memories = []limits{
	{mapped: math.MaxInt},
	{mapped: 128, reserve: 64 << 10, step: 4 << 10},
	usualLimits,
}

func (w *world) newIndex() *Index { return newIndex(w.cfg, w.mem) }

func newWorld(t testing.TB, pick chooser) *world {
	w := &world{t: t, pick: pick, cfg: Config{MaxPending: 40, MaxPendingBytes: 4000 * pick.below(3),
		PendingFor: events.Millis(50 * pick.below(2)), MaxTombstones: 10, TombstoneFor: 50}}
	w.mem = memories[pick.below(len(memories))]
	w.x = w.newIndex()
	for i := range 3 + pick.below(6) {
		var doc []events.LocalHash
		if i > 0 && pick.below(4) > 0 {
			from := w.docs[pick.below(i)]
			doc = slices.Clone(from[:pick.below(len(from))])
		}
		for n := len(doc) + 1 + pick.below(1<<(1+pick.below(8))); len(doc) < n; {
			doc = append(doc, events.LocalHash(mix(uint64(i)<<32|uint64(len(doc)))))
		}
		w.docs = append(w.docs, doc)
	}
	for range 1 + pick.below(5) {
		w.addRank()
	}
	return w
}

func twinConfig(c Config) twin.Config { return twin.Config(c.withDefaults()) }

func (w *world) addRank() {
	m := &member{space: uint32(w.pick.below(5) / 4), twin: twin.New(twinConfig(w.cfg), blockTokens),
		naming: max(0, w.pick.below(5)-2), groups: max(1, w.pick.below(8)-2)}
	m.id = w.x.AddRank(m.space, blockTokens)
	m.salt = uint64(w.pick.below(1000))
	m.kinds = w.kinds(m.groups)
	w.ranks = append(w.ranks, m)
}

// name returns a rank's name of block i of a document.
func (w *world) name(m *member, doc, i int) events.BlockHash {
	seq := uint64(w.docs[doc][0])
	for _, l := range w.docs[doc][1 : i+1] {
		seq = mix(seq ^ uint64(l))
	}
	switch {
	case m.naming == 1:
		return events.BlockHash(mix(seq ^ m.salt))
	case m.naming == 2 && seq%5 == 0:
		return events.BlockHash(w.pick.below(6)) // collides, and changes sometimes
	}
	return events.BlockHash(seq)
}

func (w *world) names(m *member, doc, from, to int) (names []events.BlockHash) {
	for i := from; i < to; i++ {
		names = append(names, w.name(m, doc, i))
	}
	return names
}

// tier prefers the device.
func (w *world) tier() events.Tier { return events.Tier(1 + max(0, w.pick.below(7)-3)) }

// kinds draws the kinds of groups. Group 0 is a main group, and so are some others. Some have needs, which may be
// unknown.
func (w *world) kinds(groups int) (kinds []events.GroupKind) {
	draft := w.pick.below(6) == 0
	for g := range groups {
		k := events.GroupKind{Group: events.GroupIndex(g), Kind: events.AttentionFull, Drops: draft &&
			w.pick.below(3) > 0}
		if g > 0 && w.pick.below(4) > 0 {
			k.Kind = []events.Attention{events.AttentionSlidingWindow, events.AttentionSlidingWindow,
				events.AttentionSlidingMLA,
				events.AttentionChunkedLocal, events.AttentionMamba, events.AttentionCross,
				events.AttentionOther}[w.pick.below(7)]
		}
		if k.Kind.Windowed() {
			k.Window = []uint32{1, 17, 40, 64, 500, 0}[w.pick.below(6)]
		}
		if before := k.Group - 1; g > 1 && w.pick.below(3) == 0 { // like the previous group
			k = kinds[before]
			k.Group++
		}
		kinds = append(kinds, k)
	}
	return kinds
}

// group sets the group of an event and its attributes.
func (w *world) group(m *member, e *events.Event) {
	k := m.kinds[w.pick.below(m.groups)]
	e.Group, e.Attention, e.Window, e.Drops = k.Group, k.Kind, k.Window, k.Drops
	switch w.pick.below(60) {
	case 0: // contradicts the group's first event
		e.Attention = events.AttentionMamba
	case 1, 2, 3:
		e.Attention = events.AttentionUnknown
	case 4, 5, 6:
		e.Window, e.Drops = 0, false
	}
}

func (w *world) event(m *member) events.Event {
	e := events.Event{Kind: events.Stored, Tier: w.tier()}
	w.group(m, &e)
	doc := w.pick.below(len(w.docs))
	n := len(w.docs[doc])
	from := w.pick.below(n)
	if w.pick.below(3) == 0 {
		from = 0
	}
	to := from + 1 + w.pick.below(n-from)
	if w.pick.below(2) == 0 {
		to = min(to, from+1+w.pick.below(3))
	}
	switch op := w.pick.below(24); {
	case op >= 20:
		w.chunk(m, doc, &e)
	case op < 9:
		e.Blocks, e.Locals = w.names(m, doc, from, to), w.docs[doc][from:to]
		if from > 0 {
			e.HasParent, e.Parent = true, w.name(m, doc, from-1)
		}
	case op < 11:
		e.Blocks = w.names(m, doc, from, to)
	case op < 18:
		e.Kind, e.Attention, e.Window, e.Drops = events.Removed, 0, 0, false
		e.Blocks = w.names(m, doc, from, to)
		switch w.pick.below(3) {
		case 0:
			slices.Reverse(e.Blocks)
		case 1:
			for i := len(e.Blocks) - 1; i > 0; i-- {
				j := w.pick.below(i + 1)
				e.Blocks[i], e.Blocks[j] = e.Blocks[j], e.Blocks[i]
			}
			e.Blocks = e.Blocks[:1+w.pick.below(len(e.Blocks))]
		}
	case op == 18 && w.pick.below(3) == 0:
		e = events.Event{Kind: events.Cleared, Tier: events.Tier(w.pick.below(5))}
	default: // the tail, as engines evict
		e.Kind, e.Attention, e.Window, e.Drops = events.Removed, 0, 0, false
		e.Blocks = w.names(m, doc, from, n)
		slices.Reverse(e.Blocks)
	}
	if w.pick.below(200) == 0 {
		e.Tier = 9
	}
	return e
}

// chunk makes an event of chunks below the device, with the name of the last block or a name of the connector.
func (w *world) chunk(m *member, doc int, e *events.Event) {
	size := 1 << w.pick.below(3)
	n := w.pick.below(len(w.docs[doc])/size + 1)
	begin, end := n*size, min((n+1)*size, len(w.docs[doc]))
	if begin == end {
		begin, end = 0, 1
	}
	own := func(end int) events.BlockHash { return w.name(m, doc, end-1) ^ 0x5555 }
	e.Tier, e.Chunk = events.Tier(2+max(0, w.pick.below(6)-3)), uint32(end-begin)
	switch w.pick.below(6) {
	case 0:
		e.Blocks = []events.BlockHash{w.name(m, doc, end-1)}
	case 1:
		e.Blocks, e.Chunk = []events.BlockHash{w.name(m, doc, end-1)}, events.ChunkSizeUnknown
	case 2:
		e.Blocks = w.names(m, doc, begin, end)
	case 3:
		*e = events.Event{Kind: events.Removed, Tier: e.Tier, Group: e.Group, Blocks: []events.BlockHash{own(end)}}
	default:
		e.Own, e.Blocks, e.Locals = true, []events.BlockHash{own(end)}, w.docs[doc][begin:end]
		if begin > 0 {
			e.HasParent, e.Parent = true, own(begin)
		}
		if w.pick.below(4) == 0 {
			e.HasParent, e.Parent = true, 0
		}
	}
}

func (w *world) logf(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

// step makes a change and verifies the changed rank.
func (w *world) step() {
	switch op := w.pick.below(100); {
	case op < 90:
		m := w.ranks[w.pick.below(len(w.ranks))]
		w.now += events.Millis(w.pick.below(8))
		if w.pick.below(20) == 0 {
			w.now -= 20
		}
		s := step{now: w.now}
		for range 1 + w.pick.below(3) {
			s.evs = append(s.evs, w.event(m))
		}
		w.apply(m, s)
	case op < 91 && len(w.ranks) < 70:
		w.addRank()
	case op < 92 && len(w.ranks) > 1:
		i := w.pick.below(len(w.ranks))
		w.logf("drop %d", i)
		w.x.DropRank(w.ranks[i].id)
		w.ranks = slices.Delete(w.ranks, i, i+1)
	case op < 94:
		w.restore()
	default:
		w.query()
	}
}

func (w *world) apply(m *member, s step) {
	w.logf("rank %d at %d: %+v", m.id, s.now, s.evs)
	m.steps = append(m.steps, s)
	got := w.x.Apply(m.id, s.now, s.evs)
	want := m.twin.Apply(s.now, s.evs)
	if got != Counts(want) {
		w.fail("rank %d: counts are\n%+v, the twin's\n%+v", m.id, got, want)
	}
}

// restore moves some ranks to another index by way of an image, while the others stay.
func (w *world) restore() {
	var moved []*member
	for _, m := range w.ranks {
		if w.pick.below(2) == 0 {
			moved = append(moved, m)
		}
	}
	if len(moved) == 0 {
		return
	}
	w.logf("restore %d ranks", len(moved))
	from, ids := w.x, []RankID{}
	for _, m := range moved {
		ids = append(ids, m.id)
	}
	img := &image{}
	ex := from.StartExport(ids)
	steps := w.pick.below(3) // events during an export do not change it
	for done := false; !done; {
		var err error
		if done, err = ex.Step(1+w.pick.below(60), img); err != nil {
			w.fail("export: %v", err)
		}
		if m := w.ranks[w.pick.below(len(w.ranks))]; !done && steps > 0 {
			steps--
			if slices.Contains(moved, m) { // only in the index that it leaves
				s := step{w.now, []events.Event{w.event(m)}}
				w.logf("rank %d during the export: %+v", m.id, s.evs)
				from.Apply(m.id, s.now, s.evs)
			} else {
				w.apply(m, step{w.now, []events.Event{w.event(m)}})
			}
		}
	}
	into := from
	if all := len(moved) == len(w.ranks); all && w.pick.below(2) == 0 {
		into = w.newIndex()
	}
	for i, m := range moved {
		if into == from {
			from.DropRank(m.id)
		}
		m.id = into.AddRank(m.space, blockTokens)
		ids[i] = m.id
	}
	if err := img.into(into, ids, w.pick.below(2) == 0); err != nil {
		w.fail("import: %v", err)
	}
	w.x = into
	again := &image{}
	if _, err := w.x.StartExport(ids).Step(1<<30, again); err != nil {
		w.fail("export: %v", err)
	}
	w.check()
}

// image is a sink in memory.
type image struct {
	runs  []events.Run
	ranks []events.RankImage
}

func (m *image) Run(run *events.Run) error {
	own := *run
	own.Locals, own.Names, own.Holdings = slices.Clone(run.Locals), slices.Clone(run.Names), nil
	for _, h := range run.Holdings {
		h.Bits, h.Copies, h.Names, h.Also = slices.Clone(h.Bits), slices.Clone(h.Copies), slices.Clone(h.Names),
			slices.Clone(h.Also)
		own.Holdings = append(own.Holdings, h)
	}
	m.runs = append(m.runs, own)
	return nil
}

func (m *image) Rank(i int, img *events.RankImage) error {
	if i != len(m.ranks) {
		return fmt.Errorf("rank %d after %d", i, len(m.ranks))
	}
	m.ranks = append(m.ranks, *img)
	return nil
}

// into imports an image, and finishes the import also after an error.
func (m *image) into(x *Index, ids []RankID, backwards bool) (err error) {
	runs := slices.Clone(m.runs)
	if backwards {
		slices.Reverse(runs)
	}
	im := x.StartImport(ids)
	im.Expect(len(runs) * 20) // too few for some images, too many for others
	defer func() {
		if e := im.Finish(); err == nil {
			err = e
		}
		if n := x.names.coming; n != 0 {
			err = errors.Join(err, fmt.Errorf("%d expected names remain after the import", n))
		}
	}()
	for i := range runs {
		if err := im.Run(&runs[i]); err != nil {
			return err
		}
	}
	for i := range m.ranks {
		if err := im.Rank(i, &m.ranks[i]); err != nil {
			return err
		}
	}
	return nil
}

// query queries a document's prefix, or a prefix that leaves a document.
func (w *world) query() {
	doc := w.docs[w.pick.below(len(w.docs))]
	q := slices.Clone(doc[:1+w.pick.below(len(doc))])
	if w.pick.below(4) == 0 {
		q[w.pick.below(len(q))]++
	}
	w.verify(uint32(w.pick.below(2)), q)
	w.queryNames()
}

// queryNames queries by engine hashes: a rank's names of a document's blocks, or with some names of other blocks.
func (w *world) queryNames() {
	doc := w.pick.below(len(w.docs))
	names := w.names(w.ranks[w.pick.below(len(w.ranks))], doc, 0, 1+w.pick.below(len(w.docs[doc])))
	switch w.pick.below(6) {
	case 0:
		names[w.pick.below(len(names))]++
	case 1:
		names = names[w.pick.below(len(names)):]
	case 2:
		other := w.pick.below(len(w.docs))
		at := w.pick.below(min(len(names), len(w.docs[other])))
		copy(names[at:], w.names(w.ranks[w.pick.below(len(w.ranks))], other, at, len(w.docs[other])))
	}
	w.verifyNames(uint32(w.pick.below(2)), names)
}

func (w *world) verifyNames(space uint32, names []events.BlockHash) {
	var allowed *RankSet
	if w.pick.below(4) == 0 {
		allowed = &RankSet{}
	}
	want, within := map[RankID][events.NumTiers]uint32{}, map[RankID][]uint32{}
	w.named.Sets = w.sets()
	for _, m := range w.ranks {
		if allowed != nil {
			if w.pick.below(2) == 0 {
				continue
			}
			allowed.Add(m.id)
		}
		w.expect(m, space, m.twin.Named(names), w.named.Sets, want, within)
	}
	w.x.MatchNames(space, names, allowed, &w.named)
	w.same("match by names", want, w.named.Ranks)
	w.sameWithin(within, &w.named.Answer)
}

// sets draws sets of tiers for a query; often none.
func (w *world) sets() (sets []TierSet) {
	for range w.pick.below(4) {
		sets = append(sets, TierSet(w.pick.below(1<<events.NumTiers)))
	}
	return sets
}

// expect adds the answer of a rank's twin to a query.
func (w *world) expect(m *member, space uint32, q []events.LocalHash, sets []TierSet,
	want map[RankID][events.NumTiers]uint32, within map[RankID][]uint32) {
	if m.space != space {
		return
	}
	var list []uint32
	for _, set := range sets {
		var tiers []events.Tier
		for t := events.Device; t <= events.External; t++ {
			if set.Has(t) {
				tiers = append(tiers, t)
			}
		}
		list = append(list, uint32(m.twin.Within(q, tiers...)))
	}
	d := m.twin.Match(q)
	if d != [events.NumTiers]uint32{} || slices.ContainsFunc(list, func(n uint32) bool { return n > 0 }) {
		want[m.id], within[m.id] = d, list
	}
}

func (w *world) sameWithin(want map[RankID][]uint32, a *Answer) {
	n := len(a.Sets)
	if len(a.Within) != n*len(a.Ranks) {
		w.fail("%d ranks, %d sets of tiers: %v", len(a.Ranks), n, a.Within)
	}
	for i, o := range a.Ranks {
		if got := a.Within[i*n : (i+1)*n]; !slices.Equal(got, want[o.Rank]) {
			w.fail("rank %d: within %v: %v, want %v", o.Rank, a.Sets, got, want[o.Rank])
		}
	}
}

func (w *world) verify(space uint32, q []events.LocalHash) {
	var allowed *RankSet
	if w.pick.below(4) == 0 {
		allowed = &RankSet{}
		for _, m := range w.ranks {
			if w.pick.below(2) == 0 {
				allowed.Add(m.id)
			}
		}
	}
	want := map[RankID][events.NumTiers]uint32{}
	for _, m := range w.ranks {
		if d := m.twin.Match(q); m.space == space && d != [events.NumTiers]uint32{} &&
			(allowed == nil || allowed.Has(m.id)) {
			want[m.id] = d
		}
	}
	var a Answer
	w.x.Match(space, q, allowed, &a)
	w.same("match", want, a.Ranks)
	if a.Sets = w.sets(); a.Sets != nil {
		more, within := map[RankID][events.NumTiers]uint32{}, map[RankID][]uint32{}
		for _, m := range w.ranks {
			if allowed == nil || allowed.Has(m.id) {
				w.expect(m, space, q, a.Sets, more, within)
			}
		}
		w.x.Match(space, q, allowed, &a)
		w.same("match with sets", more, a.Ranks)
		w.sameWithin(within, &a)
	}
	var flat []Overlap
	ex := w.x.Explain(space, q, allowed)
	for _, p := range ex.Ranks {
		if p.Depth != [events.NumTiers]uint32{} {
			flat = append(flat, p.Overlap)
		}
		m := w.ranks[slices.IndexFunc(w.ranks, func(m *member) bool { return m.id == p.Rank })]
		if cut := m.twin.Held(q) != m.twin.Match(q); cut != (p.Stop == StopGroup || p.Stop == stopDraft) &&
			total(m.twin.Held(q)) != total(m.twin.Match(q)) {
			w.fail("explain: rank %d holds %v, of which %v are usable: %v", p.Rank, m.twin.Held(q), m.twin.Match(q),
				p.Stop)
		}
		var seq events.SeqHash
		for i, s := range p.Blocks {
			seq = twin.Next(seq, i == 0, q[i])
			for t := events.Device; t <= events.External; t++ {
				if s.Has(t) != m.twin.Holds(t, seq) {
					w.fail("explain: rank %d holds block %d in %v: %v", p.Rank, i, t, s.Has(t))
				}
			}
		}
	}
	w.same("explain", want, flat)
}

func total(d [events.NumTiers]uint32) uint32 { return d[0] + d[1] + d[2] + d[3] }

func (w *world) same(what string, want map[RankID][events.NumTiers]uint32, got []Overlap) {
	if len(got) != len(want) {
		w.fail("%s: %d ranks, want %d: %v, %v", what, len(got), len(want), got, want)
	}
	seen := map[RankID]bool{}
	for _, o := range got {
		if d, ok := want[o.Rank]; !ok || seen[o.Rank] || d != o.Depth {
			w.fail("%s: rank %d: %v, want %v", what, o.Rank, o.Depth, d)
		}
		seen[o.Rank] = true
	}
}

// check verifies everything.
func (w *world) check() {
	if err := w.x.Check(); err != nil {
		w.fail("check: %v", err)
	}
	var holdings int64
	for _, m := range w.ranks {
		if got, want := w.x.Checksum(m.id), m.twin.Checksum(); got != want {
			w.fail("rank %d: checksum %#x, the twin's %#x", m.id, got, want)
		}
		if got, want := w.x.RankStats(m.id).Copies, int64(m.twin.Copies()); got != want {
			w.fail("rank %d: %d further copies, the twin has %d", m.id, got, want)
		}
		holdings += int64(m.twin.Holdings())
		for _, s := range groupSets(w.x.rank(m.id).sets) {
			for i, name := range s.Blocks {
				if n := m.twin.SetCount(s.Tier, s.Group, name); int(s.Counts[i]) != n {
					w.fail("rank %d: set %v %d: %d copies of %#x, want %d", m.id, s.Tier, s.Group, s.Counts[i], name, n)
				}
			}
		}
	}
	s := w.x.Stats()
	if s.Holdings[0]+s.Holdings[1]+s.Holdings[2]+s.Holdings[3] != holdings || s.Ranks != len(w.ranks) {
		w.fail("stats: %+v, want %d holdings of %d ranks", s, holdings, len(w.ranks))
	}
	for _, doc := range w.docs {
		w.verify(0, doc)
		w.verify(1, doc)
	}
}

func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	if len(w.log) > 40 {
		w.log = w.log[len(w.log)-40:]
	}
	for _, l := range w.log {
		if len(l) > 300 {
			l = l[:300] + "..."
		}
		w.t.Log(l)
	}
	w.t.Fatalf(format, args...)
}
