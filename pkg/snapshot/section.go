package snapshot

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// What belongs to one rank, its holdings and its state, is written as sections; each names its rank and can be read
// without the others. Sections are put into chunks by a hash of the rank's name and not by its position in a list, so
// that a rank that comes or goes moves no other's.

const (
	// sectionSize is about how long a section gets before another begins. What is added at once is far less than the
	// difference to maxRaw.
	sectionSize = 64 << 10

	// groupSize is how much sections of several ranks share one chunk. A rank that changes costs about so much.
	groupSize = 256 << 10

	// maxName bounds a worker's name, so that a section fits into a chunk.
	maxName = 4096
)

// section is one stretch of one rank's records.
type section struct {
	rank          *sections
	fields, words []byte
}

// sections is what one rank's records are written to.
type sections struct {
	key  events.RankKey
	hash uint64
	done []section

	fields, words []byte       // the section being written
	before        events.RunID // of a holding: the run of the section's last record
}

func newSections(key events.RankKey) *sections {
	return &sections{key: key, hash: xxh3.HashStringSeed(string(key.Instance), uint64(key.Rank))}
}

// cutIfFull ends a section that is long enough.
func (s *sections) cutIfFull() {
	if len(s.fields)+len(s.words) >= sectionSize {
		s.cut()
	}
}

func (s *sections) cut() {
	if len(s.fields) > 0 {
		s.done = append(s.done, section{s, s.fields, s.words})
		s.fields, s.words, s.before = nil, nil, 0
	}
}

func (s *sections) addHolding(run events.RunID, n uint32, h *events.Holding) {
	for continues := false; h != nil; continues = true {
		s.fields, s.words, h = appendHolding(s.fields, s.words, h, run, s.before, n, continues)
		s.before = run
		s.cutIfFull()
	}
}

func (s section) size() int { return 4*5 + len(s.rank.key.Instance) + len(s.fields) + len(s.words) }

// sealSections puts all ranks' sections into chunks: into one if they fit into groupSize, else those whose hash begins
// with 0 apart from those that begin with 1, and so on. So a rank that grows moves few others.
func sealSections(kind Kind, ranks []*sections, put func(data []byte) error) error {
	var all []section
	for _, s := range ranks {
		s.cut()
		all = append(all, s.done...)
	}
	slices.SortStableFunc(all, func(a, b section) int {
		return cmp.Or(cmp.Compare(a.rank.hash, b.rank.hash), cmp.Compare(a.rank.key.Instance, b.rank.key.Instance),
			cmp.Compare(a.rank.key.Rank, b.rank.key.Rank))
	})
	return sealRange(kind, all, put)
}

// sealRange seals sections that are sorted by hash.
func sealRange(kind Kind, all []section, put func(data []byte) error) error {
	if len(all) == 0 {
		return nil
	}
	size := 0
	for _, s := range all {
		size += s.size()
	}
	if first, last := all[0].rank.hash, all[len(all)-1].rank.hash; size > groupSize && first != last {
		depth := bits.LeadingZeros64(first ^ last)
		at := slices.IndexFunc(all, func(s section) bool { return s.rank.hash>>(63-depth)&1 == 1 })
		if err := sealRange(kind, all[:at], put); err != nil {
			return err
		}
		return sealRange(kind, all[at:], put)
	}
	var fields, words []byte
	flush := func() error {
		data := seal(kind, fields, words)
		fields, words = fields[:0], words[:0]
		return put(data)
	}
	for _, s := range all {
		if len(fields)+len(words)+s.size() > maxRaw {
			if err := flush(); err != nil {
				return err
			}
		}
		fields = appendUint(fields, uint64(len(s.rank.key.Instance)))
		fields = append(fields, s.rank.key.Instance...)
		fields = appendUint(fields, uint64(s.rank.key.Rank))
		fields = appendUint(fields, uint64(len(s.fields)))
		fields = appendUint(fields, uint64(len(s.words)/8))
		fields = append(fields, s.fields...)
		words = append(words, s.words...)
	}
	return flush()
}

// readSections gives a chunk's sections one by one.
func readSections(u unsealed, each func(key events.RankKey, c cursor) error) error {
	c := cursor{fields: u.fields, words: u.words}
	for len(c.fields) > 0 {
		name := c.bytes(c.uint())
		rank := c.uint32()
		nfields, nwords := c.uint(), c.uint()
		in := cursor{fields: c.bytes(nfields), words: c.wordBytes(nwords)}
		if c.err != nil {
			return fmt.Errorf("%w: section: %v", ErrCorrupt, c.err)
		}
		if err := each(events.RankKey{Instance: events.WorkerID(name), Rank: events.Rank(rank)}, in); err != nil {
			return err
		}
	}
	if len(c.words) > 0 {
		return fmt.Errorf("%w: %d words too many", ErrCorrupt, len(c.words)/8)
	}
	return nil
}
