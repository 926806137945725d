package snapshot

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Sink receives an image. [Writer] and the import of an index are sinks.
type Sink interface {
	// Run receives a run with all holdings, in order of rank, tier and group. The sink must not keep the run: the
	// Reader reuses the memory. The parent of a run may come before or after the run.
	Run(r *events.Run) error

	// Rank receives the state of the rank at position i of the table of ranks. It is called once for each rank, after
	// all runs. The sink may keep the image.
	Rank(i int, img *events.RankImage) error
}

// Reader decodes the chunks of a manifest to an image. It belongs to a single goroutine. Discard it after an error.
type Reader struct {
	m    *Manifest
	sink Sink

	ranks map[events.RankKey]uint32
	next  int // position of the next chunk in rest
	rest  []ChunkRef
	mem   scratch

	dead     map[Hash][]uint32 // by chunk of runs: ascending positions of dead records
	holdings holdingTable

	run      events.Run
	arena    holdingArena
	part     *segment // the pieces of a long run so far
	partSum  Hash
	segments []*segment
	places   map[events.RunID]place
	parents  []parentLink
	counts   Counts

	images []*events.RankImage
}

type parentLink struct {
	child, parent events.RunID
	offset        uint32
}

// NewReader starts to read a snapshot. ranks is the result of [Ranks] for the manifest.
func NewReader(m *Manifest, ranks []RankState, sink Sink) *Reader {
	r := &Reader{m: m, sink: sink, ranks: make(map[events.RankKey]uint32, len(ranks)), rest: m.Restore(),
		dead: make(map[Hash][]uint32), places: make(map[events.RunID]place, min(m.Counts.Runs, 1<<20)),
		images: make([]*events.RankImage, len(ranks))}
	for i := range ranks {
		r.ranks[ranks[i].Key()] = uint32(i)
	}
	return r
}

// Chunk decodes the next chunk of [Manifest.Restore]. It keeps the bytes of chunks of holdings until Close, and of no
// others. Errors are ErrCorrupt, ErrVersion and errors of the sink.
func (r *Reader) Chunk(key string, data []byte) error {
	if r.next == len(r.rest) || r.rest[r.next].Key != key {
		return fmt.Errorf("%w: chunk %s is out of order", ErrCorrupt, key)
	}
	ref := &r.rest[r.next]
	r.next++
	if err := ref.Verify(data); err != nil {
		return err
	}
	mem := &r.mem
	if ref.Kind == kindHoldings {
		mem = new(scratch)
	}
	u, err := open(data, mem)
	if err == nil && u.kind != ref.Kind {
		err = fmt.Errorf("%w: the chunk has the kind %s", ErrCorrupt, u.kind)
	}
	if err == nil {
		err = r.decode(ref, u)
	}
	if err != nil {
		return fmt.Errorf("chunk %s of %s: %w", key, ref.Kind, err)
	}
	return nil
}

func (r *Reader) decode(ref *ChunkRef, u unsealed) error {
	switch u.kind {
	case kindDead:
		return r.decodeDead(u)
	case kindHoldings:
		return r.holdings.add(u, r.ranks)
	case kindRuns:
		return r.decodeRuns(ref, u)
	}
	return readSections(u, func(key events.RankKey, c cursor) error {
		i, ok := r.ranks[key]
		if !ok {
			return fmt.Errorf("%w: state of rank %s, which the snapshot does not have", ErrCorrupt, key)
		}
		if r.images[i] == nil {
			r.images[i] = new(events.RankImage)
		}
		if c.decodeState(r.images[i]); c.err != nil {
			return fmt.Errorf("%w: rank %s: %v", ErrCorrupt, key, c.err)
		}
		return nil
	})
}

func (r *Reader) decodeDead(u unsealed) error {
	c := cursor{fields: u.fields, words: u.words}
	for len(c.fields) > 0 {
		hash := Hash{c.word(), c.word()}
		n := c.count()
		list := make([]uint32, 0, n)
		next := uint64(0)
		for range n {
			at := next + c.uint()
			if at > math.MaxUint32 {
				c.fail(errRange)
			}
			list = append(list, uint32(at))
			next = at + 1
		}
		if c.err != nil {
			return fmt.Errorf("%w: %v", ErrCorrupt, c.err)
		}
		r.dead[hash] = list
	}
	return nil
}

func (r *Reader) decodeRuns(ref *ChunkRef, u unsealed) error {
	corrupt := func(p *piece, what any) error { return fmt.Errorf("%w: run %d: %v", ErrCorrupt, p.id, what) }
	c := cursor{fields: u.fields, words: u.words}
	dead := r.dead[ref.hash()]
	s := &segment{refs: []ChunkRef{*ref}}
	var before events.RunID
	for len(c.fields) > 0 {
		size := len(c.fields) + len(c.words)
		p := c.readPiece(before)
		if c.err != nil {
			return fmt.Errorf("%w: %v", ErrCorrupt, c.err)
		}
		size -= len(c.fields) + len(c.words)
		before = p.id
		if p.flags&runPiece != 0 {
			if err := r.decodePart(ref, &p, size); err != nil {
				return err
			}
			if s.records > 0 || len(c.fields) > 0 {
				return corrupt(&p, "a piece is not alone in its chunk")
			}
			return nil
		}
		if r.part != nil {
			return corrupt(&p, "comes between the pieces of another")
		}
		at := uint32(s.records)
		s.records++
		s.size += size
		if at/64 == uint32(len(s.live)) {
			s.live = append(s.live, 0)
		}
		if len(dead) > 0 && dead[0] == at {
			dead = dead[1:]
			continue
		}
		s.live.set(at)
		s.alive += size
		r.run.Locals, r.run.Names = r.run.Locals[:0], r.run.Names[:0]
		p.decodeInto(&r.run)
		sum := fingerprint(Hash{}, p.id, p.flags, p.fields, p.words)
		if err := r.emit(&p, place{s, at, p.n, uint32(size), sum}); err != nil {
			return err
		}
	}
	if len(c.words) > 0 || len(dead) > 0 {
		return fmt.Errorf("%w: %d words and %d dead records too many", ErrCorrupt, len(c.words)/8, len(dead))
	}
	delete(r.dead, ref.hash())
	r.segments = append(r.segments, s)
	return nil
}

// decodePart decodes a piece of a long run.
func (r *Reader) decodePart(ref *ChunkRef, p *piece, size int) error {
	if p.from == 0 && r.part == nil {
		r.part = &segment{records: 1, live: bitset{1}}
		r.partSum = Hash{}
		r.run.ID = p.id
		r.run.Locals, r.run.Names = r.run.Locals[:0], r.run.Names[:0]
	}
	if r.part == nil || r.run.ID != p.id || int(p.from) != len(r.run.Locals) {
		return fmt.Errorf("%w: run %d: blocks from %d on are out of order", ErrCorrupt, p.id, p.from)
	}
	s := r.part
	s.refs = append(s.refs, *ref)
	s.size += size
	s.alive = s.size
	r.partSum = fingerprint(r.partSum, p.id, p.flags, p.fields, p.words)
	p.decodeInto(&r.run)
	if p.from+p.count < p.n {
		return nil
	}
	r.part = nil
	r.segments = append(r.segments, s)
	return r.emit(p, place{s, 0, p.n, uint32(s.size), r.partSum})
}

// emit completes a run after the decoding of blocks, and passes the run to the sink.
func (r *Reader) emit(p *piece, at place) error {
	if _, twice := r.places[p.id]; twice {
		return fmt.Errorf("%w: run %d is there twice", ErrCorrupt, p.id)
	}
	r.places[p.id] = at
	if p.parent != events.NoRun {
		r.parents = append(r.parents, parentLink{p.id, p.parent, p.offset})
	}
	run := &r.run
	run.ID, run.Space, run.Parent, run.Offset = p.id, p.space, p.parent, p.offset
	var err error
	r.arena.reset()
	if run.Holdings, err = r.holdings.appendTo(run.Holdings[:0], p.id, p.n, &r.arena); err != nil {
		return err
	}
	r.counts.Runs++
	r.counts.Blocks += uint64(p.n)
	for i := range run.Holdings {
		r.counts.Holdings += blockCount(&run.Holdings[i])
	}
	return r.sink.Run(run)
}

// Close checks that the snapshot is complete and passes the images of the ranks to the sink. It returns the run index
// for the next [Writer], if the index keeps the ids of runs.
func (r *Reader) Close() (*RunIndex, error) {
	corrupt := func(format string, args ...any) (*RunIndex, error) {
		return nil, fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
	}
	if err := r.holdings.sort(); err != nil {
		return nil, err
	}
	switch {
	case r.next < len(r.rest):
		return corrupt("chunk %s was not read", r.rest[r.next].Key)
	case r.part != nil:
		return corrupt("run %d ends early", r.run.ID)
	case len(r.dead) > 0:
		return corrupt("dead records of %d unknown chunks", len(r.dead))
	case r.holdings.used != len(r.holdings.index):
		return corrupt("%d holdings of unknown runs", len(r.holdings.index)-r.holdings.used)
	}
	for _, l := range r.parents {
		if p, ok := r.places[l.parent]; !ok || l.offset > p.blocks {
			return corrupt("run %d has the missing parent block %d of run %d", l.child, l.offset, l.parent)
		}
	}
	if m := &r.m.Counts; m.Runs != r.counts.Runs || m.Blocks != r.counts.Blocks || m.Holdings != r.counts.Holdings {
		return corrupt("%d runs, %d blocks, %d holdings instead of %d, %d, %d", r.counts.Runs, r.counts.Blocks,
			r.counts.Holdings, m.Runs, m.Blocks, m.Holdings)
	}
	for i, img := range r.images {
		if img == nil {
			img = new(events.RankImage)
		}
		if err := r.sink.Rank(i, img); err != nil {
			return nil, err
		}
	}
	return &RunIndex{r.segments, r.places}, nil
}

// Read restores a snapshot. It fetches the chunks in order and passes the image to a sink. The callback open returns
// the sink for the table of ranks. A caller that fetches ahead uses a [Reader].
func Read(m *Manifest, fetch Fetch, open func(ranks []RankState) (Sink, error)) (*RunIndex, error) {
	ranks, err := Ranks(m, fetch)
	if err != nil {
		return nil, err
	}
	sink, err := open(ranks)
	if err != nil {
		return nil, err
	}
	r := NewReader(m, ranks, sink)
	for _, ref := range m.Restore() {
		data, err := fetch(ref.Key)
		if err != nil {
			return nil, fmt.Errorf("chunk %s: %w", ref.Key, err)
		}
		if err := r.Chunk(ref.Key, data); err != nil {
			return nil, err
		}
	}
	return r.Close()
}

// holdingTable has the records of all holdings by run. Snapshots have them by rank.
type holdingTable struct {
	sections []holdingSection
	index    []uint64 // run<<32 | position in records; sorted after the last chunk
	records  []holdingRecord
	sorted   bool
	at       int // position of the last run's records
	used     int
}

// holdingSection is a section of holdings. The table keeps the bytes.
type holdingSection struct {
	rank          uint32
	fields, words []byte
}

// holdingRecord is the position of a record.
type holdingRecord struct {
	section       uint32
	fields, words uint32
	before        events.RunID
}

func (t *holdingTable) add(u unsealed, ranks map[events.RankKey]uint32) error {
	// The caller may reuse the bytes.
	return readSections(u, func(key events.RankKey, c cursor) error {
		i, ok := ranks[key]
		if !ok {
			return fmt.Errorf("%w: holdings of rank %s, which the snapshot does not have", ErrCorrupt, key)
		}
		t.sections = append(t.sections, holdingSection{i, c.fields, c.words})
		return nil
	})
}

func (t *holdingTable) sort() error {
	if t.sorted {
		return nil
	}
	t.sorted = true
	slices.SortStableFunc(t.sections, func(a, b holdingSection) int { return int(int64(a.rank) - int64(b.rank)) })
	for i, s := range t.sections {
		c := cursor{fields: s.fields, words: s.words}
		var before events.RunID
		for len(c.fields) > 0 {
			rec := holdingRecord{uint32(i), uint32(len(s.fields) - len(c.fields)), uint32(len(s.words) - len(c.words)),
				before}
			head := c.holdingHead(before)
			c.skipHolding(head)
			if c.err != nil {
				return fmt.Errorf("%w: holdings: %v", ErrCorrupt, c.err)
			}
			before = head.run
			t.index = append(t.index, uint64(head.run)<<32|uint64(len(t.records)))
			t.records = append(t.records, rec)
		}
		if len(c.words) > 0 {
			return fmt.Errorf("%w: holdings: %d words too many", ErrCorrupt, len(c.words)/8)
		}
	}
	slices.Sort(t.index)
	return nil
}

// appendTo appends the holdings of a run of n blocks.
func (t *holdingTable) appendTo(dst []events.Holding, run events.RunID, n uint32, a *holdingArena) (
	[]events.Holding, error) {
	if err := t.sort(); err != nil {
		return nil, err
	}
	if t.at >= len(t.index) || t.index[t.at]>>32 != uint64(run) {
		t.at, _ = slices.BinarySearch(t.index, uint64(run)<<32)
	}
	for ; t.at < len(t.index) && t.index[t.at]>>32 == uint64(run); t.at++ {
		rec := &t.records[uint32(t.index[t.at])]
		s := &t.sections[rec.section]
		c := cursor{fields: s.fields[rec.fields:], words: s.words[rec.words:]}
		head := c.holdingHead(rec.before)
		t.used++
		last := len(dst) - 1
		same := last >= 0 && dst[last].Rank == s.rank && dst[last].Tier == head.tier() && dst[last].Group == head.group
		if same != head.continues() {
			return nil, fmt.Errorf("%w: run %d: two holdings of a rank, tier and group, or a continuation alone",
				ErrCorrupt, run)
		}
		if !same {
			dst = append(dst, events.Holding{Rank: s.rank})
			last++
		}
		if c.decodeHolding(head, &dst[last], n, a); c.err != nil {
			return nil, fmt.Errorf("%w: run %d: %v", ErrCorrupt, run, c.err)
		}
	}
	return dst, nil
}
