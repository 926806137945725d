package snapshot

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// The holdings and the state of a rank are written as sections. A section names the rank and is readable alone. A hash
// of the rank's name assigns sections to chunks. So a new or removed rank moves no section of another rank.

const (
	// sectionSize is the approximate maximum size of a section. A single addition is far smaller than the difference to
	// maxRaw.
	sectionSize = 64 << 10

	// groupSize is the maximum size of the sections of several ranks in a chunk. A changed rank costs about groupSize
	// bytes.
	groupSize = 256 << 10

	// maxName is the maximum length of a worker's name, so that a section fits into a chunk.
	maxName = 4096
)

// section is a part of a rank's records.
type section struct {
	rank          *sections
	fields, words []byte
}

// sections has the records of a rank.
type sections struct {
	key  events.RankKey
	hash uint64
	done []section

	fields, words []byte       // the current section
	before        events.RunID // for holdings: the run of the section's last record
}

func newSections(key events.RankKey) *sections {
	return &sections{key: key, hash: xxh3.HashStringSeed(string(key.Instance), uint64(key.Rank))}
}

// cutIfFull ends a section of at least sectionSize bytes.
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

// sealSections writes the sections of all ranks to chunks. If they exceed groupSize, it separates hashes that begin
// with 0 from hashes that begin with 1, and so on. So a growing rank moves few other ranks.
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

// sealRange writes sections in the order of hashes to chunks.
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

// readSections calls each for every section of a chunk.
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
