package snapshot

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Config describes the snapshot that a [Writer] writes.
type Config struct {
	Namespace string
	Stream    string           // name of the partition's stream
	Epoch     time.Time        // creation time of the stream
	Seq       events.StreamSeq // last message that the image reflects
	SeqTime   events.Millis    // when the stream stored message Seq; 0 if unknown
	Created   time.Time        // current time, for operators
	Writer    string           // name of the writer, for operators

	Spaces []Space

	// Ranks is the list of the image's ranks. Holding.Rank and the argument of Rank are positions in the list. The
	// Writer reads the states at Close; before Close, only the names must be set.
	Ranks []RankState
}

// Writer encodes an image to chunks and a manifest. Pass every run and every rank in a stable order, because the chunks
// follow the order. It belongs to a single goroutine. Discard it after an error.
type Writer struct {
	cfg  Config
	plan *WritePlan
	emit func(key string, data []byte) error

	have map[Hash]string // chunks of the kept generations
	refs [kindState + 1][]ChunkRef

	holdings, states []*sections // by position in cfg.Ranks
	hasState         []bool

	// Unchanged runs stay in their segment. Runs of segments that may be rewritten wait in memory until Close.
	old     *RunIndex
	kept    map[*segment]*segment // segments of the old run index, with the remaining records
	waiting map[*segment][]record // by segment in kept

	places map[events.RunID]place
	fresh  []*segment
	before int // bytes of live records in the previous snapshot
	news   int // bytes of records of new or changed runs
	open   openSegment
	record record

	inlineRanks int // maxInlineRanks, except in tests
	sorted      []*events.Holding

	counts Counts
}

// openSegment is the incomplete chunk of runs.
type openSegment struct {
	segment       *segment
	fields, words []byte
	before        events.RunID
}

// NewWriter starts a snapshot with the plan. index is the run index of the previous snapshot, if this process wrote or
// read it. nil writes every run again. emit receives each new chunk and owns the bytes. An error of emit ends the
// snapshot.
func NewWriter(cfg Config, plan *WritePlan, index *RunIndex, emit func(key string, data []byte) error) (*Writer, error,
) {
	w := &Writer{cfg: cfg, plan: plan, emit: emit, old: index, have: make(map[Hash]string, len(plan.chunks)),
		kept: make(map[*segment]*segment), waiting: make(map[*segment][]record),
		hasState: make([]bool, len(cfg.Ranks)), inlineRanks: maxInlineRanks}
	maps.Copy(w.have, plan.chunks)
	for _, s := range []string{cfg.Namespace, cfg.Stream, cfg.Writer} {
		if !utf8.ValidString(s) || len(s) > maxName {
			return nil, fmt.Errorf("%w: %q as a name", ErrImage, s)
		}
	}
	seen := make(map[events.RankKey]bool, len(cfg.Ranks))
	for i := range cfg.Ranks {
		key := cfg.Ranks[i].Key()
		if seen[key] {
			return nil, fmt.Errorf("%w: rank %s is there twice", ErrImage, key)
		}
		if len(key.Instance) > maxName {
			return nil, fmt.Errorf("%w: a worker's name of %d bytes", ErrImage, len(key.Instance))
		}
		seen[key] = true
		w.holdings = append(w.holdings, newSections(key))
		w.states = append(w.states, newSections(key))
	}
	if index == nil {
		w.old = &RunIndex{}
	}
	w.places = make(map[events.RunID]place, len(w.old.places))
	var usable []*segment
	for _, s := range w.old.segments {
		if slices.ContainsFunc(s.refs, func(r ChunkRef) bool { return w.have[r.hash()] != r.Key }) {
			continue // a chunk is missing or damaged
		}
		usable = append(usable, s)
		w.before += s.alive
		w.kept[s] = &segment{refs: s.refs, records: s.records, size: s.size, live: newBitset(s.records)}
	}
	for _, s := range candidates(usable) {
		w.waiting[w.kept[s]] = []record{}
	}
	return w, nil
}

func imageError(id events.RunID, format string, args ...any) error {
	return fmt.Errorf("%w: run %d: %s", ErrImage, id, fmt.Sprintf(format, args...))
}

// Run adds a run and the holdings. It does not keep r.
func (w *Writer) Run(r *events.Run) error {
	n := len(r.Locals)
	switch {
	case r.ID == events.NoRun:
		return imageError(r.ID, "no id")
	case len(r.Names) != n:
		return imageError(r.ID, "%d local hashes, %d names", n, len(r.Names))
	case int64(n) > math.MaxUint32-64:
		return imageError(r.ID, "%d blocks", n)
	}
	if _, twice := w.places[r.ID]; twice {
		return imageError(r.ID, "is there twice")
	}
	for _, h := range w.inOrder(r.Holdings) {
		if int64(h.Rank) >= int64(len(w.holdings)) {
			return imageError(r.ID, "rank %d of %d", h.Rank, len(w.holdings))
		}
		if err := checkHolding(h, n); err != nil {
			return imageError(r.ID, "rank %d: %v", h.Rank, err)
		}
		w.holdings[h.Rank].addHolding(r.ID, uint32(n), h)
		w.counts.Holdings += blockCount(h)
	}
	for i := 1; i < len(w.sorted); i++ {
		if h := w.sorted[i]; compareHoldings(w.sorted[i-1], h) == 0 {
			return imageError(r.ID, "two holdings of rank %d in tier %s for group %d", h.Rank, h.Tier, h.Group)
		}
	}
	w.counts.Runs++
	w.counts.Blocks += uint64(n)
	if n > pieceBlocks {
		return w.longRun(r)
	}
	w.record.encodePiece(r, 0, n)
	return w.add(&w.record)
}

// inOrder sorts holdings by rank, tier and group. It reuses memory.
func (w *Writer) inOrder(holdings []events.Holding) []*events.Holding {
	w.sorted = w.sorted[:0]
	for i := range holdings {
		w.sorted = append(w.sorted, &holdings[i])
	}
	if !slices.IsSortedFunc(w.sorted, compareHoldings) {
		slices.SortFunc(w.sorted, compareHoldings)
	}
	return w.sorted
}

func compareHoldings(a, b *events.Holding) int {
	return cmp.Or(cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Tier, b.Tier), cmp.Compare(a.Group, b.Group))
}

func (w *Writer) add(rec *record) error {
	p, ok := w.old.places[rec.id]
	now := w.kept[p.segment]
	if !ok || now == nil || p.sum != rec.sum {
		w.news += rec.size()
		return w.append(rec)
	}
	w.keep(rec.id, p, now)
	if list, waits := w.waiting[now]; waits {
		own := *rec
		own.fields, own.words = slices.Clone(rec.fields), slices.Clone(rec.words)
		w.waiting[now] = append(list, own)
	}
	return nil
}

// keep records that a run stays in the segment.
func (w *Writer) keep(id events.RunID, p place, now *segment) {
	now.live.set(p.at)
	now.alive += int(p.size)
	w.places[id] = place{now, p.at, p.blocks, p.size, p.sum}
}

// append adds a record to the open chunk.
func (w *Writer) append(rec *record) error {
	o := &w.open
	if o.segment != nil && len(o.fields)+len(o.words)+rec.size() > chunkSize(w.before+w.news) {
		if err := w.closeSegment(); err != nil {
			return err
		}
	}
	if o.segment == nil {
		o.segment = &segment{}
		w.fresh = append(w.fresh, o.segment)
	}
	s, before := o.segment, len(o.fields)+len(o.words)
	o.fields, o.words = rec.appendTo(o.fields, o.words, o.before)
	o.before = rec.id
	size := len(o.fields) + len(o.words) - before
	w.places[rec.id] = place{s, uint32(s.records), rec.n, uint32(size), rec.sum}
	s.records++
	s.size += size
	return nil
}

func (w *Writer) closeSegment() error {
	o := &w.open
	s := o.segment
	if s == nil {
		return nil
	}
	s.live = newBitset(s.records)
	for i := range s.records {
		s.live.set(uint32(i))
	}
	s.alive = s.size
	ref, err := w.put(kindRuns, seal(kindRuns, o.fields, o.words))
	s.refs = append(s.refs, ref)
	o.segment, o.fields, o.words, o.before = nil, o.fields[:0], o.words[:0], 0
	return err
}

// longRun writes a run as pieces, in separate chunks.
func (w *Writer) longRun(r *events.Run) error {
	n := len(r.Locals)
	rec := &w.record
	for from := 0; from < n; from += pieceBlocks {
		rec.encodePiece(r, from, min(from+pieceBlocks, n))
	}
	if p, ok := w.old.places[r.ID]; ok && p.sum == rec.sum && w.kept[p.segment] != nil {
		w.keep(r.ID, p, w.kept[p.segment])
		return nil
	}
	s := &segment{records: 1, live: bitset{1}}
	for from := 0; from < n; from += pieceBlocks {
		rec.encodePiece(r, from, min(from+pieceBlocks, n))
		fields, words := rec.appendTo(nil, nil, 0)
		s.size += len(fields) + len(words)
		ref, err := w.put(kindRuns, seal(kindRuns, fields, words))
		if err != nil {
			return err
		}
		s.refs = append(s.refs, ref)
	}
	s.alive = s.size
	w.news += s.size
	w.fresh = append(w.fresh, s)
	w.places[r.ID] = place{s, 0, uint32(n), uint32(s.size), rec.sum}
	return nil
}

// Rank adds the state of the rank at position i. Call it at most once for each rank. It does not keep img.
func (w *Writer) Rank(i int, img *events.RankImage) error {
	if i < 0 || i >= len(w.states) {
		return fmt.Errorf("%w: rank %d of %d", ErrImage, i, len(w.states))
	}
	if w.hasState[i] {
		return fmt.Errorf("%w: the state of rank %s is there twice", ErrImage, w.states[i].key)
	}
	w.hasState[i] = true
	if err := encodeState(w.states[i], img); err != nil {
		return fmt.Errorf("%w: rank %s: %v", ErrImage, w.states[i].key, err)
	}
	return nil
}

// put emits a chunk that the bucket lacks.
func (w *Writer) put(kind Kind, data []byte) (ChunkRef, error) {
	hash := hashOf(data)
	ref := ChunkRef{Key: w.have[hash], Kind: kind, Bytes: len(data)}
	if ref.Key != "" {
		return ref, nil
	}
	ref.Key = Key{w.plan.Partition, ChunkKey, w.plan.Generation, hash}.String()
	w.have[hash] = ref.Key
	w.counts.New += uint64(len(data))
	if err := w.emit(ref.Key, data); err != nil {
		return ref, fmt.Errorf("chunk %s: %w", ref.Key, err)
	}
	return ref, nil
}

// Close writes the rest and returns the manifest and the run index. Pass the run index to the next Writer after the
// bucket has stored the manifest. If the write of the manifest fails, keep the old run index.
func (w *Writer) Close() (*Manifest, *RunIndex, error) {
	segments, err := w.closeRuns()
	if err != nil {
		return nil, nil, err
	}
	for _, s := range segments {
		w.refs[kindRuns] = append(w.refs[kindRuns], s.refs...)
		w.counts.Dead += uint64(s.dead())
	}
	if err = w.putDead(segments); err == nil {
		err = w.putSections(kindHoldings, w.holdings)
	}
	if err == nil {
		err = w.putSections(kindState, w.states)
	}
	var m *Manifest
	if err == nil {
		m, err = w.manifest()
	}
	if err != nil {
		return nil, nil, err
	}
	return m, &RunIndex{segments, w.places}, nil
}

// closeRuns ends the chunks of runs and selects the old chunks to keep.
func (w *Writer) closeRuns() (segments []*segment, err error) {
	changed := w.news > 0
	var stay []*segment
	for _, s := range w.old.segments {
		if now := w.kept[s]; now != nil {
			changed = changed || now.alive != s.alive
			stay = append(stay, now)
		}
	}
	gone := make(map[*segment]bool)
	if changed {
		for _, s := range condemn(stay, w.news, func(s *segment) bool { return w.waiting[s] != nil }) {
			gone[s] = true
			for i := range w.waiting[s] {
				if err := w.append(&w.waiting[s][i]); err != nil {
					return nil, err
				}
			}
		}
	}
	if err := w.closeSegment(); err != nil {
		return nil, err
	}
	for _, s := range stay {
		if s.alive > 0 && !gone[s] {
			segments = append(segments, s)
		}
	}
	return append(segments, w.fresh...), nil
}

// putDead lists the dead records of each chunk of runs.
func (w *Writer) putDead(segments []*segment) error {
	var fields, words []byte
	flush := func() error {
		if len(fields) == 0 {
			return nil
		}
		ref, err := w.put(kindDead, seal(kindDead, fields, words))
		w.refs[kindDead] = append(w.refs[kindDead], ref)
		fields, words = fields[:0], words[:0]
		return err
	}
	for _, s := range segments {
		if s.alive == s.size {
			continue
		}
		var list []byte
		dead, next := 0, 0
		for i := range s.records {
			if !s.live.has(uint32(i)) {
				list = appendUint(list, uint64(i-next))
				next = i + 1
				dead++
			}
		}
		if len(fields)+len(words)+len(list)+32 > maxRaw {
			if err := flush(); err != nil {
				return err
			}
		}
		hash := s.refs[0].hash()
		words = littleendian.Append(words, []uint64{hash.Hi, hash.Lo})
		fields = append(appendUint(fields, uint64(dead)), list...)
	}
	return flush()
}

func (w *Writer) putSections(kind Kind, ranks []*sections) error {
	return sealSections(kind, ranks, func(data []byte) error {
		ref, err := w.put(kind, data)
		w.refs[kind] = append(w.refs[kind], ref)
		return err
	})
}

func (w *Writer) manifest() (*Manifest, error) {
	ranks := slices.Clone(w.cfg.Ranks)
	slices.SortFunc(ranks, func(a, b RankState) int { return compareNames(nameOf(a.Key()), nameOf(b.Key())) })
	for i := range ranks {
		if r := &ranks[i]; len(r.Model) > maxName || len(r.Refused) > maxName {
			return nil, fmt.Errorf("%w: rank %s: a text of more than %d bytes", ErrImage, r.Key(), maxName)
		}
	}
	m := &Manifest{Format: formatVersion, Namespace: w.cfg.Namespace, Partition: w.plan.Partition,
		Generation: w.plan.Generation,
		Stream:     w.cfg.Stream, Epoch: w.cfg.Epoch, Seq: w.cfg.Seq, SeqTime: w.cfg.SeqTime, Created: w.cfg.Created,
		Writer: w.cfg.Writer, Spaces: slices.Clone(w.cfg.Spaces), Previous: w.plan.previous()}
	inline, err := sealRanks(ranks, w.inlineRanks, func(data []byte, from *RankName) error {
		ref, err := w.put(kindRanks, data)
		ref.From = from
		w.refs[kindRanks] = append(w.refs[kindRanks], ref)
		return err
	})
	if err != nil {
		return nil, err
	}
	if inline {
		m.Ranks = ranks
	}
	for _, refs := range w.refs {
		m.Chunks = append(m.Chunks, refs...)
	}
	for _, ref := range m.Chunks {
		w.counts.Bytes += uint64(ref.Bytes)
	}
	w.counts.Ranks = len(ranks)
	m.Counts = w.counts
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("%w: manifest: %v", ErrImage, err)
	}
	return m, nil
}
